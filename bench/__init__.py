"""Benchmarks: `python -m bench --suite beam`."""
