"""States that sequences leave behind page ends, while nobody knows what their passes accept: those of the page end."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

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

WINDOW, PAGE_SIZE = 9, 4
CPU = torch.device("cpu")
# Of a sequence that generates, of another, and one that begins behind the page end.
OWN, BESIDE, LATER = 1, 2, 3
# A chain of so many rows, or a tree's parents.
Form = int | tuple[int, ...]
HEADS = StateShape(channels=2 * 2 * 4 + 4 * 3, taps=4, heads=4, key_width=4, value_width=3)
SHAPES = {
    "delta": HEADS,
    "sum": HEADS,
    "convolution": StateShape(channels=6, taps=3),
    "selective": StateShape(channels=8, taps=3, heads=8, key_width=3, value_width=1, selective=True),
    "keyed": StateShape(channels=2 * (2 * 3 + 4), taps=2, heads=2, key_width=3, value_width=4, keyed=True),
}


@dataclass(frozen=True)
class Tokens:
    """Inputs, gates and queries of tokens."""

    inputs: Tensor
    gates: Tensor
    queries: Tensor

    def __getitem__(self, rows: object) -> Tokens:
        return Tokens(self.inputs[rows], self.gates[rows], self.queries[rows])  # type: ignore[index]

    def __add__(self, other: Tokens) -> Tokens:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Tokens(*(torch.cat(pair) for pair in pairs))


class Layer:
    """One layer of a kind with weights, and slots full of garbage."""

    def __init__(self, kind: str, seed: int) -> None:
        self.kind, self.shape = kind, SHAPES[kind]
        self.random = torch.Generator().manual_seed(seed)
        self.convolution = ShortConvolution(self.draw(self.shape.channels, self.shape.taps), silu=True)
        self.decay = -self.draw(self.shape.heads, self.shape.key_width).exp()
        rule, keys = StateRule.SUM if kind == "sum" else StateRule.DELTA, 6 if kind == "keyed" else 8
        self.layout = HeadsLayout(rule, keys // max(1, self.shape.key_width), 0, keys, 2 * keys, normed=True)
        self.states = RecurrentStates(2, 3, WINDOW, self.shape, torch.float32, CPU, 2, PAGE_SIZE)
        for pool in (self.states.states, self.states.windows, self.states.inputs, self.states.gates):
            pool.fill_(math.nan)
        self.states.lengths.fill_(77)
        self.second = self.states.kept_slots[0]
        self.recurrence = TreeRecurrence()
        # Tokens of the text that `reads` has read.
        self.read_to = 0

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random)

    def tokens(self, count: int) -> Tokens:
        gates = torch.rand(count, self.shape.gates, generator=self.random)
        if not self.shape.selective:
            gates[:, : self.shape.heads * (self.shape.key_width if self.shape.keyed else 1)] *= -1
        width = self.shape.key_groups * self.shape.key_width
        return Tokens(self.draw(count, self.shape.channels), gates, self.draw(count, width))

    def run(self, slot: int, prefix: int, form: Form, tokens: Tokens) -> Tensor:
        """One sequence's rows, beside another one's."""
        rows = form if isinstance(form, int) else len(form)
        both, tree = tokens + self.tokens(1), None if isinstance(form, int) else form
        batch = AttentionBatch((0, rows, rows + 1), (prefix, 5), ((0,),) * 2, 1 << 20, (tree, None))
        plan = self.recurrence.plan(batch, (slot, BESIDE), self.states)
        of_pass = RecurrentPass(self.recurrence, plan, self.states)
        early = both.gates[:, : self.shape.early_gates]
        convolved = of_pass.convolve(1, both.inputs, early, self.convolution)
        made = convolved.rows
        if self.shape.selective:
            made = of_pass.scan(1, convolved, both.gates, both.queries, self.decay)
        elif self.shape.heads:
            made = of_pass.mix(1, convolved, both.gates, self.layout)
        return made[:rows]

    def accept(self, prefix: int, form: Form, last: int) -> list[int]:
        """The path to a row, whose inputs move behind the root."""
        path = [last]
        while path[0]:
            path.insert(0, path[0] - 1 if isinstance(form, int) else form[path[0]])
        self.states.move_nodes(OWN, [prefix + row for row in path], range(prefix, prefix + len(path)))
        return path

    def part(self, tokens: int) -> int:
        return self.states.part_slots(OWN, self.second, tokens).read()

    def goes_on(self, tokens: int, behind: Tokens) -> Tensor:
        """What rows get that follow the state left behind so many tokens."""
        self.states.copy_slot(self.second, LATER)
        return self.run(LATER, tokens, len(behind.inputs), behind)

    def reads(self, text: Tokens, behind: Tokens) -> Tensor:
        """What they get that follow a text that is read token by token, from where it was read to before."""
        for at in range(self.read_to, len(text.inputs)):
            self.run(LATER, at, 1, text[at : at + 1])
        self.read_to = len(text.inputs)
        return copy.deepcopy(self).run(LATER, self.read_to, len(behind.inputs), behind)

    def held(self) -> list[Tensor]:
        """The state that the last rows followed."""
        return [self.states.states[1, LATER].clone(), self.states.windows[1, LATER].clone()]


trees = st.lists(st.integers(0, 1 << 16), min_size=1, max_size=WINDOW).map(
    lambda draws: (0, *(draw % (row + 1) for row, draw in enumerate(draws[:-1])))
)
forms = st.lists(st.one_of(st.integers(1, WINDOW), trees), min_size=1, max_size=12)


@pytest.mark.parametrize("kind", SHAPES)
@given(prompt=st.integers(1, 14), plan=forms, ahead=st.integers(0, 2), seed=st.integers(0, 1 << 16))
@examples(16)
def test_what_is_left_is_the_state_of_the_last_page_end(
    kind: str, prompt: int, plan: list[Form], ahead: int, seed: int
) -> None:
    """Behind every pass: of its text, or of that up to `ahead` tokens before its end, as where it is cut."""
    layer = Layer(kind, seed)
    reader, text = copy.deepcopy(layer), layer.tokens(prompt)
    layer.run(OWN, 0, prompt, text)
    layer.states.pair_slots(OWN, layer.second)
    begins = prompt if prompt > WINDOW else 0
    for form in plan:
        prefix, rows = len(text.inputs), layer.tokens(form if isinstance(form, int) else len(form))
        layer.run(OWN, prefix, form, rows)
        count = len(rows.inputs)
        text += rows[layer.accept(prefix, form, int(torch.randint(count, (), generator=layer.random)))]
        end = (len(text.inputs) - ahead) // PAGE_SIZE * PAGE_SIZE
        if end and end >= begins:
            check(layer, reader, text, end)


def check(layer: Layer, reader: Layer, text: Tokens, end: int) -> None:
    """What is left now, if it is, makes of further rows what they get behind the text up to the page end."""
    behind, cut = layer.tokens(3), copy.deepcopy(layer)
    length = cut.part(end)
    if not 0 <= length <= end:
        # Only where the state has gone past a later page end.
        gone = int(layer.states.lengths[layer.states.current(OWN)])
        assert length > end and (gone - 1) // PAGE_SIZE * PAGE_SIZE > end
        return
    found, expected = cut.goes_on(end, behind), reader.reads(text[:end], behind)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("prompt", [5, 12, 14])
def test_behind_plain_decoding_it_is_that_state_bit_for_bit(kind: str, prompt: int) -> None:
    layer = Layer(kind, 7)
    text, behind = layer.tokens(40), layer.tokens(1)
    layer.run(OWN, 0, prompt, text[:prompt])
    layer.states.pair_slots(OWN, layer.second)
    found, expected = dict[int, list[Tensor]](), dict[int, list[Tensor]]()
    for at in range(prompt, 40):
        layer.run(OWN, at, 1, text[at : at + 1])
        end = at // PAGE_SIZE * PAGE_SIZE
        if end >= prompt:
            cut = copy.deepcopy(layer)
            assert cut.part(end) == end
            cut.goes_on(end, behind)
            found.setdefault(end, cut.held())
            assert all(map(torch.equal, found[end], cut.held()))
    # Another, without a second slot, that ends there.
    layer.run(LATER, 0, prompt, text[:prompt])
    for at in range(prompt, 40):
        layer.run(LATER, at, 1, text[at : at + 1])
        expected[at] = layer.held()
    assert len(found) > 5 and all(all(map(torch.equal, held, expected[end])) for end, held in found.items())


@pytest.mark.parametrize("kind", SHAPES)
def test_the_same_rows_get_the_same_with_two_slots(kind: str) -> None:
    outputs = []
    for paired in (False, True):
        layer = Layer(kind, 3)
        text, at, found = layer.tokens(40), 0, []
        for form in (12, 1, 1, 3, 7, 1, 9, 2, 4):
            found.append(layer.run(OWN, at, form, text[at : at + form]))
            if at == 0 and paired:
                layer.states.pair_slots(OWN, layer.second)
            at += form
        assert layer.states.current(OWN) in ((OWN, layer.second) if paired else (OWN,))
        outputs.append(torch.cat(found))
    assert torch.equal(*outputs)
