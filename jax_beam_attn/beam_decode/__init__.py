"""Beam-search decode attention over one shared context and each beam's own ancestors."""
