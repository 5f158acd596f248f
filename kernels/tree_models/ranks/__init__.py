"""A decoder over several ranks: each has a share of the heads, of every MLP's width and of the vocabulary (tensor
parallelism, arXiv 1909.08053)."""
