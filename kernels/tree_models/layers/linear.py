"""A linear layer: its shape, and the format of its weight. Layers that read the same input lie in one product.

Formats are `PlainWeight`, in 16 or 32 bits, and `PackedWeight`, which a CPU multiplies faster. Another format has a
`product`, and `slots` that write it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from tree_models.layers.placing import Placement
from tree_models.slots import Copy, TensorSpec, WeightSlot, in_place


class PlainWeight(nn.Module):
    """A weight [out, in] as it is published, and a bias [out]."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias

    def product(self, rows: Tensor) -> Tensor:
        """[.., in] -> [.., out]."""
        return functional.linear(rows, self.weight, self.bias)

    def slots(
        self, names: Sequence[str], parts: Sequence[int], copy: Copy, order: Tensor | None
    ) -> Iterator[WeightSlot]:
        """Slots of `parts` rows each, in the order of `names`."""
        ends = [0, *itertools.accumulate(parts)]
        for name, (start, end) in zip(names, itertools.pairwise(ends), strict=True):
            part = None if order is None else order[start:end] - start
            yield in_place(f"{name}.weight", self.weight[start:end], copy, part)
            if self.bias is not None:
                yield in_place(f"{name}.bias", self.bias[start:end], copy, part)


class BlockLinear(nn.Module):
    """A product of each part of rows by itself, perhaps with a bias: [R, blocks * in] to outputs side by side, each of
    which has all blocks.

    Weights [blocks, in, out] and biases [blocks, out] are published by output, as `NAME_weight` and `NAME_bias`; or
    weights [blocks, out, in] of all outputs together, where there is no bias.
    """

    def __init__(
        self, blocks: int, inputs: int, outputs: Sequence[int], place: Placement, *, bias: bool = True
    ) -> None:
        super().__init__()
        self._blocks, self._outputs = blocks, list(outputs)
        self.weight = place.empty(blocks, inputs, sum(outputs)) if bias else place.empty(blocks, sum(outputs), inputs)
        self.bias = place.empty(blocks, sum(outputs)) if bias else None

    def forward(self, rows: Tensor) -> Tensor:
        """[R, blocks * in] -> [R, blocks * sum of widths]."""
        parts = rows.unflatten(1, (self._blocks, -1)).transpose(0, 1)  # type: ignore[no-untyped-call]
        if self.bias is None:
            made = torch.bmm(parts, self.weight.transpose(1, 2)).transpose(0, 1)
        else:
            made = torch.baddbmm(self.bias[:, None], parts, self.weight).transpose(0, 1)
        return torch.cat([part.flatten(1) for part in torch.split(made, self._outputs, dim=-1)], dim=-1)

    def slots(self, names: Sequence[str], copy: Copy) -> Iterator[WeightSlot]:
        """Slots of the outputs' weights and biases, or of the one weight."""
        if self.bias is None:
            (name,) = names
            yield in_place(f"{name}_weight", self.weight, copy)
            return
        of_outputs = (torch.split(one, self._outputs, dim=-1) for one in (self.weight, self.bias))
        for name, weight, bias in zip(names, *of_outputs, strict=True):
            yield in_place(f"{name}_weight", weight, copy)
            yield in_place(f"{name}_bias", bias, copy)


class Adapter(nn.Module):
    """What is added to a product: of each output a product of a few numbers of the rows (LoRA, arXiv 2106.09685):
    [R, in] -> [R, sum of outputs]. Published are both products of an output, as `NAME.0` and `NAME.1`."""

    def __init__(self, inputs: int, width: int, outputs: Sequence[int], place: Placement) -> None:
        super().__init__()
        self._width, self.narrow = width, Linear(inputs, [width] * len(outputs), place)
        self.wide = nn.ModuleList(Linear(width, [count], place) for count in outputs)

    def forward(self, rows: Tensor) -> Tensor:
        """[R, in] -> [R, sum of outputs]."""
        parts = torch.split(self.narrow(rows), self._width, dim=-1)
        return torch.cat([wide(part) for wide, part in zip(self.wide, parts, strict=True)], dim=-1)

    def slots(self, names: Sequence[str], copy: Copy) -> Iterator[WeightSlot]:
        """Slots of both products of each output."""
        yield from self.narrow.slots([f"{name}.0" for name in names], copy)
        for name, wide in zip(names, self.wide, strict=True):
            assert isinstance(wide, Linear)
            yield from wide.slots([f"{name}.1"], copy)


