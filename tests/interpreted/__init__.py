"""Tests of the Triton kernels' logic on the CPU.

They need a process started with TRITON_INTERPRET=1; `tests/test_interpreted.py` starts one.
"""
