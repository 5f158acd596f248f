"""A head's static passes by `tree_kernels.linear`: a layer in four launches plus attention.

Weights with the same input are joined in one tensor. The modules keep views of it, so the head itself still works.
Heads with other layers than those of published EAGLE-3 heads run their own code.

A pass of few rows takes as long as reading the weights, so it may use copies in int8: the head's predictions may be a
little worse, and the target's output does not change. Passes of many rows, bound by compute, use the head's own
weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from draft_service.eagle.head import EagleHead
from draft_service.eagle.layers import Attention, FusedLayer, Layer, Mlp
from draft_service.neural.cuda_graphs.attention import StaticAttend
from draft_service.neural.network import RowOutput
from tree_kernels.linear import (
    HeadInputs,
    HeadRows,
    Int8Weight,
    Norm,
    RowLinears,
    ScaledRows,
    Weight,
    many_row_linears,
    row_linears,
)

# Above this, cuBLAS with one of our kernels after each product is as fast.
MAX_ROWS = 64
# Columns of the smallest tile.
_HEAD_MULTIPLE = 16


@dataclass(frozen=True, slots=True)
class _Parts:
    """Weights of a layer, [out, in] each."""

    qkv: Weight
    qkv_bias: Tensor | None
    out: Weight
    out_bias: Tensor | None
    inner_norm: Norm
    gate_up: Weight
    down: Weight
    down_bias: Tensor | None

    def quantized(self) -> _Parts:
        """The layer with int8 copies of its weights, where their widths are even."""
        qkv, out, gate_up, down = map(_quantized, (self.qkv, self.out, self.gate_up, self.down))
        return replace(self, qkv=qkv, out=out, gate_up=gate_up, down=down)


@dataclass(frozen=True, slots=True)
class _Layers:
    """The layers, and the kernels for their products."""

    linears: RowLinears
    parts: list[_Parts]
    # [R, 1] sums of squares that give a scale of 1, for rows that are normed already; None for kernels that norm whole
    # rows.
    squares: Tensor | None


class FusedHead:
    """An EAGLE-3 head's passes by fused kernels, with attention over a static plan. See the module."""

    def __init__(self, head: EagleHead, few: RowLinears, many: RowLinears, *, int8: bool = False) -> None:
        """`can_be_fused` must hold of the head, whose weights are used, and joined. `few` are the kernels for up to
        `MAX_ROWS` rows, for which `int8` uses copies of the weights; `many` are for more, and norm whole rows first."""
        self._head = head
        first = head.layers[0]
        assert isinstance(first, FusedLayer)
        self._before_residual = head.config.norm_before_residual
        self._last_norm = _norm(head.norm)
        parts = [_parts_of(layer) for layer in head.layers if isinstance(layer, FusedLayer | Layer)]
        self._input_norms = [_norm(layer.input_layernorm) for layer in head.layers[1:] if isinstance(layer, Layer)]
        weight, rope = head.embed_tokens.weight, head.rotary
        frequencies = rope.inverse_bits.view(torch.float32)
        self._inputs = HeadInputs(
            weight.detach(),
            _norm(first.input_layernorm),
            _norm(first.hidden_norm),
            # [D]: the same for both halves of a head.
            torch.cat([frequencies, frequencies]),
            rope.scaling,
        )
        self._eps = head.config.rms_norm_eps
        width = 2 * head.config.hidden_size
        squares = torch.full((MAX_ROWS, 1), width * (1.0 - self._eps), device=weight.device)
        self._many = _Layers(many, parts, None)
        # For few rows; None to use the head's own.
        lm_head = _quantized(head.lm_head.weight.detach()) if int8 else None
        self._int8_lm_head = lm_head if isinstance(lm_head, Int8Weight) else None
        self._few = _Layers(few, [part.quantized() for part in parts] if int8 else parts, squares)

    def forward(self, token_ids: Tensor, features: Tensor, positions: Tensor, attend: StaticAttend) -> RowOutput:
        """See `EagleHead.forward`; token_ids and positions [R], features [R, H]."""
        layers, head = self._few if len(token_ids) <= MAX_ROWS else self._many, self._head
        linears = layers.linears
        taken = linears.head_input(token_ids, features, positions, self._inputs)
        squares = None if layers.squares is None else layers.squares[: len(taken.rows)]
        scaled = ScaledRows(taken.rows, squares, self._eps)
        # The second half of the input is the normed features.
        hidden = taken.rows[:, features.shape[1] :].contiguous() if self._before_residual else features
        for index, parts in enumerate(layers.parts):
            heads = HeadRows(taken.cosines, taken.sines, attend.slots, *attend.pools(index))
            query = linears.rotary_linear(scaled, parts.qkv, parts.qkv_bias, heads, parts.out)
            attended = attend.seen(index, query).flatten(1)
            hidden, inner = linears.add_linear(attended, parts.out, parts.out_bias, hidden, parts.inner_norm)
            assert inner is not None
            gated = linears.gated_linear(inner, parts.gate_up)
            following = self._input_norms[index] if index < len(self._input_norms) else None
            hidden, after = linears.add_linear(gated, parts.down, parts.down_bias, hidden, following)
            scaled = after or scaled
        lm_input = linears.norm_rows(hidden, self._last_norm)
        return RowOutput(lm_input if head.config.norm_output else hidden, lm_input)

    def logits(self, lm_input: Tensor) -> Tensor:
        """[R, H] to logits [R, V'] over the draft vocabulary."""
        if self._int8_lm_head is not None and len(lm_input) <= MAX_ROWS:
            return self._few.linears.add_linear(lm_input, self._int8_lm_head)[0]
        return self._head.logits(lm_input)


