"""Passes of fixed sizes are the passes they stand for. No GPU is needed: what a graph would replay is run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from eagle_drafting import SETTINGS, feed, make_drafter, opened, same_tree, sequence_of, states_of, text
from eagle_heads import KINDS, make_head
from torch import Tensor

from draft_service.eagle.config import EagleConfig
from draft_service.eagle.drafter import EagleDrafter, HeadNetwork
from draft_service.eagle.head import EagleHead
from draft_service.neural import captured
from draft_service.neural.captured import CapturedDrafting, PassSize, StaticPass, pass_size
from draft_service.neural.tail_attention import TailPart
from draft_service.neural.tree_drafting import RowOutput, TreeDrafting
from outrider.sampling import VerificationMode
from tree_kernels.attention import AttentionBatch, AttentionPlan, TreeAttention
from tree_kernels.kv_move import write_kv


@dataclass
class _Plan(AttentionPlan):
    """Room for batches up to `batch`, and the plan of the one that was packed last."""

    live: AttentionPlan


class StaticTorch:
    """PyTorch's attention behind plans that stay, as the Triton backend has them; free rows come out as NaN."""

    def __init__(self) -> None:
        self._attention = TreeAttention("torch")

    def plan(self, batch: AttentionBatch, integers: Tensor | None = None) -> _Plan:
        assert integers is not None
        return _Plan(batch, AttentionPlan(batch))

    def pack(self, plan: _Plan, batch: AttentionBatch) -> Tensor:
        assert batch.sequences == plan.batch.sequences and batch.rows <= plan.batch.rows
        plan.live = self._attention.plan(batch)
        return torch.arange(3, dtype=torch.int32)

    def run(self, plan: AttentionPlan, query: Tensor, key_cache: Tensor, value_cache: Tensor, scale: float) -> Tensor:
        assert isinstance(plan, _Plan) and len(query) == plan.batch.rows
        rows = plan.live.batch.rows
        output = torch.full_like(query, float("nan"))
        output[:rows] = self._attention.run(plan.live, query[:rows], key_cache, value_cache, scale)
        return output


class StaticDrafting(CapturedDrafting):
    """Runs what a graph would replay."""

    def __init__(self, head: EagleHead, config: EagleConfig) -> None:
        TreeDrafting.__init__(self, HeadNetwork(head), config.tree, config.cache)
        self._static = StaticTorch()
        self._replays = {}
        self.eager = 0

    def _capture(
        self,
        size: PassSize,
        parts: Sequence[TailPart],
        tokens: list[int],
        carried: Tensor | None,
        positions: list[int],
    ) -> tuple[StaticPass, Callable[[], RowOutput]]:
        static = StaticPass(size, self.network, self._static, self.cache, 3)
        # What the first pass leaves behind must not reach the next.
        static.load(parts, tokens, carried, positions)
        return static, static.run


def write_taken(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """`write_kv` as a GPU has it: rows without a slot are left out."""
    taken = slots >= 0
    write_kv(key[taken], value[taken], keys, values, slots[taken].long())


@pytest.fixture
def static_drafter(monkeypatch: pytest.MonkeyPatch) -> Callable[[EagleHead], EagleDrafter]:
    monkeypatch.setattr(captured, "write_kv", write_taken)

    def make(head: EagleHead) -> EagleDrafter:
        config = EagleConfig(**SETTINGS)
        drafter = make_drafter(head)
        drafter._drafting = StaticDrafting(head, config)
        return drafter

    return make


@pytest.mark.parametrize("kind", [KINDS["eagle-3"], KINDS["two layers"]], ids=["one layer", "two layers"])
@pytest.mark.parametrize("count", [1, 3, 5])
def test_static_passes_draft_the_same_trees(
    count: int, kind: dict[str, object], static_drafter: Callable[[EagleHead], EagleDrafter]
) -> None:
    head = make_head(**kind)
    modes = list(VerificationMode)
    drafters = [make_drafter(head), static_drafter(head)]
    known = [states_of(head, 40, i) for i in range(count)]
    followed = [
        [opened(drafter, sequence_of(text(7 + 3 * i, i), modes[i % 3]), known[i]) for i in range(count)]
        for drafter in drafters
    ]
    for step in range(5):
        # Every other sequence takes part, in turn; passes shrink and grow.
        chosen = [i for i in range(count) if count == 1 or (i + step) % 2 or step == 4]
        trees = [
            drafter.propose([sequences[i] for i in chosen])
            for drafter, sequences in zip(drafters, followed, strict=True)
        ]
        for expected, found in zip(*trees, strict=True):
            assert expected.drafted
            same_tree(found, expected)
        for sequences in followed:
            for i in chosen:
                length = len(sequences[i].token_ids)
                sequences[i].token_ids.extend(text(1 + step, step))
                feed(sequences[i], known[i][length - 1 : length + step], length - 1)
    drafting = drafters[1]._drafting
    assert isinstance(drafting, StaticDrafting)
    assert {size.new == size.tail for size in drafting._replays} == {True, False}


def test_sizes_are_few_and_hold_their_passes() -> None:
    tree = EagleConfig(topk=8, num_steps=6).tree

    def part(rows: int, new: int, *, causal: bool) -> TailPart:
        return TailPart([0], 0, rows, new, None if causal else (0,) * rows)

    level = [part(41, 8, causal=False), part(9, 3, causal=False), part(1, 1, causal=False)]
    assert pass_size(level, tree) == PassSize(4, 4 * 41, 32)
    committed = [part(20, 20, causal=True), part(4, 4, causal=True), part(8, 8, causal=True)]
    assert pass_size(committed, tree) == PassSize(4, 32, 32)
    assert pass_size([part(20, 20, causal=True)], tree) is None
    capacity = PassSize(4, 4 * 41, 32).capacity(make_drafter()._started.cache)
    assert capacity.rows == 164 and capacity.row_counts == (41,) * 4
    assert sum(map(len, capacity.pages)) == SETTINGS["kv_tokens"] // SETTINGS["page_size"]
