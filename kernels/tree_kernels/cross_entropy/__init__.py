"""The loss of rows of logits against whole distributions, and its gradient, which overwrites the logits."""

from tree_kernels.cross_entropy.dispatch import soft_cross_entropy_

__all__ = ["soft_cross_entropy_"]
