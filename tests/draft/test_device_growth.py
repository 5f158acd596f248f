"""Trees that grow on the device are those that grow on the host, in every shape, whatever requests ask for."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from static_drafting import StaticDrafting, settings_of, static_kv  # noqa: F401
from torch import Tensor

from draft_service.drafters.base import DraftSequence
from draft_service.neural.cached_prefixes import CacheEntry
from draft_service.neural.config import NeuralConfig
from draft_service.neural.network import RowOutput
from draft_service.neural.tree_config import TreeShape
from draft_service.neural.tree_drafting import Extension, TreeDrafting
from outrider.sampling import SamplingParams, VerificationMode
from outrider.settings import SettingsError
from outrider.tree import TokenTree
from outrider.wire.frames import TreeLimits
from tree_kernels.philox import gumbel_words_by_sequence, gumbel_words_of
from tree_models.layers.paged import CacheShape, PagedPass

GREEDY, COUPLED, REJECTION = VerificationMode.GREEDY, VerificationMode.COUPLED, VerificationMode.REJECTION
TABLE = 4099


class PathNetwork:
    """A network whose distribution is looked up by the path: what it carries is the path's code."""

    successors, cache_shapes = 1, (CacheShape(1, 2, 2),)
    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self, vocabulary: int, *, mapped: bool = False, flat: float = 1.5) -> None:
        generator = torch.Generator().manual_seed(vocabulary)
        self._logits = torch.randn(TABLE, vocabulary, generator=generator) * flat
        self.token_ids: npt.NDArray[np.int32] | None = None
        if mapped:
            self.token_ids = (np.arange(vocabulary, dtype=np.int32) * 3 + 1).astype(np.int32)

    def forward_rows(
        self,
        token_ids: Tensor,
        carried: Tensor | None,
        positions: Tensor,
        step: PagedPass,  # noqa: ARG002
        sources: Tensor | None = None,
    ) -> RowOutput:
        assert carried is not None
        carried = carried if sources is None else carried[sources]
        codes = (carried[:, 0] * 31 + token_ids + positions) % TABLE
        return RowOutput(codes[:, None], codes[:, None])

    def logits(self, lm_input: Tensor) -> Tensor:
        return self._logits[lm_input[:, 0].long()]


def drawn(both: list[TreeDrafting], sequences: list[DraftSequence]) -> list[list[TokenTree]]:
    """What each drafting makes of the same sequences, twice in a row with another start."""
    trees: list[list[TokenTree]] = []
    for drafting in both:
        followed = [CacheEntry() for _ in sequences]
        assert all(drafting.reserve(one, 2) for one in followed)
        own: list[TokenTree] = []
        for one, entry in zip(sequences, followed, strict=True):
            one.state = entry
        for turn in range(2):
            starts = torch.tensor([[float(7 * i + turn)] for i in range(len(sequences))])
            drafting.extend([Extension(one, [turn], turn) for one in followed], starts)
            own += drafting.trees(sequences)
        for one in followed:
            drafting.forget(one)
        trees.append(own)
    return trees


def same(found: TokenTree, expected: TokenTree) -> None:
    assert (found.token_ids, found.parents) == (expected.token_ids, expected.parents)
    assert found.scores == pytest.approx(expected.scores, rel=1e-5)
    assert found.distributions == expected.distributions


def make_both(shape: TreeShape, network: PathNetwork) -> list[TreeDrafting]:
    config = settings_of(shape, 4096, 8, 512)
    return [TreeDrafting(network, config), StaticDrafting(network, config)]


def sequence_of(number: int, mode: VerificationMode, limits: TreeLimits, **sampling: Any) -> DraftSequence:
    sampling.setdefault("temperature", 0.0 if mode is GREEDY else 1.0)
    seed = (0x9E3779B97F4A7C15 * (number + 1)) % 2**64
    return DraftSequence(
        number, [5] * (3 + number), 1, 9999, seed=seed, mode=mode, sampling=SamplingParams(**sampling), limits=limits
    )


pytestmark = [pytest.mark.pairs, pytest.mark.usefixtures("static_kv")]


@pytest.mark.parametrize("mode", [GREEDY, COUPLED], ids=lambda mode: mode.value)
@pytest.mark.parametrize("nodes", [1, 6, 200])
@pytest.mark.parametrize("topk", [1, 2, 4, 9])
@pytest.mark.parametrize("steps", [1, 2, 3, 6])
def test_every_shape_grows_the_same(steps: int, topk: int, nodes: int, mode: VerificationMode) -> None:
    both = make_both(TreeShape(steps, topk, nodes, 0.0, 20, 1.0), PathNetwork(40))
    found = drawn(both, [sequence_of(i, mode, TreeLimits()) for i in range(3)])
    for expected, other in zip(*found, strict=True):
        assert expected.drafted
        same(other, expected)


