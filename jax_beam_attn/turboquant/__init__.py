"""Attention over a paged cache of rotated low-bit keys and low-bit values."""
