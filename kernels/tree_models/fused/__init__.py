"""Fused forms of layers: few launches of `tree_kernels.linear`, checked against the plain form on random rows."""
