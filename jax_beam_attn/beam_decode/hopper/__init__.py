"""The Hopper kernel's roles, see `kernel_hopper.py`."""
