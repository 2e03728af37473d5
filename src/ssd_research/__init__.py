"""Spatially Speculative Decoding (arXiv 2606.20543): train draft heads, decode, compare."""

__version__ = "0.1.0"
