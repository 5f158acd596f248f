"""Kernels in Gluon, Triton's language below Triton, for what Hopper's own instructions make faster.

Each computes what a kernel in Triton does, which every other device runs; only compiled, never interpreted.
"""
