"""MXFP4 experts as plain ones: four-bit numbers in blocks with a power of two each, computed in bf16 without rounding.

gpt-oss is published so: of `gate_up_proj` [E, H, 2 * I] there are `gate_up_proj_blocks` [E, 2 * I, H / 32, 16] and
`gate_up_proj_scales` [E, 2 * I, H / 32], both of bytes, and of `down_proj` likewise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tree_models.weights.checkpoint import Stored, StoredTensor, TensorSource, WeightsRefused

_BLOCKS, _SCALES = "_blocks", "_scales"


class DequantisedExperts:
    """A checkpoint in which each pair of blocks and scales is one tensor in bf16. A `TensorSource`."""

    def __init__(self, checkpoint: TensorSource) -> None:
        """Raises `WeightsRefused` for blocks and scales that do not fit each other."""
        self._checkpoint, self.stored = checkpoint, dict(checkpoint.stored)
        self._packed = set()
        for blocks in [name for name in self.stored if name.endswith(_BLOCKS)]:
            name = blocks.removesuffix(_BLOCKS)
            if name + _SCALES in self.stored and name not in self.stored:
                self.stored[name] = _plain(blocks, self.stored.pop(blocks), self.stored.pop(name + _SCALES))
                self._packed.add(name)

    def read(self, name: str) -> Tensor:
        """See `TensorSource.read`."""
        if name not in self._packed:
            return self._checkpoint.read(name)
        return dequantised(self._checkpoint.read(name + _BLOCKS), self._checkpoint.read(name + _SCALES))


def dequantised(blocks: Tensor, scales: Tensor) -> Tensor:
    """[E, in, out] in bf16, of blocks [E, out, in / 32, 16] and scales [E, out, in / 32] in uint8. Of a byte the lower
    half is first. Its values lie in the order of the blocks."""
    # E2M1 (OCP Microscaling Formats 1.0): a sign, two bits of exponent and one of mantissa.
    magnitudes = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), dtype=torch.bfloat16)
    numbers = torch.cat([magnitudes, -magnitudes])
    byte = torch.arange(256)
    # Both numbers of a byte in 32 bits, so that a byte is looked up once.
    pairs = torch.stack([numbers[byte & 15], numbers[byte >> 4]], dim=1).view(torch.int32).flatten()
    found = torch.empty(blocks.shape, dtype=torch.int32)
    # One expert at a time, since indices are four times as large as bytes.
    for own, into in zip(blocks, found, strict=True):
        torch.index_select(pairs, 0, own.flatten().int(), out=into.view(-1))
    # Exponents in E8M0, whose bias is 127.
    factors = torch.ldexp(torch.ones(256), byte - 127).bfloat16()[scales.int()]
    values = found.view(torch.bfloat16).mul_(factors[..., None])
    return values.flatten(2).transpose(1, 2)


def _plain(name: str, blocks: Stored, scales: Stored) -> Stored:
    if blocks.dtype != "U8" or scales.dtype != "U8":
        raise WeightsRefused(f"{name} and its scales are {blocks.dtype} and {scales.dtype}, expected bytes")
    # A block of 32 numbers has 16 bytes.
    if len(blocks.shape) != 4 or blocks.shape[:-1] != scales.shape or blocks.shape[-1] != 16:
        shapes = list(blocks.shape), list(scales.shape)
        raise WeightsRefused(f"{name} is {shapes[0]} and its scales are {shapes[1]}, expected [E, out, in / 32, 16]")
    experts, outputs, count, size = blocks.shape
    return StoredTensor((experts, 2 * size * count, outputs), "BF16")
