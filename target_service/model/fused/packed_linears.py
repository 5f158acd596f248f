"""Linear layers whose weights lie in the order that the CPU's matrix unit reads.

PyTorch reorders a bf16 weight inside every call of `linear`. Ordered once, SmolLM2-135M's projections take 0.6 of the
time at 1 to 16 rows and its lm_head 0.3, with the same sums in the same order.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

# Rows that the layout is chosen for. Layouts for 1 and 16 were alike up to 16 rows, and this one wins from 64.
_ROWS = 16


# Narrow layers that read the same input: one product for all three takes 4 % off a one-row step of SmolLM2-135M. The
# wide gate_proj and up_proj gain nothing.
_SIBLINGS = ("q_proj", "k_proj", "v_proj")


class Packed(Protocol):
    """One or several linear layers of the same input in one packed weight."""

    @property
    def in_features(self) -> int: ...
    @property
    def has_bias(self) -> bool: ...
    def pack(self, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> None:
        """Take other `weights` [out, in] and `biases` [out], one of each layer; `biases` empty where there are none."""


class PackedLinear(nn.Module):
    """`nn.Linear` for inference in bf16 on a CPU. Input [..., in], output [..., out]."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """`weight` [out, in] and `bias` [out] as in `nn.Linear`."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS)
        self._bias = None if bias is None else bias.detach()

    @property
    def has_bias(self) -> bool:
        return self._bias is not None

    def pack(self, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> None:
        """See `Packed`; several layers are joined."""
        weight = torch.cat(tuple(weights)) if len(weights) > 1 else weights[0]
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)
        self._bias = torch.cat(tuple(biases)) if biases else None

    def forward(self, rows: Tensor) -> Tensor:
        if rows.numel() == 0:
            return rows.new_empty(*rows.shape[:-1], self.out_features)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, "none", [], "")
        return out


class _Joint:
    """Several linear layers as one. Remembers its last input, which the siblings ask for one after the other."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        weight = torch.cat([linear.weight for linear in linears])
        biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
        self._packed = PackedLinear(weight, torch.cat(biases) if biases else None)
        self.widths = [linear.out_features for linear in linears]
        self._rows: Tensor | None = None
        self._parts: Sequence[Tensor] = ()

    def part(self, index: int, rows: Tensor) -> Tensor:
        """What sibling `index` makes of `rows`."""
        if rows is not self._rows:
            self._rows, self._parts = rows, self._packed(rows).split(self.widths, dim=-1)
        return self._parts[index]

    @property
    def in_features(self) -> int:
        return self._packed.in_features

    @property
    def has_bias(self) -> bool:
        return self._packed.has_bias

    def pack(self, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> None:
        """See `Packed`. What was computed last is forgotten."""
        self._packed.pack(weights, biases)
        self._rows, self._parts = None, ()


class JoinedLinear(nn.Module):
    """One of several linear layers that are computed together. Its output [..., out] is a view into theirs."""

    def __init__(self, joint: _Joint, index: int) -> None:
        super().__init__()
        self.joint, self.index = joint, index

    def forward(self, rows: Tensor) -> Tensor:
        return self.joint.part(self.index, rows)


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether packing pays and is there: bf16 on a CPU whose PyTorch has oneDNN with bf16."""
    if device.type != "cpu" or dtype is not torch.bfloat16:
        return False
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    operators = torch.ops.mkldnn
    names = ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")
    return all(hasattr(operators, name) for name in names) and bool(operators._is_mkldnn_bf16_supported())


def pack_linears(model: PreTrainedModel, apart: Collection[str] = ()) -> None:
    """Replace every `nn.Linear` of `model` but those that are named in `apart`, in place. For inference only, and for
    good."""
    with torch.inference_mode():
        for parent in list(model.modules()):
            _join_siblings(parent)
            for name, child in list(parent.named_children()):
                # Subclasses compute something else.
                if type(child) is nn.Linear and name not in apart:
                    setattr(parent, name, PackedLinear(child.weight, child.bias))


def _join_siblings(parent: nn.Module) -> None:
    """Join the children named in `_SIBLINGS`, where all are plain linear layers of one kind."""
    children = [getattr(parent, name, None) for name in _SIBLINGS]
    linears = [child for child in children if isinstance(child, nn.Linear) and type(child) is nn.Linear]
    if len(linears) < len(_SIBLINGS):
        return
    # One of them with a bias and one without would need a bias of zeros; no served family has that.
    if len({(linear.in_features, linear.bias is None) for linear in linears}) == 1:
        joint = _Joint(linears)
        for index, name in enumerate(_SIBLINGS):
            setattr(parent, name, JoinedLinear(joint, index))
