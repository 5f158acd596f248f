"""Kernels against their floors and their peers."""
