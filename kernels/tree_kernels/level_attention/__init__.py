"""Attention of one level of growing trees, in one launch."""

from tree_kernels.level_attention.dispatch import LevelAttention
from tree_kernels.level_attention.types import TailLevel

__all__ = ["LevelAttention", "TailLevel"]
