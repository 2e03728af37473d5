"""Spatially Speculative Decoding (arXiv 2606.20543): train its draft heads, decode, compare, report."""

__version__ = "0.1.0"
