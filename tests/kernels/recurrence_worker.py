"""Runs recurrent layers by the Triton kernels and by the plain form over the same passes, and writes the largest errors
as JSON to standard output.

A process of its own, because Triton's interpreter must be chosen before Triton is imported.
"""

from __future__ import annotations

import json
import math
import random
import sys
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tree_kernels.attention import AttentionBatch
from tree_kernels.recurrence import (
    HeadsLayout,
    RecurrentPass,
    RecurrentStates,
    ShortConvolution,
    SpaceOutput,
    StateRule,
    StateShape,
    TreeRecurrence,
    triton_backend,
)

INTERPRETED = not torch.cuda.is_available()
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
TINY = StateShape(channels=2 * 2 * 5 + 4 * 3, taps=4, heads=4, key_width=5, value_width=3)
# Without a convolution, as lightning attention is.
ONE_TAP = replace(TINY, taps=1)
# Of layers without states of heads, as in LFM2.
SHORT = StateShape(channels=40, taps=3)
# Of selective scans, with more channels than a program has.
SELECTIVE = StateShape(channels=40, taps=3, heads=40, key_width=5, value_width=1, selective=True)
# A key and a query for each half of the channels, and of recurrences that have one number for each channel.
HALVES = replace(SELECTIVE, key_groups=2)
CHANNELS = replace(SELECTIVE, key_width=1, key_groups=40)
# Kimi Linear's, of which each head has its own keys, and more values than a program has.
KEYED = StateShape(channels=2 * (5 + 5 + 40), taps=3, heads=2, key_width=5, value_width=40, keyed=True)
# Of Qwen3.5, with fewer heads.
REAL = StateShape(channels=2 * 4 * 128 + 8 * 128, taps=4, heads=8, key_width=128, value_width=128)
# By slot of a sequence its second one, of those that are kept.
SECONDS = {1: 4, 2: 6}
# A pass is the rows of each of three sequences: a number for a chain, a negative one for a random tree.
PASSES = ((5, 70, -1), (-6, 3, 0), (1, -1, 21), (-40, -17, 9), (1, 1, -2))
# Of sequences that generate behind the first.
TURNS = ((5, 14, 3), (1, -5, 1), (-6, 3, -2), (1, 1, 1), (-9, 2, 1), (4, -8, 0), (1, 1, 1))


@dataclass(frozen=True)
class Case:
    """What is computed, and in which type."""

    rule: StateRule
    shape: StateShape
    window: int
    dtype: torch.dtype = torch.float32
    # A node of the second pass is not finite.
    broken: bool = False
    passes: tuple[tuple[int, int, int], ...] = PASSES
    # Two of the sequences leave page ends of so many tokens.
    page_size: int = 0
    # Launched as a captured pass is, whose sequences may have any rows.
    captured: bool = False


CASES = {
    "delta": Case(StateRule.DELTA, TINY, 40),
    "delta, small window": Case(StateRule.DELTA, TINY, 6),
    "sum": Case(StateRule.SUM, TINY, 40),
    "selective": Case(StateRule.SUM, SELECTIVE, 6, broken=True, passes=((3, 7, -4), (-6, 67, 1))),
    "selective, halves": Case(StateRule.SUM, HALVES, 6, broken=True, passes=((3, 7, -4), (-6, 67, 1))),
    "selective, channels": Case(StateRule.SUM, CHANNELS, 6, broken=True, passes=((3, 40, -4), (-6, 7, 1))),
    "keyed": Case(StateRule.DELTA, KEYED, 6, broken=True, passes=((2, 67, -3), (-5, 2, 1))),
    "sum, one tap": Case(StateRule.SUM, ONE_TAP, 6, passes=((5, 9, -1), (-6, 3, 1))),
    # Products of bf16 are not interpreted.
    "16 bits": Case(StateRule.DELTA, TINY, 40, torch.float16 if INTERPRETED else torch.bfloat16),
    "captured": Case(StateRule.DELTA, TINY, 20, captured=True),
    "captured, window of one": Case(StateRule.DELTA, TINY, 1, passes=((5, 2, 1), (1, 1, 0), (1, 3, 1)), captured=True),
    "broken node": Case(StateRule.DELTA, TINY, 40, broken=True),
    "page ends": Case(StateRule.DELTA, TINY, 9, passes=TURNS, page_size=4),
    "page ends, sum": Case(StateRule.SUM, ONE_TAP, 9, passes=TURNS, page_size=4),
    "page ends, selective": Case(StateRule.SUM, SELECTIVE, 6, passes=TURNS, page_size=4),
    "page ends, keyed": Case(StateRule.DELTA, KEYED, 6, passes=TURNS, page_size=4),
    "page ends, convolution": Case(StateRule.SUM, SHORT, 9, passes=TURNS, page_size=4),
}
if not INTERPRETED:
    CASES |= {
        "qwen3.5": Case(StateRule.DELTA, REAL, 64),
        "16 bits, qwen3.5": Case(StateRule.DELTA, REAL, 64, torch.bfloat16),
    }


