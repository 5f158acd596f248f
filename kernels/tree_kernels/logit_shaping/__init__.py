"""Logits changed before they are verified: biases, penalties, tokens that are held back, masks."""

from tree_kernels.logit_shaping.dispatch import DeviceShaper
from tree_kernels.logit_shaping.layout import LARGEST, MOST_ENTRIES, Shaping, pack_shaping
from tree_kernels.logit_shaping.reference import mask_row, shape_row
from tree_kernels.logit_shaping.types import SequenceTexts

__all__ = [
    "LARGEST",
    "MOST_ENTRIES",
    "DeviceShaper",
    "SequenceTexts",
    "Shaping",
    "mask_row",
    "pack_shaping",
    "shape_row",
]