class PackedWeight(nn.Module):
    """A bf16 weight in the order in which the CPU's matrix unit reads it, for inference.

    PyTorch reorders a bf16 weight in every call of `linear`. Packed once, SmolLM2-135M's projections take 0.6 of the
    time at 1 to 16 rows and its lm_head 0.3, with the same sums in the same order.
    """

    def __init__(self, out_features: int, in_features: int, *, bias: bool) -> None:
        super().__init__()
        self.out_features, self.in_features, self.has_bias = out_features, in_features, bias
        self._weight: Tensor | None = None
        self._bias: Tensor | None = None

    def pack(self, weights: Sequence[Tensor], biases: Sequence[Tensor], order: Tensor | None = None) -> None:
        """Replace weights [.., in] and biases [..], one for each layer in this product; no `biases` where layers have
        none. `order` of all rows, if they are not multiplied in the order that they have."""
        weight = torch.cat(tuple(weights)) if len(weights) > 1 else weights[0].detach()
        bias = torch.cat(tuple(biases)) if biases else None
        if order is not None:
            weight, bias = weight[order], None if bias is None else bias[order]
        # Rows that the packed layout is chosen for. Layouts for 1 and 16 were alike up to 16 rows, and this one is
        # faster from 64 (SmolLM2-135M, two EPYC cores).
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, 16)
        self._bias = None if bias is None else bias.detach()

    def product(self, rows: Tensor) -> Tensor:
        """[.., in] -> [.., out]."""
        if rows.numel() == 0:
            return rows.new_empty(*rows.shape[:-1], self.out_features)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, "none", [], "")
        return out

    def slots(
        self, names: Sequence[str], parts: Sequence[int], copy: Copy, order: Tensor | None
    ) -> Iterator[WeightSlot]:
        """One slot of all parts, since they are packed together."""
        del copy
        shapes: dict[str, tuple[int, ...]] = {
            f"{name}.weight": (rows, self.in_features) for name, rows in zip(names, parts, strict=True)
        }
        if self.has_bias:
            shapes |= {f"{name}.bias": (rows,) for name, rows in zip(names, parts, strict=True)}
        specs = {name: TensorSpec(shape, torch.bfloat16) for name, shape in shapes.items()}
        count = len(names)
        yield WeightSlot(specs, lambda tensors: self.pack(tensors[:count], tensors[count:], order))


class Linear(nn.Module):
    """Linear layers of one input as one product: [.., in] -> [.., sum of `parts`]."""

    def __init__(self, inputs: int, parts: Sequence[int], place: Placement, *, bias: bool = False) -> None:
        super().__init__()
        self.parts = tuple(parts)
        outputs = sum(parts)
        self.format: PlainWeight | PackedWeight
        if place.packed:
            self.format = PackedWeight(outputs, inputs, bias=bias)
        else:
            self.format = PlainWeight(place.empty(outputs, inputs), place.empty(outputs) if bias else None)

    def forward(self, rows: Tensor) -> Tensor:
        """[.., in] -> [.., out]."""
        return self.format.product(rows)

    @property
    def plain(self) -> PlainWeight | None:
        """The weight where it lies as published; None in another format."""
        return self.format if isinstance(self.format, PlainWeight) else None

    @property
    def weight(self) -> nn.Parameter:
        """[sum of `parts`, in], which must not be packed."""
        assert self.plain is not None, "the weight is packed"
        return self.plain.weight

    def slots(
        self, names: Sequence[str], copy: Copy, order: Tensor | None = None, parts: Sequence[int] | None = None
    ) -> Iterator[WeightSlot]:
        """Slots of the published tensors `names`, one for each part or one for all, or of so many rows each as `parts`
        has. `order` of the output rows, if it is not that of the tensors."""
        parts = parts or (self.parts if len(names) > 1 else (sum(self.parts),))
        return self.format.slots(names, parts, copy, order)


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether packing is available and pays: bf16 on a CPU whose PyTorch has oneDNN with bf16."""
    if device.type != "cpu" or dtype is not torch.bfloat16:
        return False
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    operators = torch.ops.mkldnn
    names = ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")
    return all(hasattr(operators, name) for name in names) and bool(operators._is_mkldnn_bf16_supported())
