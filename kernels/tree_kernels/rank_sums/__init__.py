"""Sums of rows over GPUs that read each other's memory, each with what a layer does behind it, in one launch."""

from tree_kernels.rank_sums.definition import added_parts
from tree_kernels.rank_sums.memory import PLACES, SharedParts

__all__ = ["PLACES", "SharedParts", "added_parts"]