def fused(head: EagleHead, *, int8: bool) -> FusedHead | None:
    """The head by the kernels of its device; None without support: on a CPU, in fp32, or for other layers."""
    weight = head.embed_tokens.weight
    if not weight.is_cuda or weight.element_size() != 2 or not can_be_fused(head):
        return None
    return FusedHead(head, row_linears(weight.device), many_row_linears(weight.device), int8=int8)


def can_be_fused(head: EagleHead) -> bool:
    """Whether the kernels support the head's layers."""
    config = head.config
    plain = config.kind == "eagle3" and not config.qk_norm and not config.mlp_bias
    return plain and config.head_dim % _HEAD_MULTIPLE == 0


def _norm(module: nn.Module) -> Norm:
    assert isinstance(module, nn.RMSNorm) and module.eps is not None
    return Norm(module.weight.detach(), module.eps)


def _parts_of(layer: FusedLayer | Layer) -> _Parts:
    attention, mlp = layer.self_attn, layer.mlp
    assert isinstance(attention, Attention) and isinstance(mlp, Mlp), "see `can_be_fused`"
    products = [attention.q_proj, attention.k_proj, attention.v_proj]
    biases = [product.bias for product in products if product.bias is not None]
    return _Parts(
        qkv=_joined(products),
        qkv_bias=torch.cat([bias.detach() for bias in biases]) if biases else None,
        out=attention.o_proj.weight.detach(),
        out_bias=_bias_of(attention.o_proj),
        inner_norm=_norm(layer.post_attention_layernorm),
        gate_up=_joined([mlp.gate_proj, mlp.up_proj]),
        down=mlp.down_proj.weight.detach(),
        down_bias=_bias_of(mlp.down_proj),
    )


def _quantized(weight: Weight) -> Weight:
    """A copy in int8; the weight itself where it has an odd number of columns, which int8 weights cannot have."""
    assert isinstance(weight, Tensor), "a head's own weight"
    return weight if weight.shape[1] % 2 else Int8Weight.of(weight)


def _bias_of(product: nn.Linear) -> Tensor | None:
    return None if product.bias is None else product.bias.detach()


def _joined(products: list[nn.Linear]) -> Tensor:
    """The weights of products, concatenated by rows; the products keep views of them."""
    joint = torch.cat([product.weight.detach() for product in products])
    begin = 0
    for product in products:
        end = begin + product.out_features
        product.weight.data = joint[begin:end]
        begin = end
    return joint
