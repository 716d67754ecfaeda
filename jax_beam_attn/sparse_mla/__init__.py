"""Multi-head latent attention decode over selected tokens of a paged FP8 cache."""