class Compared:
    """A layer with the same weights, states and passes for both."""

    def __init__(self, case: Case) -> None:
        shape, self.case = case.shape, case
        self.generator, self.random = torch.Generator().manual_seed(0), random.Random(0)
        keys = (shape.channels - shape.heads * shape.value_width) // 2
        self.decay = -torch.rand(shape.heads, shape.key_width, generator=self.generator).to(DEVICE)
        self.layout = HeadsLayout(
            case.rule,
            keys // max(1, shape.key_width),
            0,
            keys,
            2 * keys,
            normed=case.rule is StateRule.DELTA,
            scaling=0.5,
        )
        bias = None if case.rule is StateRule.SUM else self.draw(shape.channels)
        self.convolution = ShortConvolution(self.draw(shape.channels, shape.taps) * 0.5, bias, silu=True)
        sizes = 2, 3, case.window, shape, case.dtype, DEVICE, 4, case.page_size or 1
        self.states = [RecurrentStates(*sizes) for _ in range(2)]
        for states in self.states:
            for pool in (states.states, states.windows, states.inputs, states.gates):
                pool.fill_(math.nan)
            states.lengths.fill_(77)
        self.forms = TreeRecurrence("triton", DEVICE), TreeRecurrence("torch", DEVICE)
        self.prefixes = [0, 0, 0]

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(DEVICE, self.case.dtype)

    def errors(self) -> list[float]:
        """Relative errors of the convolution and of the heads, of all passes."""
        found = []
        for number, pass_ in enumerate(self.case.passes):
            forms: list[tuple[int, ...] | int] = []
            for rows in pass_:
                small = min(abs(rows), self.case.window) if rows < 0 else rows
                tree = (0, *(self.random.randrange(row) for row in range(1, small)))
                forms.append(tree if rows < 0 else small)
            found += self.pass_errors(forms, broken=self.case.broken and number == 1)
            if self.case.page_size and not number:
                for states in self.states:
                    for slot in SECONDS:
                        states.pair_slots(slot, SECONDS[slot])
        return found + (self.errors_behind_page_ends() if self.case.page_size else [])

    def errors_behind_page_ends(self) -> list[float]:
        """Of rows that follow what two sequences have left, in slots of theirs."""
        page = self.case.page_size
        for place, (slot, second) in enumerate(SECONDS.items()):
            end = self.prefixes[place] // page * page
            lengths = [states.part_slots(slot, second, end).read() for states in self.states]
            assert lengths[0] == lengths[1] and 0 <= lengths[0] <= end, lengths
            for states in self.states:
                states.copy_slot(second, slot)
            self.prefixes[place] = end
        return self.pass_errors([1, 3, 1], broken=False)

    def pass_errors(self, forms: list[tuple[int, ...] | int], *, broken: bool) -> list[float]:
        counts = [one if isinstance(one, int) else len(one) for one in forms]
        starts = [sum(counts[:place]) for place in range(len(counts) + 1)]
        trees = tuple(None if isinstance(one, int) else one for one in forms)
        batch = AttentionBatch(tuple(starts), tuple(self.prefixes), ((0,),) * 3, 1 << 20, trees)
        inputs, heads = self.draw(batch.rows, self.case.shape.channels), self.case.shape.heads
        gates = torch.rand(batch.rows, self.case.shape.gates, generator=self.generator).to(DEVICE)
        if not self.case.shape.selective:
            gates[:, : heads * (self.case.shape.key_width if self.case.shape.keyed else 1)] *= -2
        read = self.case.shape.key_groups * self.case.shape.key_width
        queries = torch.rand(batch.rows, read, generator=self.generator).to(DEVICE)
        if broken:
            inputs[2] = math.nan
        made = []
        for form, states in zip(self.forms, self.states, strict=True):
            plan = form.plan(batch, (1, 2, 3), states)
            if self.case.captured and form is self.forms[0]:
                bounded = triton_backend.SequenceKinds.bounded(3, batch.rows, self.case.window)
                plan = replace(plan, kinds=bounded)  # type: ignore[call-arg]
            of_pass = RecurrentPass(form, plan, states)
            early = gates[:, : self.case.shape.early_gates]
            convolved = of_pass.convolve(1, inputs, early, self.convolution)
            mixed = convolved.rows
            if self.case.shape.selective:
                mixed = of_pass.scan(1, convolved, gates, queries, self.decay)
            elif self.case.shape.heads:
                mixed = of_pass.mix(1, convolved, gates, self.layout)
            made.append((convolved.rows.float(), mixed.float(), plan.node_slots))
        for place, (form_, count) in enumerate(zip(forms, counts, strict=True)):
            if count:
                self.accept(place, form_, count)
        (own, mixed, slots), (expected, other, theirs) = made
        assert torch.equal(slots, theirs) and torch.equal(self.states[0].lengths[1:], self.states[1].lengths[1:])
        assert torch.equal(own.isnan(), expected.isnan()) and torch.equal(mixed.isnan(), other.isnan())
        return [difference(own, expected), difference(mixed, other)]

    def accept(self, place: int, form: tuple[int, ...] | int, count: int) -> None:
        """A random path; of a broken pass the root alone, which is finite."""
        last = count - 1 if count > self.case.window else self.random.randrange(1 if self.case.broken else count)
        path = [last]
        while path[0]:
            path.insert(0, path[0] - 1 if isinstance(form, int) else form[path[0]])
        prefix = self.prefixes[place]
        for states in self.states:
            states.move_nodes(place + 1, [prefix + row for row in path], range(prefix, prefix + len(path)))
        self.prefixes[place] += len(path)