@pytest.mark.parametrize("mode", [GREEDY, COUPLED], ids=lambda mode: mode.value)
@pytest.mark.parametrize("nodes", [6, 239])
@pytest.mark.parametrize(("frontier", "topk"), [(1, 4), (2, 7), (7, 2), (20, 1), (25, 8)])
@pytest.mark.parametrize("steps", [1, 2, 4, 10])
def test_levels_as_wide_as_they_like(steps: int, frontier: int, topk: int, nodes: int, mode: VerificationMode) -> None:
    both = make_both(TreeShape(steps, topk, nodes, 0.0, 20, 1.0, frontier), PathNetwork(40))
    found = drawn(both, [sequence_of(i, mode, TreeLimits()) for i in range(2)])
    for expected, other in zip(*found, strict=True):
        assert expected.drafted
        same(other, expected)
        assert all(len(children) <= topk for children in other.children)
        for depth in range(1, steps):
            inner = [row for row in range(len(other)) if other.depths[row] == depth and other.children[row]]
            assert len(inner) <= frontier


@pytest.mark.parametrize("mode", [GREEDY, COUPLED, REJECTION], ids=lambda mode: mode.value)
@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_many_sequences_get_narrower_trees(count: int, mode: VerificationMode) -> None:
    shape = TreeShape(4, 3, 100, 0.0, 40, 1.0, frontier=12, rows_per_level=16)
    both = make_both(shape, PathNetwork(40))
    trees = drawn(both, [sequence_of(i, mode, TreeLimits()) for i in range(count)])
    narrow, nodes = {1: (12, 100), 2: (8, 60), 3: (4, 30), 9: (4, 30)}[count]
    # Alone, with the shape that is meant.
    alone = make_both(TreeShape(4, 3, nodes, 0.0, 40, 1.0, frontier=narrow), PathNetwork(40))[0]
    for expected, other in zip(*trees, strict=True):
        same(other, expected)
        assert other.drafted <= nodes
    (meant, _), _ = drawn([alone, alone], [sequence_of(0, mode, TreeLimits())])
    same(trees[1][0], meant)


@pytest.mark.parametrize("mode", [GREEDY, COUPLED], ids=lambda mode: mode.value)
@pytest.mark.parametrize("vocabulary", [2, 5, 300])
@pytest.mark.parametrize("floor", [0.0, 0.02, 0.3])
def test_small_vocabularies_maps_and_floors(floor: float, vocabulary: int, mode: VerificationMode) -> None:
    network = PathNetwork(vocabulary, mapped=True)
    both = make_both(TreeShape(4, 6, 30, floor, 64, 0.7), network)
    found = drawn(both, [sequence_of(i, mode, TreeLimits()) for i in range(4)])
    for expected, other in zip(*found, strict=True):
        same(other, expected)
        assert network.token_ids is not None and set(other.token_ids[1:]) <= set(network.token_ids.tolist())


@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_limits_modes_and_temperatures_are_each_sequences_own(count: int) -> None:
    limits = [TreeLimits(), TreeLimits(max_nodes=3), TreeLimits(max_depth=1), TreeLimits(2, 2), TreeLimits(max_depth=3)]
    modes = [COUPLED, GREEDY, REJECTION]
    sequences = [
        sequence_of(i, modes[i % 3], limits[i % 5], temperature=0.0 if modes[i % 3] is GREEDY else 0.4 + 0.3 * i)
        for i in range(count)
    ]
    # All tokens race: how many do depends on who else is in a batch of the level-by-level path.
    both = make_both(TreeShape(4, 3, 14, 0.0, 40, 1.0), PathNetwork(40))
    for turn, (expected, other) in enumerate(zip(*drawn(both, sequences), strict=True)):
        same(other, expected)
        wanted = sequences[turn % count].limits
        assert 1 <= other.drafted <= (wanted.max_nodes or 14) and max(other.depths) <= (wanted.max_depth or 4)


