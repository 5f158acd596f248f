"""Kernels beside their floors and other kernels."""
