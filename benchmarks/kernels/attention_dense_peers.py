"""PyTorch's own attention on the inputs of `tree_attention.py`, over keys in order.

Neither kernel reads a page table, so both get the cache as one dense tensor, and gather nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._inductor.exc import InductorError
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.kernels.attention_inputs import DEVICE, DTYPE, Inputs, measure
from tree_kernels.attention import ancestor_mask, sequence_mask


def in_order(inputs: Inputs) -> Inputs:
    """The same inputs, with the pages of each sequence one after the other."""
    each = len(inputs.batch.pages[0])
    pages = tuple(tuple(range(b * each, (b + 1) * each)) for b in range(inputs.case.batch))
    return replace(inputs, batch=replace(inputs.batch, pages=pages))


def _dense(inputs: Inputs, cache: Tensor) -> Tensor:
    """[pages, page_size, Hkv, D] -> [B, Hkv, context, D], a view."""
    case = inputs.case
    return cache.view(case.batch, -1, case.kv_heads, case.width)[:, : case.context].transpose(1, 2)


def sdpa_run(inputs: Inputs) -> dict[str, float]:
    """`scaled_dot_product_attention` with a dense additive mask; query heads of a key head are packed as rows."""
    case = inputs.case
    inputs = in_order(inputs)
    group = case.query_heads // case.kv_heads
    visible = torch.stack([sequence_mask(inputs.batch, b) for b in range(case.batch)]).to(DEVICE)
    # [B, 1, rows * group, context]
    mask = torch.zeros(visible.shape, device=DEVICE, dtype=DTYPE).masked_fill_(~visible, float("-inf"))
    mask = mask.repeat_interleave(group, 1).unsqueeze(1)
    packed = inputs.query.view(case.batch, case.rows, case.kv_heads, group, case.width)
    query = packed.transpose(1, 2).reshape(case.batch, case.kv_heads, -1, case.width)

    def run(keys: Tensor, values: Tensor) -> Tensor:
        output = scaled_dot_product_attention(
            query, _dense(inputs, keys), _dense(inputs, values), attn_mask=mask, scale=inputs.scale
        )
        output = output.view(case.batch, case.kv_heads, case.rows, group, case.width).transpose(1, 2)
        return output.reshape(inputs.query.shape)

    return measure(inputs, run)


def lower_right_runs(inputs: Inputs) -> Iterator[tuple[str, dict[str, Any]]]:
    """`scaled_dot_product_attention` of a chain by its kernels; one that refuses the shape says so as `failed`."""
    case = inputs.case
    inputs = in_order(inputs)
    mask = causal_lower_right(case.rows, case.context)
    query = inputs.query.view(case.batch, case.rows, case.query_heads, case.width).transpose(1, 2)

    def run(keys: Tensor, values: Tensor) -> Tensor:
        output: Tensor = scaled_dot_product_attention(
            query, _dense(inputs, keys), _dense(inputs, values), attn_mask=mask, scale=inputs.scale, enable_gqa=True
        )
        return output.transpose(1, 2).reshape(inputs.query.shape)

    for kernel in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        try:
            with sdpa_kernel(kernel):
                found: dict[str, Any] = dict(measure(inputs, run, causal=True))
        except RuntimeError as refusal:
            found = {"failed": str(refusal).splitlines()[0]}
        yield f"sdpa_{kernel.name.lower()}", found


def flex_run(inputs: Inputs) -> dict[str, Any]:
    """FlexAttention, compiled for the shape, with the block mask of the trees. Building that mask is not counted.

    Some shapes do not compile (64 rows over 1k keys, with torch 2.11); then the result has the error as `failed`.
    """
    case = inputs.case
    inputs = in_order(inputs)
    prefix = inputs.batch.prefix_lengths[0]
    trees = torch.stack([ancestor_mask(parents, case.rows) for parents in inputs.batch.parents]).to(DEVICE)

    def seen(b: Tensor, _: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return (key < prefix) | trees[b, row, (key - prefix).clamp(0, case.rows - 1)]

    blocks = create_block_mask(seen, case.batch, None, case.rows, case.context, device="cuda")
    torch._dynamo.reset()
    compiled: Callable[..., Tensor] = torch.compile(flex_attention, dynamic=False)
    query = inputs.query.view(case.batch, case.rows, case.query_heads, case.width).transpose(1, 2).contiguous()

    def run(keys: Tensor, values: Tensor) -> Tensor:
        output = compiled(
            query, _dense(inputs, keys), _dense(inputs, values), block_mask=blocks, scale=inputs.scale, enable_gqa=True
        )
        return output.transpose(1, 2).reshape(inputs.query.shape)

    try:
        return dict(measure(inputs, run))
    except InductorError as refusal:
        return {"failed": str(refusal).splitlines()[0]}