@pytest.mark.parametrize(
    "filters",
    [{"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.4}, {"top_k": 9, "top_p": 0.8, "min_p": 0.05}, {"top_k": 60}],
    ids=["top_k", "top_p", "min_p", "all", "none"],
)
@pytest.mark.parametrize("sharpness", [0.5, 1.0, 3.0])
def test_races_are_filtered_alike(sharpness: float, filters: dict[str, Any]) -> None:
    both = make_both(TreeShape(3, 4, 12, 0.005, 32, sharpness), PathNetwork(50, flat=0.8))
    for expected, other in zip(
        *drawn(both, [sequence_of(i, COUPLED, TreeLimits(), **filters) for i in range(6)]), strict=True
    ):
        same(other, expected)


@pytest.mark.parametrize("mode", [GREEDY, COUPLED], ids=lambda mode: mode.value)
def test_logits_that_are_no_numbers_have_no_children(mode: VerificationMode) -> None:
    network = PathNetwork(40)
    network._logits[::2] = float("nan")
    both = make_both(TreeShape(4, 3, 14, 0.0, 20, 1.0), network)
    trees = drawn(both, [sequence_of(i, mode, TreeLimits()) for i in range(8)])
    for expected, other in zip(*trees, strict=True):
        same(other, expected)
    assert {tree.drafted == 0 for tree in trees[1]} == {True, False}


def test_the_noise_is_the_shared_one() -> None:
    seeds, positions = [0, 7, 2**64 - 1], [1, 2**33 + 5, 4]
    tokens = torch.tensor([[0, 1, 2, 3, 4, 151_935]] * 3)
    keys = torch.tensor(np.array(seeds, np.uint64).view(np.int64))
    found = gumbel_words_by_sequence(keys, torch.tensor(positions), tokens)
    for b in range(3):
        assert torch.equal(found[b], gumbel_words_of(seeds[b], positions[b], tokens[b]))


@pytest.mark.parametrize("count", [1, 2, 5, 8, 33, 100])
@pytest.mark.parametrize(("frontier", "topk", "rows"), [(24, 8, 64), (0, 4, 8), (24, 8, 1), (3, 8, 7), (24, 8, 0)])
def test_a_level_has_no_more_rows_than_it_may(rows: int, topk: int, frontier: int, count: int) -> None:
    whole = TreeShape(10, topk, 239, 0.0, 40, 1.0, frontier, rows)
    shape = whole.for_sequences(count)
    if not rows or count == 1:
        assert shape == whole
        return
    assert min(4, whole.width) <= shape.width <= whole.width and shape.num_steps <= shape.num_draft_tokens <= 239
    assert shape.width <= 4 or shape.width * (1 << (count - 1).bit_length()) <= rows
    assert shape.width == whole.width or shape.width & (shape.width - 1) == 0
    # Passes are captured for powers of two, and what fewer sequences need fits those of more.
    assert shape == whole.for_sequences(1 << (count - 1).bit_length())
    assert shape.expanded <= whole.for_sequences(1 + count // 2).expanded


@pytest.mark.parametrize(("count", "levels"), [(1, 8), (2, 7), (3, 6), (4, 6), (8, 5), (32, 5), (100, 5)])
def test_trees_of_several_sequences_have_fewer_levels(count: int, levels: int) -> None:
    assert TreeShape(8, 8, 239, 0.0, 40, 1.0, 32, 64).for_sequences(count).num_steps == levels
    # Those that have few keep them.
    assert TreeShape(3, 8, 239, 0.0, 40, 1.0, 32, 64).for_sequences(count).num_steps == 3


@pytest.mark.parametrize(("count", "early"), [(1, 3), (2, 0), (8, 0), (33, 0)])
def test_one_sequence_alone_gets_its_first_levels_early(count: int, early: int) -> None:
    whole = TreeShape(6, 8, 239, 0.0, 40, 1.0, 16, 64, early_levels=3)
    assert whole.for_sequences(count).early_levels == early


def test_early_levels_and_several_sequences_have_fewer_nodes() -> None:
    whole = TreeShape(8, 8, 1007, 0.0, 40, 1.0, 32, 64, early_levels=4)
    assert whole.early_nodes == 239 and TreeShape(8, 8, 100, 0.0, 40, 1.0, 32, 64).early_nodes == 100
    assert [whole.for_sequences(count).num_draft_tokens for count in (1, 2, 4, 8, 32, 200)] == [
        1007,
        240,
        120,
        60,
        30,
        30,
    ]


@pytest.mark.parametrize(
    ("frontier", "steps", "rows", "fault"),
    [(24, 12, 0, "frontier"), (-1, 3, 0, "frontier"), (2, 3, -1, "rows-per-level"), (0, 40, 0, "topk")],
)
def test_shapes_that_cannot_be_are_refused(frontier: int, steps: int, rows: int, fault: str) -> None:
    with pytest.raises(SettingsError, match=fault):
        NeuralConfig(num_steps=steps, topk=8, num_draft_tokens=239, frontier=frontier, rows_per_level=rows)
    # Few nodes of many children.
    TreeShape(100, 30, 239, 0.0, 40, 1.0, frontier=2)
