"""A loaded model made ready for captured steps: products joined, layers fused where they can be, the rest compiled.

A layer is recognised by the names of its parts and then run beside its own code on random rows: one that computes
anything else keeps its code.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from target_service.model.agreement import agree
from target_service.model.fused.joined_linears import compile_shared, join_linears
from target_service.model.fused.latent_layers import fuse_latents
from target_service.model.fused.layers import (
    FusedLayer,
    FusedNorm,
    LayerParts,
    LinearsByRows,
    RotaryTable,
    RowsHead,
    norm_of,
    parts_of,
)
from target_service.model.support import longest_context
from tree_kernels.linear import RowLinears, many_row_linears, row_linears

log = logging.getLogger(__name__)
# Above, cuBLAS multiplies faster: at 64 rows of an 8B layer both take the same time, at 96 cuBLAS takes three quarters
# (benchmarks/results/2026-11-24-h200-decoder-layer.json).
MAX_ROWS = 64
# Above, the model's own code runs, which takes 1 to 3 % longer up to 512 rows (same record). The limit is chosen, not
# measured: three times the largest pass that is captured by default, so that chunks of prompts are below it.
MANY_ROWS = 1536
_PROBE_ROWS = 5
# Columns of the smallest tile.
_HEAD_MULTIPLE = 16


@dataclass(frozen=True, slots=True)
class LayerOptions:
    """How layers are prepared."""

    joined: bool = True  # compute products that share their input as one
    compiled: bool = True  # fuse what lies between the products with the compiler, where no kernel does
    # Run passes of few rows through `tree_kernels.linear`, where products are joined. In layers of latent attention,
    # run what lies before attention as one launch, for any number of rows; see `latent_layers`.
    fused: bool = True
    # Where layers are fused, run passes of more rows as cuBLAS's products with kernels between them instead of by the
    # model's own code.
    many: bool = True
    invariant: bool = False  # no bit of a row's result depends on the number of rows: all products run by the kernels


def prepare_layers(model: PreTrainedModel, options: LayerOptions) -> int:
    """Prepare a runner's model, in place and for good. Returns how many layers are fused whole.

    The model's attention has to be the runner's already: layers are tried with it. Raises `ValueError` where a layer
    cannot be made `invariant`.
    """
    inner = model.base_model
    # The names in nearly every family; others run their own code.
    known = hasattr(inner, "layers") and hasattr(inner, "norm")
    if options.joined or options.invariant:
        join_linears(model)
    fused = 0
    linears = row_linears(model.device, invariant=options.invariant)
    ranges: list[tuple[float, RowLinears]] = [(inf if options.invariant else MAX_ROWS, linears)]
    if options.many and not options.invariant:
        ranges.append((MANY_ROWS, many_row_linears(model.device)))
    if known and (options.fused or options.invariant):
        fused = _fuse(inner, LinearsByRows(tuple(ranges)))
    if options.fused and not options.invariant:
        fuse_latents(model)
    if options.invariant:
        if not known or fused < len(inner.layers):
            raise ValueError(f"{model.config.model_type}: its layers cannot be made independent of the batch")
        model.lm_head = RowsHead(model.lm_head, linears)
    if known and options.compiled and not options.invariant:
        for layer in (*inner.layers, inner.norm):
            plain = layer.plain if isinstance(layer, (FusedLayer, FusedNorm)) else layer
            plain.compile(backend=compile_shared, dynamic=False)
    return fused


def _fuse(inner: Any, linears: LinearsByRows) -> int:
    """Replace the layers of `inner`, its last norm and its rotary embedding, all or none. May be called again."""
    layers = [layer.plain if isinstance(layer, FusedLayer) else layer for layer in inner.layers]
    found = [parts_of(layer) for layer in layers]
    final: Any = inner.norm.plain if isinstance(inner.norm, FusedNorm) else inner.norm
    last = norm_of(final)
    # Layers are tried, and their norm with them; the last norm only has to be of the same type.
    if last is None or type(final) is not type(getattr(layers[0], "input_layernorm", None)):
        return 0
    if any(parts is None or not _can_be_launched(parts) for parts in found):
        return 0
    pairs = zip(layers, cast(list[LayerParts], found), strict=True)
    fused = [FusedLayer(layer, parts, linears) for layer, parts in pairs]
    if not all(computes_the_same(layer, inner.rotary_emb) for layer in fused):
        log.info("layers of %s compute something else and keep their own code", type(inner).__name__)
        return 0
    for layer, after in pairwise(fused):
        layer.next_norm = after.parts.input_norm
    inner.layers = nn.ModuleList(fused)
    inner.norm = FusedNorm(cast(nn.Module, final), last, linears)
    if not isinstance(inner.rotary_emb, RotaryTable):
        inner.rotary_emb = RotaryTable(inner.rotary_emb, longest_context(inner.config), last.weight)
    return len(fused)


def _can_be_launched(parts: LayerParts) -> bool:
    weight = parts.qkv.weight
    # Matrix units shorten fp32, and half of a tile's columns are rotated with the other half.
    return not weight.is_cuda or (weight.element_size() == 2 and parts.head_width % _HEAD_MULTIPLE == 0)


def computes_the_same(fused: FusedLayer, rotary: nn.Module) -> bool:
    """Whether a fused layer, by each of its linears, and its own code agree on random rows."""
    weight = fused.parts.qkv.weight
    generator = torch.Generator().manual_seed(0)
    # Small beside what the layer adds, which is what is compared.
    rows = 0.05 * torch.randn(1, _PROBE_ROWS, weight.shape[1], generator=generator)
    hidden = rows.to(weight.device, weight.dtype)
    positions = torch.arange(_PROBE_ROWS, device=weight.device).unsqueeze(0)
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    with torch.inference_mode(), torch.compiler.set_stance("force_eager"):
        turns = rotary(hidden, positions)
        ways = (LinearsByRows(((inf, linears),)) for _, linears in fused.linears.ranges)
        for layer in (fused.plain, *(FusedLayer(fused.plain, fused.parts, way) for way in ways)):
            step = _probe_step(fused.parts)
            output = layer(hidden, attention_mask=None, position_embeddings=turns, outrider_step=step)
            index = fused.parts.index
            found.append((output - hidden, step.cache.keys[index], step.cache.values[index]))
    expected, *others = found
    return all(agree(other, expected) for other in others)


@dataclass(frozen=True, slots=True)
class _ProbeAttention:
    """Attention of every row to itself alone, by a formula that shows queries, keys, values and the scale."""

    slots: Tensor

    def run(self, _plan: Any, query: Tensor, key_cache: Tensor, value_cache: Tensor, scale: float) -> Tensor:
        group, caches = query.shape[1] // key_cache.shape[2], (key_cache, value_cache)
        key, value = (cache.flatten(0, 1)[self.slots].repeat_interleave(group, dim=1) for cache in caches)
        return (8 * scale * query * key + value).contiguous()


def _probe_step(parts: LayerParts) -> SimpleNamespace:
    """What `runner.PassContext` has: empty caches, and slots in another order than the rows'."""
    weight, width = parts.qkv.weight, parts.head_width
    kv_heads = (len(weight) - parts.out.weight.shape[1]) // (2 * width)
    keys, values = (weight.new_zeros(1, _PROBE_ROWS, kv_heads, width) for _ in range(2))
    slots = torch.arange(_PROBE_ROWS, device=weight.device).flip(0)
    cache = SimpleNamespace(keys={parts.index: keys}, values={parts.index: values})
    return SimpleNamespace(attention=_ProbeAttention(slots), plan=None, slots=slots, cache=cache)
