"""Tests that need a GPU; run with JAX_BEAM_ATTN_TEST_GPU=1."""
