"""Trees that grow on the device a level at a time."""

from tree_kernels.growth.dispatch import grow, keep, likeliest, make_growth, make_kept, race_winners
from tree_kernels.growth.types import Children, Growth, Race

__all__ = ["Children", "Growth", "Race", "grow", "keep", "likeliest", "make_growth", "make_kept", "race_winners"]
