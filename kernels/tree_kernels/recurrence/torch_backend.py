"""Recurrent layers over trees in plain PyTorch: the CPU's form, sequence by sequence.

A tree's nodes are solved together from the state S of its last folded token. With G(i) the sum of the logarithms of the
decays along the path to node i, and D(i, j) = exp(G(i) - G(j)) where j is i or an ancestor of i and else 0, what node i
adds to the state is k(i) u(i) with

    u(i) = beta(i) * (v(i) - exp(G(i)) k(i) S - sum over ancestors j of D(i, j) (k(i) k(j)) u(j))

and its output is exp(G(i)) q(i) S + sum over j of D(i, j) (q(i) k(j)) u(j). Parents come before their children, so the
system is triangular. Where the rule is a sum, u(i) = beta(i) * v(i).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from tree_kernels.attention.batch import AttentionBatch
from tree_kernels.attention.tree_mask import ancestor_mask
from tree_kernels.recurrence.gating import delta_gates, gated_heads, space_gates, space_output
from tree_kernels.recurrence.reference import split_heads
from tree_kernels.recurrence.states import LayerStates, RecurrentStates
from tree_kernels.recurrence.torch_selective import fold_tokens, keyed_behind, mix_keyed_nodes, scan_known, scan_nodes
from tree_kernels.recurrence.types import Convolved, HeadsLayout, RecurrencePlan, ShortConvolution, StateRule

# Rows of a prompt that are solved together, as in transformers.
_CHUNK = 64


@dataclass
class SpanOfRows:
    """One sequence's share of a plan."""

    start: int
    end: int
    source: int  # slot of the state before
    slot: int  # of the one behind
    prefix: int
    folded: int  # keys that the state holds already
    mask: Tensor | None  # [n, n] bool, of nodes that may be dropped; None where all rows are known
    parents: tuple[int, ...] | None  # of a tree; None is a chain


@dataclass
class TorchRecurrencePlan(RecurrencePlan):
    """What each sequence that has rows does, in the order of the batch."""

    spans: list[SpanOfRows]


@dataclass
class KnownTokens:
    """Tokens of one sequence that were accepted and are to be folded into its state now: their outputs of the
    convolution [n, C] and their gates [n, G]."""

    rows: Tensor
    gates: Tensor


@dataclass
class TorchConvolved(Convolved):
    """With the tokens of each span that are to be folded."""

    folded: list[KnownTokens]


