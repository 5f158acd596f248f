"""Recurrent layers over trees: every row gets what its own path would, run alone and token by token in fp64."""

from __future__ import annotations

import math

import pytest
import torch
from examples import examples, is_full
from hypothesis import given
from hypothesis import strategies as st
from kernel_worker import INTERPRETED, compiled, work
from torch import Tensor

from tree_kernels.attention import AttentionBatch
from tree_kernels.pages import OutOfPages
from tree_kernels.recurrence import (
    HeadsLayout,
    RecurrentPass,
    RecurrentStates,
    ShortConvolution,
    StateRule,
    StateShape,
    TreeRecurrence,
)
from tree_kernels.recurrence.reference import convolve_text, run_text

WINDOW = 8
SHAPE = StateShape(channels=2 * 2 * 4 + 4 * 3, taps=4, heads=4, key_width=4, value_width=3)
LAYOUTS = {
    rule: HeadsLayout(rule, key_heads=2, query_at=0, key_at=8, value_at=16, normed=rule is StateRule.DELTA, scaling=0.5)
    for rule in StateRule
}


class Layer:
    """One recurrent layer with weights, and slots full of garbage."""

    def __init__(self, rule: StateRule, seed: int, *, backend: str = "torch", shape: StateShape = SHAPE) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.layout, self.shape = LAYOUTS[rule], shape
        self.convolution = ShortConvolution(self.draw(shape.channels, shape.taps), self.draw(shape.channels), silu=True)
        device = torch.device("cpu")
        self.states = RecurrentStates(2, 3, WINDOW, shape, torch.float32, device)
        for pool in (self.states.states, self.states.windows, self.states.inputs, self.states.gates):
            pool.fill_(math.nan)
        self.states.lengths.fill_(77)
        self.recurrence = TreeRecurrence(backend, device)  # type: ignore[arg-type]

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random)

    def tokens(self, count: int) -> tuple[Tensor, Tensor]:
        """Inputs and gates of random tokens."""
        decays = -torch.rand(count, self.shape.heads, generator=self.random).square() * 3
        betas = torch.rand(count, self.shape.heads, generator=self.random)
        return self.draw(count, self.shape.channels), torch.cat([decays, betas], dim=1)

    def run(
        self, batch: AttentionBatch, slots: tuple[int, ...], inputs: Tensor, gates: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The convolution's outputs and those of the heads."""
        of_pass = RecurrentPass(self.recurrence, self.recurrence.plan(batch, slots, self.states), self.states)
        convolved = of_pass.convolve(1, inputs, gates, self.convolution)
        return convolved.rows, of_pass.mix(1, convolved, gates, self.layout)


def batch_of(prefixes: list[int], parents: list[tuple[int, ...] | int]) -> AttentionBatch:
    """Rows of sequences: a tree's parents, or the length of a chain."""
    counts = [one if isinstance(one, int) else len(one) for one in parents]
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    pages = tuple((0,) for _ in counts)
    trees = tuple(None if isinstance(one, int) else one for one in parents)
    return AttentionBatch(tuple(starts), tuple(prefixes), pages, 1 << 20, trees)


def path_to(parents: tuple[int, ...] | int, row: int) -> list[int]:
    if isinstance(parents, int):
        return list(range(row + 1))
    path = [row]
    while path[0]:
        path.insert(0, parents[path[0]])
    return path


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected.double(), rtol=1e-4, atol=1e-5)


chains = st.integers(1, 2 * WINDOW)
trees = st.lists(st.integers(0, 1 << 16), min_size=1, max_size=WINDOW).map(
    lambda draws: (0, *(draw % (row + 1) for row, draw in enumerate(draws[:-1])))
)
passes = st.lists(st.one_of(chains, trees), min_size=1, max_size=4)


def leaves(form: tuple[int, ...] | int) -> list[list[int]]:
    """Paths that hold every row."""
    if isinstance(form, int):
        return [path_to(form, form - 1)]
    inner = set(form[1:])
    return [path_to(form, row) for row in range(len(form)) if row not in inner]


