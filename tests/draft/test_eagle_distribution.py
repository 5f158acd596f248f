"""REJECTION trees of a network keep the target's distribution, and their draws the distribution that they carry."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
import torch
from chi_squared import chi_squared
from examples import is_full
from static_drafting import settings_of
from torch import Tensor

from draft_service.drafters.base import DraftSequence
from draft_service.neural.cached_prefixes import CacheEntry
from draft_service.neural.network import RowOutput
from draft_service.neural.tree_config import TreeShape
from draft_service.neural.tree_drafting import Extension, TreeDrafting
from outrider.sampling import SamplingParams, VerificationMode
from outrider.tree import TokenTree
from tree_kernels.verification import Chance, rejection_walk
from tree_models.layers.paged import CacheShape, PagedPass

pytestmark = pytest.mark.pairs

VOCABULARY = 4
BATCH = 500
# One in a million is no accident.
LEAST = 1e-6


def table(seed: int) -> Tensor:
    """[paths, V] logits of every path of up to five tokens, by its code."""
    return torch.randn(VOCABULARY**6, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 1.5


DRAFT_LOGITS, TARGET_LOGITS = table(1), table(2)


class PathNetwork:
    """A network whose distribution is looked up by the path: what it carries is the path's code."""

    successors, cache_shapes = 1, (CacheShape(1, 2, 2),)
    dtype, device = torch.float32, torch.device("cpu")
    token_ids: npt.NDArray[np.int32] | None = None

    def forward_rows(
        self,
        token_ids: Tensor,
        carried: Tensor | None,
        positions: Tensor,  # noqa: ARG002
        step: PagedPass,  # noqa: ARG002
        sources: Tensor | None = None,
    ) -> RowOutput:
        assert carried is not None
        carried = carried if sources is None else carried[sources]
        codes = torch.where(carried[:, 0] < 0, torch.ones_like(carried[:, 0]), carried[:, 0] * VOCABULARY + token_ids)
        return RowOutput(codes[:, None], codes[:, None])

    def logits(self, lm_input: Tensor) -> Tensor:
        return DRAFT_LOGITS[lm_input[:, 0].long()]


def trees(shape: TreeShape, batches: int, temperature: float = 1.0) -> Iterator[tuple[int, TokenTree]]:
    """Trees after one and the same root, each with the seed it was drawn with."""
    drafting = TreeDrafting(PathNetwork(), settings_of(shape, BATCH * 64, 64, 4096))
    followed = [CacheEntry() for _ in range(BATCH)]
    assert all(drafting.reserve(one, 1) for one in followed)
    drafting.extend([Extension(one, [0], 0) for one in followed], torch.full((len(followed), 1), -1.0))
    for batch in range(batches):
        seeds = range(batch * BATCH, (batch + 1) * BATCH)
        sampling = SamplingParams(temperature=temperature)
        wanted = [
            DraftSequence(i, [0], 1, VOCABULARY, seed=i, mode=VerificationMode.REJECTION, sampling=sampling, state=one)
            for one, i in zip(followed, seeds, strict=True)
        ]
        yield from zip(seeds, drafting.trees(wanted), strict=True)


def shape_of(steps: int, topk: int, nodes: int, floor: float = 0.0) -> TreeShape:
    return TreeShape(steps, topk, nodes, floor, topk, 1.0)


def distribution_of(logits: Tensor, code: int) -> Tensor:
    return torch.softmax(logits[code].double(), dim=-1)


@functools.cache
def target_distribution(code: int) -> Tensor:
    return distribution_of(TARGET_LOGITS, code)


