"""Frozen autoregressive image-token models behind one interface that speaks codes."""
