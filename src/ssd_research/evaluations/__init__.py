"""Benchmarks: each one scores the images of a run and leaves a folder with its findings."""