def outputs(tree: TokenTree, seed: int, length: int) -> tuple[int, ...]:
    """What the target says for this tree, up to `length` tokens, with coins of its own."""
    coins = np.random.default_rng(seed + 10**6)
    codes = [1] * len(tree)
    for row in range(1, len(tree)):
        codes[row] = codes[tree.parents[row]] * VOCABULARY + tree.token_ids[row]
    distributions = {
        row: (distribution.token_ids, distribution.weights) for row, distribution in tree.distributions.items()
    }
    walk = rejection_walk(
        tree.parents,
        tree.token_ids,
        distributions,
        lambda row, _: target_distribution(codes[row]),
        Chance(coins.random),
    )
    said = [*(tree.token_ids[row] for row in walk.accepted_rows), walk.next_token]
    code = 1
    for token in said:
        code = code * VOCABULARY + token
    while len(said) < length:
        # Plain decoding goes on where the step ended.
        token = int(coins.choice(VOCABULARY, p=target_distribution(code).numpy()))
        said.append(token)
        code = code * VOCABULARY + token
    return tuple(said[:length])


@pytest.mark.parametrize(
    "shape",
    [shape_of(3, 1, 3), shape_of(2, 3, 6), shape_of(3, 3, 5), shape_of(4, 2, 4, 0.05), shape_of(3, 4, 12)],
    ids=["chain", "wide", "cut by rank", "cut by worth", "large"],
)
def test_outputs_have_the_targets_distribution(shape: TreeShape) -> None:
    length, batches = 3, 16 if is_full() else 3
    counts = Counter(outputs(tree, seed, length) for seed, tree in trees(shape, batches))
    samples = BATCH * batches
    expected = np.empty(VOCABULARY**length)
    observed = np.empty(VOCABULARY**length)
    for place in range(len(expected)):
        path = [place // VOCABULARY**power % VOCABULARY for power in reversed(range(length))]
        probability, code = 1.0, 1
        for token in path:
            probability *= float(target_distribution(code)[token])
            code = code * VOCABULARY + token
        expected[place], observed[place] = probability * samples, counts[tuple(path)]
    common = expected >= 5
    expected = np.append(expected[common], expected[~common].sum())
    observed = np.append(observed[common], observed[~common].sum())
    kept = expected > 0
    assert chi_squared(observed[kept], expected[kept] * observed.sum() / expected.sum()) > LEAST


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_children_are_drawn_from_the_distribution_they_carry(temperature: float) -> None:
    """The first child by it, the second by what it leaves; whether there is a second does not depend on either."""
    firsts, seconds = Counter[int](), Counter[tuple[int, int]]()
    distribution = np.zeros(VOCABULARY)
    count = 0
    for _, tree in trees(shape_of(2, 3, 6), 16 if is_full() else 4, temperature):
        children = [tree.token_ids[child] for child in tree.children[0]]
        firsts[children[0]] += 1
        seconds[children[0], children[1]] += 1
        drawn_from = tree.distributions[0]
        distribution[list(drawn_from.token_ids)] = np.array(drawn_from.weights) / sum(drawn_from.weights)
        count += 1
    head = torch.softmax(DRAFT_LOGITS[1].double() / temperature, dim=-1).numpy()
    assert distribution == pytest.approx(head, abs=1e-4)
    assert chi_squared([firsts[token] for token in range(VOCABULARY)], distribution * count) > LEAST
    pairs = [(a, b) for a in range(VOCABULARY) for b in range(VOCABULARY) if a != b]
    chances = np.array([distribution[a] * distribution[b] / (1 - distribution[a]) for a, b in pairs]) * count
    assert chi_squared([seconds[pair] for pair in pairs], chances * count / chances.sum()) > LEAST


def test_the_distribution_test_would_notice() -> None:
    """Trees that keep a node only when its token is likely skew the distribution, and the statistic sees it."""
    expected = target_distribution(1).numpy()
    counts = Counter[int]()
    for seed, tree in trees(shape_of(1, 1, 1), 16):
        if DRAFT_LOGITS[1, tree.token_ids[1]] < DRAFT_LOGITS[1].max():
            tree = TokenTree.root_only(0)
        counts[outputs(tree, seed, 1)[0]] += 1
    samples = 16 * BATCH
    assert chi_squared([counts[token] for token in range(VOCABULARY)], expected * samples) < LEAST
