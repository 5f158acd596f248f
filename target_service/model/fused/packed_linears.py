"""Linear layers whose weights are packed in the order in which the CPU's matrix unit reads them.

PyTorch reorders a bf16 weight in every call of `linear`. Packed once, SmolLM2-135M's projections take 0.6 of the time
at 1 to 16 rows and its lm_head 0.3, with the same sums in the same order.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from target_service.model.fused.joined_linears import joined_parameters, siblings

# Rows that the layout is chosen for. Layouts for 1 and 16 were alike up to 16 rows, and this one is faster from 64.
_ROWS = 16
# Narrow layers that read the same input: one product for all three takes 4 % off a one-row step of SmolLM2-135M. The
# wide gate_proj and up_proj gain nothing.
_SIBLINGS = ("q_proj", "k_proj", "v_proj")


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
        """Replace `weights` [out, in] and `biases` [out], one for each layer that is joined here; no `biases` where
        layers have none."""
        weight = torch.cat(tuple(weights)) if len(weights) > 1 else weights[0]
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)
        self._bias = torch.cat(tuple(biases)) if biases else None

    def forward(self, rows: Tensor) -> Tensor:
        if rows.numel() == 0:
            return rows.new_empty(*rows.shape[:-1], self.out_features)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, "none", [], "")
        return out


class _Joint:
    """Several linear layers as one. Keeps its last product, of which each sibling takes its part."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self.packed = PackedLinear(*joined_parameters(linears))
        self.widths = [linear.out_features for linear in linears]
        self._rows: Tensor | None = None
        self._parts: Sequence[Tensor] = ()

    def part(self, index: int, rows: Tensor) -> Tensor:
        """The output of sibling `index` for `rows`."""
        if rows is not self._rows:
            self._rows, self._parts = rows, self.packed(rows).split(self.widths, dim=-1)
        return self._parts[index]

    def pack(self, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> None:
        """See `PackedLinear.pack`. Drops the last product."""
        self.packed.pack(weights, biases)
        self._rows, self._parts = None, ()


class JoinedLinear(nn.Module):
    """One of several linear layers that are computed together. Its output [..., out] is a view of their product."""

    def __init__(self, joint: _Joint, index: int) -> None:
        super().__init__()
        self.joint, self.index = joint, index

    def forward(self, rows: Tensor) -> Tensor:
        return self.joint.part(self.index, rows)


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether packing is available and pays: bf16 on a CPU whose PyTorch has oneDNN with bf16."""
    if device.type != "cpu" or dtype is not torch.bfloat16:
        return False
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    operators = torch.ops.mkldnn
    names = ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")
    return all(hasattr(operators, name) for name in names) and bool(operators._is_mkldnn_bf16_supported())


def pack_linears(model: PreTrainedModel, apart: Collection[str] = ()) -> None:
    """Replace every `nn.Linear` of `model` not named in `apart`, in place and for good. For inference only."""
    with torch.inference_mode():
        for parent in list(model.modules()):
            if linears := siblings(parent, _SIBLINGS):
                joint = _Joint(linears)
                for index, name in enumerate(_SIBLINGS):
                    setattr(parent, name, JoinedLinear(joint, index))
            for name, child in list(parent.named_children()):
                # Subclasses compute something else.
                if type(child) is nn.Linear and name not in apart:
                    setattr(parent, name, PackedLinear(child.weight, child.bias))
