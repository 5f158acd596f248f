"""The definition: a text's tokens run one after the other, in fp64."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tree_kernels.recurrence.types import HeadsLayout, ShortConvolution, StateRule, StateShape


def convolve_text(inputs: Tensor, convolution: ShortConvolution) -> Tensor:
    """The convolution's outputs [T, C] of a whole text's inputs [T, C]."""
    weight = convolution.weight.double()
    taps = weight.shape[1]
    padded = functional.pad(inputs.double(), (0, 0, taps - 1, 0))
    outputs = sum(weight[:, tap] * padded[tap : tap + len(inputs)] for tap in range(taps))
    assert isinstance(outputs, Tensor)
    if convolution.bias is not None:
        outputs = outputs + convolution.bias.double()
    return functional.silu(outputs) if convolution.silu else outputs


def run_text(
    inputs: Tensor, gates: Tensor, convolution: ShortConvolution, shape: StateShape, layout: HeadsLayout
) -> Tensor:
    """Outputs of the heads [T, H, Dv] of a whole text, token by token.

    Args:
        inputs: [T, C], what the convolution reads.
        gates: [T, G], see `StateShape.gates`.
        convolution, shape, layout: of the layer.
    """
    queries, keys, values = split_heads(convolve_text(inputs, convolution), shape, layout)
    decays, betas = gates.double().chunk(2, dim=-1)
    state = torch.zeros(shape.heads, shape.key_width, shape.value_width, dtype=torch.float64)
    outputs = []
    for query, key, value, decay, beta in zip(queries, keys, values, decays, betas, strict=True):
        state = state * decay.exp()[:, None, None]
        if layout.rule is StateRule.DELTA:
            value = value - torch.einsum("hk,hkv->hv", key, state)
        state = state + torch.einsum("hk,hv->hkv", key, beta[:, None] * value)
        outputs.append(torch.einsum("hk,hkv->hv", query, state))
    return torch.stack(outputs)


def scan_text(values: Tensor, gates: Tensor, queries: Tensor, decay: Tensor) -> Tensor:
    """Outputs [T, C] of a selective scan over a whole text, token by token; see `StateShape`.

    Args:
        values: [T, C], outputs of the convolution.
        gates: [T, C + K * N], each channel's step and the keys of K groups of channels.
        queries: [T, K * N].
        decay: [C, N], negative.
    """
    steps, width = gates[:, : len(decay)].double(), decay.shape[1]
    keys, queries = (
        one.double().view(len(one), -1, width).repeat_interleave(len(decay) * width // one.shape[1], dim=1)
        for one in (gates[:, len(decay) :].contiguous(), queries)
    )
    state, outputs = torch.zeros(decay.shape, dtype=torch.float64), []
    for value, step, key, query in zip(values.double(), steps, keys, queries, strict=True):
        state = state * (step[:, None] * decay.double()).exp() + (step * value)[:, None] * key
        outputs.append((state * query).sum(dim=1))
    return torch.stack(outputs)


def run_keyed_text(
    inputs: Tensor, gates: Tensor, convolution: ShortConvolution, shape: StateShape, layout: HeadsLayout
) -> Tensor:
    """As `run_text`, of states each number of whose keys decays by itself. `gates` [T, H * Dk + H]: logarithms of
    decays, then betas."""
    queries, keys, values = split_heads(convolve_text(inputs, convolution), shape, layout)
    width = shape.heads * shape.key_width
    decays = gates[:, :width].double().view(len(gates), shape.heads, shape.key_width).exp()
    state = torch.zeros(shape.heads, shape.key_width, shape.value_width, dtype=torch.float64)
    outputs = []
    for query, key, value, decay, beta in zip(queries, keys, values, decays, gates[:, width:].double(), strict=True):
        state = state * decay[:, :, None]
        added = beta[:, None] * (value - torch.einsum("hk,hkv->hv", key, state))
        state = state + torch.einsum("hk,hv->hkv", key, added)
        outputs.append(torch.einsum("hk,hkv->hv", query, state))
    return torch.stack(outputs)


def split_heads(rows: Tensor, shape: StateShape, layout: HeadsLayout) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys [R, H, Dk], normed and scaled, and values [R, H, Dv] of the convolution's outputs [R, C]."""
    group, width = shape.heads // layout.key_heads, layout.key_heads * shape.key_width
    found = []
    for start, factor in ((layout.query_at, layout.scaling), (layout.key_at, 1.0)):
        heads = rows[:, start : start + width].reshape(len(rows), layout.key_heads, shape.key_width)
        if layout.normed:
            # Of the length by which queries and keys are divided.
            heads = heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + 1e-6)
        found.append((heads * factor).repeat_interleave(group, dim=1))
    values = rows[:, layout.value_at : layout.value_at + shape.heads * shape.value_width]
    return found[0], found[1], values.reshape(len(rows), shape.heads, shape.value_width)
