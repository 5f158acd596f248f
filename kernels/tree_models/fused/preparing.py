"""Layers made ready for captured steps: fused forms for the layers that have one, the others compiled.

Each layer's form is run beside its plain form on random rows first: one that computes anything else, or fails on this
device, leaves that layer plain.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import inf
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tree_kernels.ahead import AheadCompiler
from tree_kernels.attention import AttentionBatch, AttentionPlan
from tree_kernels.compiled_layers import compile_layer, eagerly
from tree_kernels.experts import RowExperts, row_experts
from tree_kernels.linear import (
    RowLinears,
    ScaledRows,
    many_row_linears,
    reads_in_registers,
    row_linears,
    single_row_linears,
)
from tree_kernels.recurrence import RecurrentPass, RecurrentStates, TreeRecurrence
from tree_models.agreement import agree, most_rows_agree
from tree_models.fused.forms import (
    FinalRows,
    FusedForm,
    LinearsByRows,
    QuantizedForm,
    parts_of,
)
from tree_models.fused.mixers import AttentionMixer, QuantizedWeight, norm_of
from tree_models.layers.attention import HeadAttention
from tree_models.layers.decoder import Decoder, LayerStack
from tree_models.layers.experts import DenseAndExperts, MixtureOfExperts
from tree_models.layers.linear import Linear, PlainWeight
from tree_models.layers.mlp import MLP
from tree_models.layers.norm import Normalization
from tree_models.layers.paged import PagedPass
from tree_models.layers.recurrent import state_shape
from tree_models.layers.rotary import Angles
from tree_models.spec import AddedInputSpec, AttentionSpec

log = logging.getLogger(__name__)
# Above, cuBLAS multiplies faster: at 64 rows of an 8B layer both take the same time, at 96 cuBLAS takes three quarters
# (benchmarks/results/2026-11-24-h200-decoder-layer.json).
MAX_ROWS = 64
# Above, the plain form runs, which takes 1 to 3 % longer up to 512 rows (same record). The limit is chosen, not
# measured: three times the largest pass that is captured by default, so that chunks of prompts are below it.
MANY_ROWS = 1536
# Rows of a trial, in one pass where linears take as many. Chosen.
_PROBES = 5
# Returns what a layer adds, and the keys and values that it writes.
_Trial = Callable[[], Sequence[Tensor]]


@dataclass(frozen=True, slots=True)
class LayerOptions:
    """How layers are prepared."""

    compiled: bool = True  # compile the plain form
    fused: bool = True  # run passes of few rows through `tree_kernels.linear`
    many: bool = True  # and passes of more rows as cuBLAS's products with kernels between them
    invariant: bool = False  # no bit of a row's result depends on the number of rows: all products run by the kernels
    int8: bool = False  # passes of few rows read copies of the weights in int8


def prepare_decoder(decoder: Decoder, options: LayerOptions, ahead: AheadCompiler | None = None) -> int:
    """Prepare a decoder, in place and for good. Returns how many layers are fused. `ahead` compiles the kernels of
    the forms before these are tried.

    Raises `ValueError` where a layer cannot be made `invariant`.
    """
    for rotary in decoder.rotaries:
        rotary.tabulate(decoder.longest_context)
    return prepare_layers(decoder, decoder.norm, decoder.head, options, ahead)


def prepare_layers(
    stack: LayerStack,
    norm: Normalization | None,
    head: Linear,
    options: LayerOptions,
    ahead: AheadCompiler | None = None,
) -> int:
    """Prepare layers, and the last norm and the head behind them, in place and for good; `ahead` as in
    `prepare_decoder`. Returns how many layers are fused. Raises `ValueError` where a layer cannot be made
    `invariant`."""
    device = next(stack.parameters()).device
    linears = row_linears(device, invariant=options.invariant)
    ranges: list[tuple[float, RowLinears]] = [(inf if options.invariant else MAX_ROWS, linears)]
    if not options.invariant:
        ranges.insert(0, (1, single_row_linears(device)))
        # Plain layers that are not compiled are slower at any number of rows.
        ranges += [(MANY_ROWS if options.compiled else inf, many_row_linears(device))] if options.many else []
    by_rows = LinearsByRows(tuple(ranges))
    experts = row_experts(device, invariant=options.invariant)
    fused = 0
    if options.fused or options.invariant:
        fused = _fuse(stack, by_rows, experts, ahead, invariant=options.invariant)
    final, product = None if norm is None else norm_of(norm), head.plain
    if options.invariant:
        if fused < len(stack.layers) or final is None or product is None:
            raise ValueError("its layers cannot be made independent of the batch")
        stack.final_form = FinalRows(final, by_rows, (by_rows, product))
    elif fused and options.int8 and product is not None:
        few = LinearsByRows(((MAX_ROWS, linears),))
        stack.forms = [QuantizedForm(form, few) if isinstance(form, FusedForm) else form for form in stack.forms]
        stack.final_form = FinalRows(final, by_rows, (few, QuantizedWeight.of(product)))
    elif fused and final is not None:
        # Up to 64 rows it takes 3 to 7 % less than by cuBLAS (benchmarks/results/2026-11-27-h100-64-rows.md).
        in_registers = product is not None and reads_in_registers(product.weight)
        of_head = (LinearsByRows(by_rows.ranges[:2]), product) if product is not None and in_registers else None
        stack.final_form = FinalRows(final, by_rows, of_head)
    if options.compiled and not options.invariant:
        for layer in (*stack.layers, *([] if norm is None else [norm])):
            compile_layer(layer)
    return fused


def quantized_rows(product: PlainWeight, linears: RowLinears) -> FinalRows:
    """A product alone, of whose passes those of few rows read a copy of its weight in int8."""
    few = LinearsByRows(((MAX_ROWS, linears),))
    return FinalRows(None, few, (few, QuantizedWeight.of(product)))


def _fuse(
    stack: LayerStack, linears: LinearsByRows, experts: RowExperts, ahead: AheadCompiler | None, *, invariant: bool
) -> int:
    """Give forms to the layers that can have one; where they have to be `invariant`, not to those with states, whose
    rows are computed in ways that depend on their number. May be called again."""
    forms: list[FusedForm | None] = []
    for layer in stack.layers:
        parts = parts_of(layer)
        if invariant and parts is not None and not isinstance(parts.mixer, AttentionMixer | None):
            parts = None
        of_layer = linears, experts, stack.place.ranks
        forms.append(None if parts is None or not _can_be_launched(layer) else FusedForm(parts, *of_layer))
    if ahead is not None:
        _compile_ahead(stack, forms, ahead)
    for index, form in enumerate(forms):
        if form is not None and not _agreed(stack, computes_the_same(stack, index, form)):
            forms[index] = None
    for form, after in pairwise(forms):
        if form is not None and after is not None:
            form.next_norm = after.parts.first_norm
    stack.forms = list(forms)
    fused = sum(form is not None for form in forms)
    log.info("%d of %d layers run in fused form", fused, len(forms))
    return fused


def _compile_ahead(stack: LayerStack, forms: Sequence[FusedForm | None], ahead: AheadCompiler) -> None:
    """Have `ahead` compile what trials launch: of several ranks on the one whose compiler has processes, while all
    others wait, so that they find it in the cache."""
    ranks = stack.place.ranks
    with nullcontext() if ranks is None else ranks.alone():
        ahead.compile("fused layers", _all_trials(stack, forms))
    if ranks is not None:
        ranks.least(0)


def _all_trials(stack: LayerStack, forms: Sequence[FusedForm | None]) -> Iterator[Callable[[], object]]:
    """What `computes_the_same` launches of all forms."""
    for index, form in enumerate(forms):
        if form is not None:
            yield from (trial for _, trial in _trials(stack, index, form))


def _agreed(stack: LayerStack, fits: bool) -> bool:
    """Whether a form fits on every rank: parts of different forms do not make a sum."""
    ranks = stack.place.ranks
    return fits if ranks is None else bool(ranks.least(int(fits)))


def _output_of(layer: Any) -> Tensor:
    """The weight [H, ..] of a product whose outputs are hidden rows."""
    if layer.attention is not None:
        weight: Tensor = layer.attention.out.weight
        return weight
    return layer.mlp.down.weight if isinstance(layer.mlp, MLP) else layer.mlp.down[0]


def _can_be_launched(layer: Any) -> bool:
    weight = _output_of(layer)
    # Matrix units shorten fp32.
    return not weight.is_cuda or weight.element_size() == 2


@torch.inference_mode()
def computes_the_same(stack: LayerStack, index: int, form: FusedForm) -> bool:
    """Whether a layer's form, by each of its linears, and its plain form agree on random rows: output, keys and
    values. False where a kernel fails."""
    layer = stack.layers[index]
    with eagerly():
        for plain, trial in _trials(stack, index, form):
            expected = plain()
            try:
                found = trial()
            except Exception:
                # A device or a compiler may not take the kernels: the plain form serves.
                log.warning("layer %d cannot be fused on %s", index, stack.place.device, exc_info=True)
                return False
            if not _same(layer, found, expected):
                log.warning("layer %d computes something else in fused form, and stays plain", index)
                return False
    return True


def _has_experts(layer: Any) -> bool:
    return isinstance(layer.mlp, MixtureOfExperts | DenseAndExperts)


def _same(layer: Any, found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Whether outcomes agree: what is added, which comes first, of most rows where the layer has experts."""
    if not _has_experts(layer):
        return agree(found, expected)
    return most_rows_agree(found[0], expected[0]) and agree(found[1:], expected[1:])


