"""A head's passes of few rows by `tree_kernels.linear`: a layer in four launches and its attention.

Weights that share their input become one tensor, of which the modules keep views, so that the head is what it was for
everybody else. Heads whose layers are built in another way than EAGLE-3's are published run their own code.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from draft_service.eagle.head import EagleHead, HeadOutput
from draft_service.eagle.layers import FusedLayer, Layer
from draft_service.neural.cuda_graphs.attention import StaticAttend
from tree_kernels.linear import HeadInputs, HeadRows, Norm, RowLinears, ScaledRows, row_linears

# Above, cuBLAS multiplies as fast, and what is fused matters less.
MAX_ROWS = 64
# Columns of the smallest tile.
_HEAD_MULTIPLE = 16


@dataclass(frozen=True, slots=True)
class _Parts:
    """Weights of a layer, [out, in] each."""

    qkv: Tensor
    qkv_bias: Tensor | None
    out: nn.Linear
    inner_norm: Norm
    gate_up: Tensor
    down: nn.Linear


class FusedHead:
    """See the module. Takes up to `MAX_ROWS` rows, and attention over a static plan."""

    def __init__(self, head: EagleHead, linears: RowLinears) -> None:
        """`can_be_fused` must hold of the head."""
        self._head, self._linears = head, linears
        first = head.layers[0]
        assert isinstance(first, FusedLayer)
        self._before_residual = head.config.norm_before_residual
        self._last_norm = _norm(head.norm)
        self._parts = [_parts_of(layer) for layer in head.layers if isinstance(layer, FusedLayer | Layer)]
        self._input_norms = [_norm(layer.input_layernorm) for layer in head.layers[1:] if isinstance(layer, Layer)]
        weight, rope = head.embed_tokens.weight, head.rotary
        frequencies = rope.inverse_bits.view(torch.float32)
        self._inputs = HeadInputs(
            weight.detach(),
            _norm(first.input_layernorm),
            _norm(first.hidden_norm),
            # [D]: both halves of a head turn alike.
            torch.cat([frequencies, frequencies]),
            rope.scaling,
        )
        # Of rows that are normed already: what their squares must be for a scale of 1.
        self._eps = head.config.rms_norm_eps
        width = 2 * head.config.hidden_size
        self._squares = torch.full((MAX_ROWS, 1), width * (1.0 - self._eps), device=weight.device)

    def forward(self, token_ids: Tensor, features: Tensor, positions: Tensor, attend: StaticAttend) -> HeadOutput:
        """See `EagleHead.forward`; token_ids and positions [R], features [R, H]."""
        linears, head = self._linears, self._head
        taken = linears.head_input(token_ids, features, positions, self._inputs)
        scaled = ScaledRows(taken.rows, self._squares[: len(taken.rows)], self._eps)
        # The second half are the normed features.
        hidden = taken.rows[:, features.shape[1] :].contiguous() if self._before_residual else features
        for index, parts in enumerate(self._parts):
            heads = HeadRows(taken.cosines, taken.sines, attend.slots, *attend.pools(index))
            query = linears.rotary_linear(scaled, parts.qkv, parts.qkv_bias, heads, parts.out.weight)
            attended = attend.seen(index, query).flatten(1)
            hidden, inner = linears.add_linear(attended, parts.out.weight, parts.out.bias, hidden, parts.inner_norm)
            assert inner is not None
            gated = linears.gated_linear(inner, parts.gate_up)
            following = self._input_norms[index] if index < len(self._input_norms) else None
            hidden, after = linears.add_linear(gated, parts.down.weight, parts.down.bias, hidden, following)
            scaled = after or scaled
        lm_input = linears.norm_rows(hidden, self._last_norm)
        return HeadOutput(lm_input if head.config.norm_output else hidden, lm_input)


def fused(head: EagleHead) -> FusedHead | None:
    """The head by the kernels of its device, None where they do not take it: on a CPU, in fp32, or built otherwise."""
    weight = head.embed_tokens.weight
    if not weight.is_cuda or weight.element_size() != 2 or not can_be_fused(head):
        return None
    return FusedHead(head, row_linears(weight.device))


def can_be_fused(head: EagleHead) -> bool:
    """Whether its layers are those that the kernels know."""
    config = head.config
    plain = config.kind == "eagle3" and not config.qk_norm and not config.mlp_bias
    return plain and config.head_dim % _HEAD_MULTIPLE == 0


def _norm(module: nn.Module) -> Norm:
    assert isinstance(module, nn.RMSNorm) and module.eps is not None
    return Norm(module.weight.detach(), module.eps)


def _parts_of(layer: FusedLayer | Layer) -> _Parts:
    attention, mlp = layer.self_attn, layer.mlp
    products = [attention.q_proj, attention.k_proj, attention.v_proj]
    biases = [product.bias for product in products if product.bias is not None]
    return _Parts(
        qkv=_joined(products),
        qkv_bias=torch.cat([bias.detach() for bias in biases]) if biases else None,
        out=attention.o_proj,
        inner_norm=_norm(layer.post_attention_layernorm),
        gate_up=_joined([mlp.gate_proj, mlp.up_proj]),
        down=mlp.down_proj,
    )


def _joined(products: list[nn.Linear]) -> Tensor:
    """The weights of products below each other; the products keep views of them."""
    joint = torch.cat([product.weight.detach() for product in products])
    begin = 0
    for product in products:
        end = begin + product.out_features
        product.weight.data = joint[begin:end]
        begin = end
    return joint
