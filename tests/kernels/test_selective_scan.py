"""Selective scans and keyed states over trees: every row gets what its own path would, run alone in fp64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tree_kernels.attention import AttentionBatch
from tree_kernels.recurrence import (
    HeadsLayout,
    RecurrentPass,
    RecurrentStates,
    ShortConvolution,
    StateRule,
    StateShape,
    TreeRecurrence,
)
from tree_kernels.recurrence.reference import convolve_text, run_keyed_text, scan_text

WINDOW = 8
SHAPE = StateShape(channels=10, taps=3, heads=10, key_width=3, value_width=1, selective=True)
# Keys of all channels, of halves, and of each channel.
SHAPES = [SHAPE, replace(SHAPE, key_groups=2), replace(SHAPE, key_width=1, key_groups=10)]
KEYED = StateShape(channels=2 * (2 * 3 + 4), taps=2, heads=2, key_width=3, value_width=4, keyed=True)
LAYOUT = HeadsLayout(StateRule.DELTA, key_heads=2, query_at=0, key_at=6, value_at=12, normed=True, scaling=0.5)
# A chain of so many rows, or a tree's parents.
Form = int | tuple[int, ...]


class Scan:
    """One layer with weights, and slots full of garbage. Its steps, keys and queries are given."""

    def __init__(self, seed: int, shape: StateShape = SHAPE) -> None:
        self.random, self.shape = torch.Generator().manual_seed(seed), shape
        self.convolution = ShortConvolution(self.draw(SHAPE.channels, SHAPE.taps), self.draw(SHAPE.channels), silu=True)
        self.decay = -self.draw(shape.heads, shape.key_width).exp()
        self.states = RecurrentStates(2, 2, WINDOW, shape, torch.float32, torch.device("cpu"))
        for pool in (self.states.states, self.states.windows, self.states.inputs, self.states.gates):
            pool.fill_(math.nan)
        self.states.lengths.fill_(77)
        self.recurrence = TreeRecurrence()

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random)

    def tokens(self, count: int) -> list[Tensor]:
        """Inputs, gates and queries of random tokens."""
        width = self.shape.key_groups * self.shape.key_width
        steps, keys = torch.rand(count, SHAPE.heads, generator=self.random), self.draw(count, width)
        return [self.draw(count, SHAPE.channels), torch.cat([steps, keys], dim=1), self.draw(count, width)]

    def run(self, batch: AttentionBatch, slots: tuple[int, ...], tokens: list[Tensor]) -> Tensor:
        inputs, gates, queries = tokens
        of_pass = RecurrentPass(self.recurrence, self.recurrence.plan(batch, slots, self.states), self.states)
        early = inputs.new_empty(len(inputs), 0)
        convolved = of_pass.convolve(1, inputs, early, self.convolution)
        return of_pass.scan(1, convolved, gates, queries, self.decay)

    def alone(self, text: list[Tensor]) -> Tensor:
        return scan_text(convolve_text(text[0], self.convolution), text[1], text[2], self.decay)


def batch_of(prefixes: list[int], forms: list[Form]) -> AttentionBatch:
    starts = [0]
    for form in forms:
        starts.append(starts[-1] + (form if isinstance(form, int) else len(form)))
    trees = tuple(None if isinstance(form, int) else form for form in forms)
    return AttentionBatch(tuple(starts), tuple(prefixes), ((0,),) * len(forms), 1 << 20, trees)


def path_to(form: Form, row: int) -> list[int]:
    path = [row]
    while path[0]:
        path.insert(0, path[0] - 1 if isinstance(form, int) else form[path[0]])
    return path


trees = st.lists(st.integers(0, 1 << 16), min_size=1, max_size=WINDOW).map(
    lambda draws: (0, *(draw % (row + 1) for row, draw in enumerate(draws[:-1])))
)
passes = st.lists(st.one_of(st.integers(1, 2 * WINDOW), trees), min_size=1, max_size=4)


@given(plan=st.lists(passes, min_size=1, max_size=2), seed=st.integers(0, 1 << 16), shape=st.sampled_from(SHAPES))
@examples(12)
def test_every_row_gets_what_its_path_gets_alone(plan: list[list[Form]], seed: int, shape: StateShape) -> None:
    """Several sequences, each a list of passes over chains and trees of which a random path is accepted."""
    scan = Scan(seed, shape)
    texts, slots = [scan.tokens(0) for _ in plan], [scan.states.allocate_slot() for _ in plan]
    for turn in range(max(map(len, plan))):
        taking = [b for b, forms in enumerate(plan) if turn < len(forms)]
        forms = [plan[b][turn] for b in taking]
        batch = batch_of([len(texts[b][0]) for b in taking], forms)
        tokens = scan.tokens(batch.rows)
        scanned = scan.run(batch, tuple(slots[b] for b in taking), tokens)
        for place, (b, form) in enumerate(zip(taking, forms, strict=True)):
            count, start = batch.row_counts[place], batch.query_starts[place]
            for row in range(count):
                path = [start + one for one in path_to(form, row)]
                whole = [torch.cat([text, one[path]]) for text, one in zip(texts[b], tokens, strict=True)]
                expected = scan.alone(whole)[-1]
                torch.testing.assert_close(scanned[start + row].double(), expected, rtol=1e-4, atol=1e-5)
            last = count - 1 if count > WINDOW else int(torch.randint(count, (), generator=scan.random))
            path, prefix = path_to(form, last), len(texts[b][0])
            scan.states.move_nodes(slots[b], [prefix + row for row in path], range(prefix, prefix + len(path)))
            own = [start + row for row in path]
            texts[b] = [torch.cat([text, one[own]]) for text, one in zip(texts[b], tokens, strict=True)]


def test_long_prompts_are_read_in_chunks() -> None:
    """Of more rows than are scanned together, then a tree behind them whose broken node spoils its descendants."""
    scan = Scan(1)
    tokens, slot = scan.tokens(150), scan.states.allocate_slot()
    found = scan.run(batch_of([0], [150]), (slot,), tokens)
    torch.testing.assert_close(found.double(), scan.alone(tokens), rtol=1e-4, atol=1e-5)
    own, parents = scan.tokens(5), (0, 0, 0, 1, 2)
    own[1][1] = math.nan
    got = scan.run(batch_of([150], [parents]), (slot,), own)
    assert got[[1, 3]].isnan().all()
    for row in (0, 2, 4):
        path = path_to(parents, row)
        expected = scan.alone([torch.cat([text, one[path]]) for text, one in zip(tokens, own, strict=True)])[-1]
        torch.testing.assert_close(got[row].double(), expected, rtol=1e-4, atol=1e-5)


def test_gates_of_another_kind_are_refused() -> None:
    scan = Scan(2)
    tokens = scan.tokens(2)
    with pytest.raises(ValueError, match="expected 13 gates of a selective layer"):
        scan.run(batch_of([0], [2]), (1,), [tokens[0], tokens[1][:, 1:], tokens[2]])


def test_keyed_states_of_every_row_are_those_of_its_path() -> None:
    """A prompt of more rows than are kept, trees of which a path is accepted, and a chain, of one sequence."""
    random = torch.Generator().manual_seed(3)
    states = RecurrentStates(1, 1, WINDOW, KEYED, torch.float32, torch.device("cpu"))
    for pool in (states.states, states.windows, states.inputs, states.gates):
        pool.fill_(math.nan)
    recurrence, slot = TreeRecurrence(), states.allocate_slot()
    convolution = ShortConvolution(torch.randn(KEYED.channels, 2, generator=random), silu=True)
    text = [torch.empty(0, KEYED.channels), torch.empty(0, KEYED.gates)]
    forms: list[tuple[Form, list[int]]] = [(20, list(range(20))), ((0, 0, 0, 2, 3, 0, 4), [0, 2, 3, 4]), (3, [0, 1])]
    forms += [((0, 0, 1, 0, 3), [0, 3]), (1, [0])]
    for form, accepted in forms:
        batch = batch_of([len(text[0])], [form])
        inputs = torch.randn(batch.rows, KEYED.channels, generator=random)
        gates = torch.rand(batch.rows, KEYED.gates, generator=random)
        gates[:, : KEYED.heads * KEYED.key_width] *= -2
        of_pass = RecurrentPass(recurrence, recurrence.plan(batch, (slot,), states), states)
        convolved = of_pass.convolve(0, inputs, gates[:, :0], convolution)
        mixed = of_pass.mix(0, convolved, gates, LAYOUT)
        for row in range(batch.rows):
            path = path_to(form, row)
            whole = [torch.cat([old, own[path]]) for old, own in zip(text, (inputs, gates), strict=True)]
            expected = run_keyed_text(*whole, convolution, KEYED, LAYOUT)[-1]
            torch.testing.assert_close(mixed[row].double(), expected, rtol=1e-4, atol=1e-5)
        prefix = len(text[0])
        states.move_nodes(slot, [prefix + row for row in accepted], range(prefix, prefix + len(accepted)))
        text = [torch.cat([old, own[accepted]]) for old, own in zip(text, (inputs, gates), strict=True)]
    with pytest.raises(ValueError, match="expected 8 gates of keyed states"):
        of_pass.mix(0, convolved, gates[:, 1:], LAYOUT)