def _trials(stack: LayerStack, index: int, form: FusedForm) -> Iterator[tuple[_Trial, _Trial]]:
    """For each of a form's linears: what runs the plain layer on random rows, and what runs the form with those
    linears alone. Of linears for fewer rows one pass after the other."""
    layer: Any = stack.layers[index]
    attention = layer.attention
    for most, linears in form.linears.ranges:
        alone = FusedForm(form.parts, LinearsByRows(((inf, linears),)), form.experts, form.ranks)
        plain, trial = list[_Trial](), list[_Trial]()
        # A single row that went to another expert would be judged by itself.
        for seed in range(_PROBES if _has_experts(layer) and most < _PROBES else 1):
            hidden, given, angles = _probe_rows(stack, index, int(min(_PROBES, most)), seed)
            vectors = _probe_vectors(layer.spec.added_input, hidden)
            of_layer = partial(layer, hidden, angles, given=given, vectors=vectors)
            plain.append(partial(_outcome, of_layer, hidden, attention))
            trial.append(partial(_outcome, partial(_run, alone, hidden, given, angles, vectors), hidden, attention))
        yield partial(_together, plain), partial(_together, trial)


def _together(trials: Sequence[_Trial]) -> Sequence[Tensor]:
    """The outcomes of several trials, those of each kind one behind another."""
    return [torch.cat(of_kind) for of_kind in zip(*(trial() for trial in trials), strict=True)]