@pytest.mark.parametrize("rule", StateRule)
@given(plan=st.lists(passes, min_size=1, max_size=3), seed=st.integers(0, 1 << 16))
@examples(24)
def test_every_row_gets_what_its_path_gets_alone(
    rule: StateRule, plan: list[list[int | tuple[int, ...]]], seed: int
) -> None:
    """Several sequences, each a list of passes over chains and trees of which a random path is accepted."""
    layer = Layer(rule, seed)
    texts = [[torch.empty(0, SHAPE.channels), torch.empty(0, SHAPE.gates)] for _ in plan]
    slots = [layer.states.allocate_slot() for _ in plan]
    for turn in range(max(map(len, plan))):
        taking = [b for b, forms in enumerate(plan) if turn < len(forms)]
        forms = [plan[b][turn] for b in taking]
        batch = batch_of([len(texts[b][0]) for b in taking], forms)
        inputs, gates = layer.tokens(batch.rows)
        convolved, mixed = layer.run(batch, tuple(slots[b] for b in taking), inputs, gates)
        for place, (b, form) in enumerate(zip(taking, forms, strict=True)):
            own = slice(batch.query_starts[place], batch.query_starts[place + 1])
            for path in leaves(form):
                whole = [torch.cat([text, one[own][path]]) for text, one in zip(texts[b], (inputs, gates), strict=True)]
                close(convolved[own][path], convolve_text(whole[0], layer.convolution)[-len(path) :])
                expected = run_text(whole[0], whole[1], layer.convolution, SHAPE, layer.layout)
                close(mixed[own][path], expected[-len(path) :])
            count = batch.row_counts[place]
            path = path_to(form, count - 1 if count > WINDOW else int(torch.randint(count, (), generator=layer.random)))
            prefix = len(texts[b][0])
            layer.states.move_nodes(slots[b], [prefix + row for row in path], [prefix + n for n in range(len(path))])
            texts[b] = [torch.cat([text, one[own][path]]) for text, one in zip(texts[b], (inputs, gates), strict=True)]


def test_long_prompts_are_read_in_chunks() -> None:
    """Of more rows than are solved together, in one pass and in several sizes."""
    layer, counts = Layer(StateRule.DELTA, 4), [150, 3, 9, 70]
    inputs, gates = layer.tokens(sum(counts))
    slot, at, found = layer.states.allocate_slot(), 0, []
    for count in counts:
        own = slice(at, at + count)
        found.append(layer.run(batch_of([at], [count]), (slot,), inputs[own], gates[own])[1])
        at += count
    close(torch.cat(found), run_text(inputs, gates, layer.convolution, SHAPE, layer.layout))


@pytest.mark.parametrize("rule", StateRule)
def test_a_broken_node_spoils_its_descendants_alone(rule: StateRule) -> None:
    layer = Layer(rule, 1)
    slot = layer.states.allocate_slot()
    inputs, gates = layer.tokens(3)
    layer.run(batch_of([0], [3]), (slot,), inputs, gates)
    parents = (0, 0, 0, 1, 2)
    own, of_own = layer.tokens(5)
    _, expected = layer.run(batch_of([3], [parents]), (slot,), own, of_own)
    own[1] = math.nan
    _, got = layer.run(batch_of([3], [parents]), (slot,), own, of_own)
    assert got[[1, 3]].isnan().all()
    torch.testing.assert_close(got[[0, 2, 4]], expected[[0, 2, 4]])


def test_sequences_without_rows_change_nothing() -> None:
    layer = Layer(StateRule.DELTA, 2)
    slot = layer.states.allocate_slot()
    inputs, gates = layer.tokens(2)
    padded = AttentionBatch((0, 2, 2), (0, 0), ((0,),) * 2, 1 << 20, (None,) * 2)
    before = layer.states.states[:, 2:].clone()
    got = layer.run(padded, (slot, 0), inputs[:2], gates[:2])
    close(got[0][:2], convolve_text(inputs[:2], layer.convolution))
    close(got[1][:2], run_text(inputs[:2], gates[:2], layer.convolution, SHAPE, layer.layout))
    torch.testing.assert_close(layer.states.states[:, 2:], before, equal_nan=True)


