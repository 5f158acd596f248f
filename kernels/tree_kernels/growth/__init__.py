"""Trees that grow on the device a level at a time."""

from tree_kernels.growth.dispatch import grow, gumbel_max_winners, keep, likeliest, make_growth, make_kept
from tree_kernels.growth.types import COLDEST, GREEDY_TEMPERATURE, Children, Growth, GumbelMax, VocabularyRanks

__all__ = [
    "COLDEST",
    "GREEDY_TEMPERATURE",
    "Children",
    "Growth",
    "GumbelMax",
    "VocabularyRanks",
    "grow",
    "gumbel_max_winners",
    "keep",
    "likeliest",
    "make_growth",
    "make_kept",
]