def difference(found: Tensor, expected: Tensor) -> float:
    """Relative; NaN counts as zero."""
    found, expected = found.nan_to_num(), expected.nan_to_num()
    return float((found - expected).norm() / expected.norm().clamp(min=1e-6))


def gating_errors(dtype: torch.dtype) -> list[float]:
    """Of tokens' gates and of the gated norm, which read parts of wider rows."""
    generator, heads, width = torch.Generator().manual_seed(1), 5, 6

    def draw(*shape: int) -> Tensor:
        return (4 * torch.randn(shape, generator=generator)).to(DEVICE, dtype)

    decay, bias = -draw(heads).float().abs(), draw(heads).float()
    product, mixed, weight = draw(7, 2 * heads + 3), draw(7, heads, width), draw(width)
    forms = [TreeRecurrence(backend, DEVICE).form for backend in ("triton", "torch")]
    gates = [form.delta_gates(product[:, 3:], decay, bias) for form in forms]
    gate = draw(7, heads * width + 2)[:, 2:]
    gated = [form.gated_heads(mixed, gate, weight, 1e-6).float() for form in forms]
    found = [difference(*gates), difference(*gated)]
    skip, wide = draw(heads).float(), draw(7, 3 * heads * width)
    own, opening = wide[:, 3 : 3 + heads * width], wide[:, -heads * width :]
    for norm, groups in ((draw(heads * width), 1), (draw(heads * width), heads), (None, 1)):
        of = SpaceOutput(skip, norm, 1e-6, groups)
        found.append(difference(*(form.space_output(mixed, own, opening, of).float() for form in forms)))
    for limits in ((0.0, float("inf")), (0.5, 2.0)):
        found.append(difference(*(form.space_gates(product[:, :heads], decay, bias, limits) for form in forms)))
    return found


def main() -> None:
    found = {name: max(Compared(case).errors()) for name, case in CASES.items()}
    found["gating"] = max(gating_errors(torch.float32))
    found["gating, 16 bits"] = max(gating_errors(torch.float16 if INTERPRETED else torch.bfloat16))
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