def test_long_texts_do_not_drift() -> None:
    """One row at a time, and trees of eight of which paths are accepted: the same states, in fp32."""
    tokens = 2000 if is_full() else 600
    layers = [Layer(StateRule.DELTA, 3) for _ in range(2)]
    inputs, gates = layers[0].tokens(tokens)
    # A memory as long as the text.
    gates[:, : SHAPE.heads] *= 1e-3
    slots = [layer.states.allocate_slot() for layer in layers]
    found = torch.empty(2, tokens, SHAPE.heads, SHAPE.value_width)
    for token in range(tokens):
        one = slice(token, token + 1)
        found[0, one] = layers[0].run(batch_of([token], [1]), (slots[0],), inputs[one], gates[one])[1]
    parents, path = (0, 0, 0, 2, 3, 0, 4, 6), [0, 2, 3, 4, 6, 7]
    at = 0
    while at < tokens:
        accepted = path[: min(len(path), tokens - at)]
        own, of_own = layers[1].tokens(len(parents))
        own[accepted] = inputs[at : at + len(accepted)]
        of_own[accepted] = gates[at : at + len(accepted)]
        mixed = layers[1].run(batch_of([at], [parents]), (slots[1],), own, of_own)[1]
        found[1, at : at + len(accepted)] = mixed[accepted]
        layers[1].states.move_nodes(slots[1], [at + row for row in accepted], list(range(at, at + len(accepted))))
        at += len(accepted)
    expected = run_text(inputs, gates, layers[0].convolution, SHAPE, layers[0].layout)
    errors = (found.double() - expected).abs().amax(dim=(2, 3))
    # No later than at the beginning, and between the two no more than rounding.
    assert errors.max() < 2e-5 * expected.abs().max()
    assert errors[:, -tokens // 4 :].max() < 4 * errors[:, : tokens // 4].max() + 1e-6
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=2e-5 * float(expected.abs().max()))


def test_slots_are_counted() -> None:
    states = RecurrentStates(1, 2, 4, SHAPE, torch.float32, torch.device("cpu"))
    held = [states.allocate_slot(), states.allocate_slot()]
    assert held == [1, 2] and states.free_slots == 0
    with pytest.raises(OutOfPages):
        states.allocate_slot()
    states.check_slots(held)
    states.release_slot(1)
    states.check_slots([2])
    with pytest.raises(AssertionError):
        states.check_slots([1, 2])
    with pytest.raises(AssertionError):
        states.release_slot(1)


def test_what_does_not_fit_is_refused() -> None:
    recurrence = TreeRecurrence()
    states = RecurrentStates(1, 1, 2, SHAPE, torch.float32, torch.device("cpu"))
    with pytest.raises(ValueError, match="trees of at most 2 rows"):
        recurrence.plan(batch_of([0], [(0, 0, 1)]), (1,), states)
    with pytest.raises(ValueError, match="slots of states"):
        recurrence.plan(batch_of([0], [1]), (), states)
    with pytest.raises(ValueError, match="expected a backend"):
        TreeRecurrence("other")  # type: ignore[arg-type]
    layer = Layer(StateRule.DELTA, 0)
    plan = layer.recurrence.plan(batch_of([0], [1]), (1,), layer.states)
    inputs, gates = layer.tokens(2)
    with pytest.raises(ValueError, match="expected inputs"):
        RecurrentPass(layer.recurrence, plan, layer.states).convolve(0, inputs, gates, layer.convolution)
    with pytest.raises(ValueError, match="at least one tap"):
        StateShape(1, 0)


def test_memory_is_that_of_the_tensors() -> None:
    states = RecurrentStates(3, 4, 5, SHAPE, torch.bfloat16, torch.device("cpu"))
    tensors = states.states, states.windows, states.inputs, states.gates
    assert states.sequence_bytes * 5 == sum(tensor.nbytes for tensor in tensors)


def check(found: dict[str, float], fp32: float) -> None:
    assert len(found) > 4
    # Written so that NaN fails.
    assert not {name: error for name, error in found.items() if not error <= (2e-2 if "16 bits" in name else fp32)}


def test_kernels_compute_what_the_plain_form_does() -> None:
    pytest.importorskip("triton")
    check(work("recurrence_worker.py", **INTERPRETED), 1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernels_compute_what_the_plain_form_does_on_a_gpu() -> None:
    check(work("recurrence_worker.py", TRITON_INTERPRET="0"), 1e-4)


def test_the_kernels_compile_for_a_gpu() -> None:
    """A program has 227 KB of shared memory."""
    pytest.importorskip("triton")
    needed = compiled("recurrence_compiling_worker.py")
    assert len(needed) > 18 and max(needed.values()) < 227 << 10