class TorchRecurrence:
    """See `tree_kernels.recurrence.TreeRecurrence`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def plan(self, batch: AttentionBatch, slots: Sequence[int], states: RecurrentStates) -> TorchRecurrencePlan:
        spans, places, window = [], [-1] * batch.rows, states.window
        for b, rows in enumerate(batch.row_counts):
            if not rows:
                continue
            start, prefix, parents = batch.query_starts[b], batch.prefix_lengths[b], batch.parents[b]
            mask, source = None, states.current(slots[b])
            slot, length = source, int(states.lengths[source])
            if rows <= window:
                mask = ancestor_mask(parents, rows).to(self._device)
                page_end = max(0, prefix - 1) // states.page_size * states.page_size
                if 0 < page_end >= length:
                    # The state goes past it, and so to the other slot.
                    slot = slots[b] + int(states.seconds[slots[b]]) - source
                places[start : start + rows] = [slot * window + key % window for key in range(prefix, prefix + rows)]
            elif parents is not None:
                raise ValueError(f"expected trees of at most {window} rows, got {rows}")
            # Of a sequence that begins, and of a pass that is of none, nothing is left to fold.
            folded = max(prefix - window, min(prefix, length)) if prefix else 0
            states.lengths[slot] = prefix + rows if mask is None else prefix
            spans.append(SpanOfRows(start, start + rows, source, slot, prefix, max(0, folded), mask, parents))
        return TorchRecurrencePlan(batch, torch.tensor(places, dtype=torch.int32, device=self._device), spans)

    def convolve(self, at: LayerStates, inputs: Tensor, gates: Tensor, convolution: ShortConvolution) -> TorchConvolved:
        plan, states, layer = at
        assert isinstance(plan, TorchRecurrencePlan)
        output, folded = torch.zeros_like(inputs), []
        for span in plan.spans:
            before = self._known(states, layer, span)
            own = inputs[span.start : span.end]
            window = states.windows[layer, span.slot]
            read = torch.cat([states.windows[layer, span.source], before.rows, own])
            kept = len(window) + len(before.rows)
            previous = None
            if span.parents is not None:
                # The inputs before a node's own are its ancestors', then those of committed tokens.
                previous = torch.arange(-1, len(read) - 1, device=read.device)
                previous[kept + 1 :] = kept + torch.tensor(span.parents[1:], device=read.device)
            made = _convolved(read, previous, len(window), convolution)
            folded.append(KnownTokens(made[: len(before.rows)], before.gates))
            output[span.start : span.end] = made[len(before.rows) :]
            if span.mask is None:
                kept += len(own)
            else:
                places = torch.arange(span.prefix, span.prefix + len(own), device=read.device) % states.window
                states.inputs[layer, span.slot, places, 0] = own
                if gates.shape[1]:
                    states.gates[layer, span.slot, places, 0] = gates[span.start : span.end]
            window.copy_(read[kept - len(window) : kept].clone())
        return TorchConvolved(output, folded)

    def mix(self, at: LayerStates, convolved: Convolved, gates: Tensor, layout: HeadsLayout) -> Tensor:
        plan, states, layer = at
        assert isinstance(plan, TorchRecurrencePlan) and isinstance(convolved, TorchConvolved)
        shape, rows = states.shape, convolved.rows
        output = rows.new_zeros(len(rows), shape.heads, shape.value_width)
        for span, before in zip(plan.spans, convolved.folded, strict=True):
            state = _state_before(states, layer, span)
            if len(before.rows):
                _, keys, values = split_heads(before.rows.float(), shape, layout)
                _fold(state, keys, values, before.gates, layout.rule)
            queries, keys, values = split_heads(rows[span.start : span.end].float(), shape, layout)
            of_rows = gates[span.start : span.end]
            if span.mask is not None:
                made, _ = _solved(state, queries, keys, values, of_rows, span.mask, layout.rule)
                output[span.start : span.end] = made
                continue
            for first in range(0, span.end - span.start, _CHUNK):
                part = slice(first, first + _CHUNK)
                count = len(of_rows[part])
                mask = torch.ones(count, count, dtype=torch.bool, device=state.device).tril_()
                made, added = _solved(state, queries[part], keys[part], values[part], of_rows[part], mask, layout.rule)
                output[span.start + first : span.start + first + count] = made
                state.copy_(added)
        return output

    def scan(self, at: LayerStates, convolved: Convolved, gates: Tensor, queries: Tensor, decay: Tensor) -> Tensor:
        plan, states, layer = at
        assert isinstance(plan, TorchRecurrencePlan) and isinstance(convolved, TorchConvolved)
        values = convolved.rows.float()
        output = torch.zeros_like(values)
        for span, before in zip(plan.spans, convolved.folded, strict=True):
            state = _state_before(states, layer, span)[..., 0]
            fold_tokens(state, before.rows.float(), before.gates, decay)
            rows = slice(span.start, span.end)
            own = values[rows], gates[rows], queries[rows], decay
            if span.mask is None:
                output[rows] = scan_known(state, *own)
                continue
            parents = span.parents or range(-1, span.end - span.start - 1)
            output[rows], _ = scan_nodes(state, *own, parents)
            places = torch.arange(span.prefix, span.prefix + len(own[0]), device=gates.device) % states.window
            states.gates[layer, span.slot, places, 0] = own[1]
        return output

    def mix_keyed(self, at: LayerStates, convolved: Convolved, gates: Tensor, layout: HeadsLayout) -> Tensor:
        plan, states, layer = at
        assert isinstance(plan, TorchRecurrencePlan) and isinstance(convolved, TorchConvolved)
        shape, rows = states.shape, convolved.rows
        output = rows.new_zeros(len(rows), shape.heads, shape.value_width)
        for span, before in zip(plan.spans, convolved.folded, strict=True):
            state = _state_before(states, layer, span)
            _, keys, values = split_heads(before.rows.float(), shape, layout)
            for token in zip(keys, values, before.gates, strict=True):
                state.copy_(keyed_behind(state, *token))
            part = slice(span.start, span.end)
            made, behind = mix_keyed_nodes(
                state, *split_heads(rows[part].float(), shape, layout), gates[part], span.parents
            )
            output[part] = made
            if span.mask is None:
                state.copy_(behind)
                continue
            places = torch.arange(span.prefix, span.prefix + len(made), device=gates.device) % states.window
            states.gates[layer, span.slot, places, 0] = gates[part]
        return output

    delta_gates = staticmethod(delta_gates)
    gated_heads = staticmethod(gated_heads)
    space_gates = staticmethod(space_gates)
    space_output = staticmethod(space_output)

    def _known(self, states: RecurrentStates, layer: int, span: SpanOfRows) -> KnownTokens:
        """The inputs of tokens that are committed and not folded yet. A sequence that begins has none."""
        if not span.prefix:
            states.windows[layer, span.source].zero_()
        places = torch.arange(span.folded, span.prefix, device=states.inputs.device) % states.window
        return KnownTokens(states.inputs[layer, span.source, places, 0], states.gates[layer, span.source, places, 0])


def _state_before(states: RecurrentStates, layer: int, span: SpanOfRows) -> Tensor:
    """The state that a pass begins with, in the slot where it goes on."""
    state = states.states[layer, span.slot]
    if not span.prefix:
        return state.zero_()
    return state if span.source == span.slot else state.copy_(states.states[layer, span.source])


def _convolved(read: Tensor, previous: Tensor | None, skipped: int, convolution: ShortConvolution) -> Tensor:
    """Outputs [n - skipped, C] of inputs `read` [n, C], each of which follows that at `previous` [n], or the one before
    it; `skipped` is one less than the taps."""
    # By tap, in memory as they are multiplied.
    weight, wide = convolution.weight.float().T.contiguous(), read.float()
    made = weight[-1] * wide[skipped:]
    place = None if previous is None else previous[skipped:]
    for back in range(1, len(weight)):
        before = wide[skipped - back : len(wide) - back] if place is None else wide[place]
        made.addcmul_(weight[-1 - back], before)
        place = None if previous is None or place is None else previous[place]
    if convolution.bias is not None:
        made += convolution.bias.float()
    return (functional.silu(made) if convolution.silu else made).to(read.dtype)


def _fold(state: Tensor, keys: Tensor, values: Tensor, gates: Tensor, rule: StateRule) -> None:
    """Take tokens into a state [H, Dk, Dv], in place, one after the other."""
    decays, betas = gates.chunk(2, dim=-1)
    decays = decays.exp()
    for key, value, decay, beta in zip(keys, values, decays, betas, strict=True):
        state.mul_(decay[:, None, None])
        added = value
        if rule is StateRule.DELTA:
            added = value - torch.bmm(key[:, None], state)[:, 0]
        state.baddbmm_(key[:, :, None], (beta[:, None] * added)[:, None])


def _solved(
    state: Tensor, queries: Tensor, keys: Tensor, values: Tensor, gates: Tensor, mask: Tensor, rule: StateRule
) -> tuple[Tensor, Tensor]:
    """Outputs [n, H, Dv] of nodes behind a state [H, Dk, Dv], and the state behind the last node's path.

    A node whose inputs are not finite spoils itself and its descendants, and nothing else.
    """
    broken = ~torch.cat([keys.flatten(1), values.flatten(1), gates], dim=1).isfinite().all(dim=1)
    keys, values = (one.masked_fill(broken[:, None, None], 0.0).transpose(0, 1) for one in (keys, values))
    queries = queries.transpose(0, 1)
    logs, betas = gates.masked_fill(broken[:, None], 0.0).T.chunk(2)
    # Sums along paths in fp64: differences of large sums are small.
    paths = mask.double()
    sums = logs.double() @ paths.T
    weights = (sums[:, :, None] - sums[:, None]).masked_fill_(~mask, float("-inf")).exp().float()
    reached = sums.exp().float()[..., None]
    added = values
    if rule is StateRule.DELTA:
        added = values - reached * torch.bmm(keys, state)
    added = betas[..., None] * added
    if rule is StateRule.DELTA and len(mask) > 1:
        system = betas[..., None] * torch.bmm(keys, keys.transpose(1, 2)) * weights
        added = torch.linalg.solve_triangular(system, added, upper=False, unitriangular=True)
    outputs = reached * torch.bmm(queries, state)
    outputs += torch.bmm(torch.bmm(queries, keys.transpose(1, 2)) * weights, added)
    outputs[:, (paths @ broken.double()) > 0] = float("nan")
    behind = reached[:, -1:] * state + torch.bmm((weights[:, -1, :, None] * keys).transpose(1, 2), added)
    return outputs.transpose(0, 1), behind