def _probe_rows(stack: LayerStack, index: int, rows: int, seed: int) -> tuple[Tensor, Tensor | None, Angles | None]:
    """Random rows, what attention reads in their place if that is given, and angles of their positions."""
    layer: Any = stack.layers[index]
    weight, vectors = _output_of(layer), layer.spec.read_vectors
    generator = torch.Generator().manual_seed(seed)
    width, (device, dtype) = weight.shape[0], (weight.device, weight.dtype)
    # Small beside what the layer adds, which is what is compared.
    hidden = 0.05 * torch.randn(rows, width, generator=generator)
    given = torch.randn(rows, vectors * width, generator=generator).to(device, dtype) if vectors > 1 else None
    # Far enough apart that slow angles turn too.
    positions = 37 * torch.arange(1, rows + 1, device=device)
    positions = positions.clamp(max=stack.longest_context - 1)
    return hidden.to(device, dtype), given, stack.angles_of(index, positions)


def _probe_vectors(spec: AddedInputSpec | None, hidden: Tensor) -> Tensor | None:
    """Random vectors of rows, of a layer that adds them."""
    if spec is None:
        return None
    return torch.randn(len(hidden), spec.width, generator=torch.Generator().manual_seed(1)).to(hidden)


def _run(
    form: FusedForm, hidden: Tensor, given: Tensor | None, angles: Angles | None, vectors: Tensor | None, step: Any
) -> Tensor:
    scaled = None if given is None else ScaledRows(given, None, 0.0)
    done = form.compute_layer(hidden, scaled, angles, step, vectors)
    assert done is not None, "its linears take any number of rows"
    return done[0]


def _outcome(run: Any, hidden: Tensor, attention: Any) -> Sequence[Tensor]:
    """What a layer adds to `hidden`, and what it keeps: keys and values, or inputs and gates of its states."""
    if attention is None:
        slots = hidden.new_empty(0)
        return [run(step=PagedPass(None, AttentionPlan(_first_rows(len(hidden))), slots, None)) - hidden]
    if not isinstance(attention, HeadAttention):
        states = RecurrentStates(
            attention.state_layer + 1, 1, len(hidden), state_shape(attention.spec, hidden.shape[1]), hidden.dtype,
            hidden.device,
        )  # fmt: skip
        output = run(step=_recurrent_step(hidden, states))
        return output - hidden, states.inputs[attention.state_layer], states.gates[attention.state_layer]
    step, layer = _probe_step(hidden, attention.spec, attention.cache_layer), attention.cache_layer
    output = run(step=step)
    return output - hidden, step.cache.keys[layer], step.cache.values[layer]


def _recurrent_step(hidden: Tensor, states: RecurrentStates) -> PagedPass:
    """A pass over the first rows of a sequence, whose state is empty."""
    recurrence = TreeRecurrence("triton" if hidden.is_cuda else "torch", hidden.device)
    batch = _first_rows(len(hidden))
    plan = RecurrentPass(recurrence, recurrence.plan(batch, (1,), states), states)
    return PagedPass(None, AttentionPlan(batch), hidden.new_empty(0), None, plan)


def _first_rows(rows: int) -> AttentionBatch:
    return AttentionBatch((0, rows), (0,), ((0,),), rows, (None,))


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


def _probe_step(hidden: Tensor, spec: AttentionSpec, cache_layer: int) -> PagedPass:
    """A `PagedPass` with random keys and values, and slots in another order than the rows'."""
    rows = len(hidden)
    # Read by a layer without keys of its own, written by others.
    generator, shape = torch.Generator().manual_seed(2), (1, rows, spec.kv_heads, spec.head_width)
    keys, values = (torch.randn(shape, generator=generator).to(hidden) for _ in range(2))
    slots = torch.arange(rows, device=hidden.device).flip(0)
    cache = SimpleNamespace(keys={cache_layer: keys}, values={cache_layer: values})
    return PagedPass(_ProbeAttention(slots), AttentionPlan(_first_rows(rows)), slots, cache)
