"""Norms of hidden rows and of heads, computed in fp32 and rounded once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod

import torch
from torch import Tensor, nn
from torch.nn import functional

from tree_models.layers.placing import Placement
from tree_models.rank_group import rms_over_ranks
from tree_models.slots import Copy, TensorSpec, WeightSlot
from tree_models.spec import FamilyRefused, HeadNormSpec, NormSpec


class Normalization(nn.Module):
    """RMSNorm or LayerNorm over the last dimension: [.., W] -> [.., W]."""

    def __init__(self, spec: NormSpec, width: int | tuple[int, int], place: Placement) -> None:
        """`width` of the rows, or (heads, width) where each head has its own weights."""
        super().__init__()
        self.spec = spec
        shape = (width,) if isinstance(width, int) else width
        self._width = shape[-1:]
        # One and a small number is not one rounded to half precision.
        dtype = torch.float32 if spec.offset else place.dtype
        self.weight = place.empty(*shape, dtype=dtype) if spec.weight else None
        self.bias = place.empty(*shape, dtype=dtype) if spec.bias else None

    def forward(self, rows: Tensor) -> Tensor:
        """[.., W] -> [.., W], or [R, heads, W] of heads with their own weights."""
        spec, weight, bias = self.spec, self.weight, self.bias
        if spec.kind == "none":
            return rows
        if spec.kind == "affine":
            moved = rows if bias is None else rows + bias
            return moved if weight is None else moved * weight
        own = weight is not None and weight.dim() > 1
        wide = rows if weight is None or (weight.dtype == rows.dtype and not own) else rows.float()
        inner = (None, None) if own else (weight, bias)
        if spec.kind == "rms":
            normed = functional.rms_norm(wide, self._width, inner[0], spec.epsilon)
        else:
            normed = functional.layer_norm(wide, self._width, *inner, spec.epsilon)
        if weight is not None and own:
            normed = normed * weight
        return normed.to(rows.dtype)

    def slots(self, name: str, copy: Copy) -> Iterator[WeightSlot]:
        """Slots of `name`'s weight and bias."""
        for suffix, memory in (("weight", self.weight), ("bias", self.bias)):
            if memory is not None:
                changes = (self.spec.offset, self.spec.scale) if suffix == "weight" else (0.0, 1.0)
                yield self._slot(f"{name}.{suffix}", memory, copy, *changes)

    def _slot(self, name: str, memory: Tensor, copy: Copy, offset: float, scale: float) -> WeightSlot:
        as_stored = (offset, scale) == (0.0, 1.0)

        def write(tensors: Sequence[Tensor]) -> None:
            (tensor,) = tensors
            copy(memory, tensor if as_stored else (tensor + offset) * scale)

        held = memory.detach() if as_stored else None
        return WeightSlot({name: TensorSpec(tuple(memory.shape), memory.dtype)}, write, held)


class HeadNorm(nn.Module):
    """The norm of all queries or of all keys: [R, heads, D] -> [R, heads, D]."""

    def __init__(self, spec: HeadNormSpec, heads: int, width: int, place: Placement) -> None:
        super().__init__()
        self._joined = spec.scope == "all_heads"
        shapes = {"head": width, "each_head": (heads, width), "all_heads": heads * width}
        # Where no weights are published, ones stand for them, so that there is one form.
        self._published = spec.norm.weight
        own = replace(spec.norm, weight=True)
        self.norm = Normalization(own, shapes[spec.scope], place)  # type: ignore[arg-type]
        if not self._published and self.norm.weight is not None:
            self.norm.weight.data.fill_(1.0)
        self._shape = heads, width
        # Those that share a norm of all heads.
        self.ranks = place.ranks if self._joined else None
        if self.ranks is not None and spec.norm.kind != "rms":
            raise FamilyRefused(f"{self.ranks.size} ranks: a mean over all heads is not divided")

    def forward(self, heads: Tensor) -> Tensor:
        """[R, heads, D] -> [R, heads, D]."""
        if not self._joined:
            normed: Tensor = self.norm(heads)
            return normed
        flat = heads.reshape(len(heads), prod(self._shape))
        if self.ranks is not None:
            weight = self.norm.weight
            assert weight is not None, "heads are normed with weights, perhaps of ones"
            flat = (rms_over_ranks(flat, self.norm.spec.epsilon, self.ranks) * weight.float()).to(heads.dtype)
        else:
            flat = self.norm(flat)
        return flat.view(-1, *self._shape)

    def slots(self, name: str, copy: Copy, order: Tensor | None) -> Iterator[WeightSlot]:
        """Slots of `name`; `order` [heads * D] of the numbers of all heads, if it is not that of the tensor."""
        if not self._published:
            return
        weight = self.norm.weight
        assert weight is not None, "heads are normed with weights, perhaps of ones"
        if order is None:
            yield from self.norm.slots(name, copy)
            return
        # The order is the same in every head.
        chosen = order[: weight.shape[-1]] if weight.numel() == weight.shape[-1] and not self._joined else order

        def write(memory: Tensor, tensor: Tensor) -> None:
            copy(memory, tensor.flatten()[chosen.to(tensor.device)].view(memory.shape))

        yield from self.norm.slots(name, write)
