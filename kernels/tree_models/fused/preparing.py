"""A decoder made ready for captured steps: fused forms for the layers that have one, the others compiled.

Each layer's form is run beside its plain form on random rows first: one that computes anything else, or fails on this
device, leaves that layer plain.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import inf
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tree_kernels.experts import RowExperts, row_experts
from tree_kernels.linear import RowLinears, many_row_linears, reads_in_registers, row_linears, single_row_linears
from tree_models.agreement import agree
from tree_models.fused.forms import FinalRows, FusedForm, LayerParts, LinearsByRows, norm_of, parts_of
from tree_models.layers.decoder import Decoder
from tree_models.layers.rotary import Angles
from tree_models.spec import AttentionSpec

log = logging.getLogger(__name__)
# Above, cuBLAS multiplies faster: at 64 rows of an 8B layer both take the same time, at 96 cuBLAS takes three quarters
# (benchmarks/results/2026-11-24-h200-decoder-layer.json).
MAX_ROWS = 64
# Above, the plain form runs, which takes 1 to 3 % longer up to 512 rows (same record). The limit is chosen, not
# measured: three times the largest pass that is captured by default, so that chunks of prompts are below it.
MANY_ROWS = 1536
_PROBE_ROWS = 5
# Between the positions of two rows, so that slow angles turn too.
_PROBE_STRIDE = 37


@dataclass(frozen=True, slots=True)
class LayerOptions:
    """How layers are prepared."""

    compiled: bool = True  # compile the plain form
    fused: bool = True  # run passes of few rows through `tree_kernels.linear`
    many: bool = True  # and passes of more rows as cuBLAS's products with kernels between them
    invariant: bool = False  # no bit of a row's result depends on the number of rows: all products run by the kernels


def prepare_decoder(decoder: Decoder, options: LayerOptions) -> int:
    """Prepare a decoder, in place and for good. Returns how many layers are fused.

    Raises `ValueError` where a layer cannot be made `invariant`.
    """
    linears = row_linears(decoder.device, invariant=options.invariant)
    ranges: list[tuple[float, RowLinears]] = [(inf if options.invariant else MAX_ROWS, linears)]
    if not options.invariant:
        ranges.insert(0, (1, single_row_linears(decoder.device)))
        ranges += [(MANY_ROWS, many_row_linears(decoder.device))] if options.many else []
    by_rows = LinearsByRows(tuple(ranges))
    for rotary in decoder.rotaries:
        rotary.tabulate(decoder.longest_context)
    experts = row_experts(decoder.device, invariant=options.invariant)
    fused = _fuse(decoder, by_rows, experts) if options.fused or options.invariant else 0
    final, head = norm_of(decoder.norm), decoder.head.plain
    if options.invariant:
        if fused < decoder.layer_count or final is None or head is None:
            raise ValueError("its layers cannot be made independent of the batch")
        decoder.final_form = FinalRows(final, by_rows, (by_rows, head))
    elif fused and final is not None:
        # Up to 64 rows it takes 3 to 7 % less than by cuBLAS (benchmarks/results/2026-11-27-h100-64-rows.md).
        few = None if head is None or not reads_in_registers(head.weight) else LinearsByRows(by_rows.ranges[:2])
        decoder.final_form = FinalRows(final, by_rows, None if head is None or few is None else (few, head))
    if options.compiled and not options.invariant:
        for layer in (*decoder.layers, decoder.norm):
            layer.compile(dynamic=False)
    return fused


def _fuse(decoder: Decoder, linears: LinearsByRows, experts: RowExperts) -> int:
    """Give forms to the layers that can have one. May be called again."""
    forms: list[FusedForm | None] = []
    for index, layer in enumerate(decoder.layers):
        parts = parts_of(layer)
        form = None if parts is None or not _can_be_launched(parts) else FusedForm(parts, linears, experts)
        if form is not None and not computes_the_same(decoder, index, form):
            form = None
        forms.append(form)
    for form, after in pairwise(forms):
        if form is not None and after is not None:
            form.next_norm = after.parts.before_attention
    decoder.forms = list(forms)
    fused = sum(form is not None for form in forms)
    log.info("%d of %d layers run in fused form", fused, len(forms))
    return fused


def _can_be_launched(parts: LayerParts) -> bool:
    weight = parts.qkv.weight
    # Matrix units shorten fp32.
    return not weight.is_cuda or weight.element_size() == 2


@torch.inference_mode()
def computes_the_same(decoder: Decoder, index: int, form: FusedForm) -> bool:
    """Whether a layer's form, by each of its linears, and its plain form agree on random rows: output, keys and
    values. False where a kernel fails."""
    layer: Any = decoder.layers[index]
    weight, spec = form.parts.qkv.weight, layer.attention.spec
    with torch.compiler.set_stance("force_eager"):
        for most, linears in form.linears.ranges:
            hidden, angles = _probe_rows(decoder, index, weight, int(min(_PROBE_ROWS, most)))
            expected = _outcome(partial(layer, hidden, angles), hidden, spec, form.parts.cache_layer)
            alone = FusedForm(form.parts, LinearsByRows(((inf, linears),)), form.experts)
            try:
                found = _outcome(partial(_run, alone, hidden, angles), hidden, spec, form.parts.cache_layer)
            except Exception:
                # A device or a compiler may not take the kernels: the plain form serves.
                log.warning("layer %d cannot be fused on %s", index, weight.device, exc_info=True)
                return False
            if not agree(found, expected):
                log.warning("layer %d computes something else in fused form, and stays plain", index)
                return False
    return True


def _probe_rows(decoder: Decoder, index: int, weight: Tensor, rows: int) -> tuple[Tensor, Angles | None]:
    """Random rows, and the angles of a layer at positions of theirs."""
    generator = torch.Generator().manual_seed(0)
    # Small beside what the layer adds, which is what is compared.
    hidden = 0.05 * torch.randn(rows, weight.shape[1], generator=generator)
    positions = _PROBE_STRIDE * torch.arange(1, rows + 1, device=weight.device)
    positions = positions.clamp(max=decoder.longest_context - 1)
    return hidden.to(weight.device, weight.dtype), decoder.angles_of(index, positions)


def _run(form: FusedForm, hidden: Tensor, angles: Angles | None, step: Any) -> Tensor:
    done = form.compute_layer(hidden, None, angles, step)
    assert done is not None, "its linears take any number of rows"
    return done[0]


def _outcome(run: Any, hidden: Tensor, spec: AttentionSpec, cache_layer: int) -> Sequence[Tensor]:
    """What a layer adds to `hidden`, and the keys and values that it writes."""
    step = _probe_step(hidden, spec, cache_layer)
    output = run(step)
    return output - hidden, step.cache.keys[cache_layer], step.cache.values[cache_layer]


@dataclass(frozen=True, slots=True)
class _ProbeAttention:
    """Attention of every row to itself alone, by a formula that shows queries, keys, values and the scale."""

    slots: Tensor

    def run(
        self, _plan: Any, query: Tensor, key_cache: Tensor, value_cache: Tensor, scale: float, _variant: Any
    ) -> Tensor:
        group, caches = query.shape[1] // key_cache.shape[2], (key_cache, value_cache)
        key, value = (cache.flatten(0, 1)[self.slots].repeat_interleave(group, dim=1) for cache in caches)
        return (8 * scale * query * key + value).contiguous()


def _probe_step(hidden: Tensor, spec: AttentionSpec, cache_layer: int) -> SimpleNamespace:
    """A `PagedPass` with empty caches, and slots in another order than the rows'."""
    rows = len(hidden)
    keys, values = (hidden.new_zeros(1, rows, spec.kv_heads, spec.head_width) for _ in range(2))
    slots = torch.arange(rows, device=hidden.device).flip(0)
    cache = SimpleNamespace(keys={cache_layer: keys}, values={cache_layer: values})
    return SimpleNamespace(attention=_ProbeAttention(slots), plan=None, slots=slots, cache=cache, windowed=None)
