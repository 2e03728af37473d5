"""Decoding algorithms: each one file, on the same state, accept rules and noise."""
