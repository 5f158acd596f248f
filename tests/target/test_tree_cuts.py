"""Which rows are worth their cost."""

from __future__ import annotations

import itertools

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from outrider.drafting.draft_tree import GrowingTree
from outrider.tree import TokenTree
from outrider.wire.frames import SequenceGrowth
from target_service.speculation.policy.step_cost import StepCost, spread_tokens
from target_service.speculation.policy.tree_cuts import IN_ORDER_NODES, Calibration, Offer, SequenceRecord, TreeCutter


def grown(parents: list[int], scores: list[float]) -> GrowingTree:
    """A tree with distinct tokens; parents are node numbers, 0 the root."""
    tree = GrowingTree([0], step=0)
    tree.hold(SequenceGrowth(1, 0, 1, tuple(parents), tuple(range(1, len(parents) + 1)), tuple(scores)))
    tree.settle()
    return tree


def reach(tree: GrowingTree, nodes: set[int], cutter: TreeCutter) -> float:
    total = 0.0
    for node in nodes:
        product, walk = 1.0, node
        while walk:
            product *= min(0.995, cutter.calibration.probability(tree.scores[walk]))
            walk = tree.parents[walk]
        total += product
    return total


@st.composite
def trees(draw: st.DrawFn) -> GrowingTree:
    count = draw(st.integers(0, 6))
    parents = [draw(st.integers(0, i)) for i in range(count)]
    return grown(parents, [draw(st.floats(0, 1)) for _ in range(count)])


@examples(150)
@given(trees(), st.floats(0.0, 0.6), st.floats(1.0, 4.0))
def test_the_cut_is_the_best_of_all_subtrees(tree: GrowingTree, per_row: float, gain: float) -> None:
    """Against every ancestor-closed set of nodes: expected tokens less what their time earns elsewhere."""
    cost = StepCost([(1, 1.0), (100, 1.0 + 99 * per_row)])
    cutter, rate = TreeCutter(cost), gain / cost(1)
    best = 0.0
    for size in range(tree.nodes + 1):
        for nodes in itertools.combinations(range(1, tree.nodes + 1), size):
            if all(tree.parents[node] in (0, *nodes) for node in nodes):
                best = max(best, reach(tree, set(nodes), cutter) - rate * (cost(1 + size) - cost(1)))
    cut = cutter.cut([Offer(tree, SequenceRecord(), 63)], base_rows=1, max_nodes=63, rate=rate)[0]
    assert expected(cut, cutter) - rate * (cost(len(cut)) - cost(1)) == pytest.approx(best)


def expected(cut: TokenTree, cutter: TreeCutter) -> float:
    path_prob = [1.0]
    for row in range(1, len(cut)):
        probability = min(0.995, cutter.calibration.probability(cut.scores[row]))
        path_prob.append(path_prob[cut.parents[row]] * probability)
    return sum(path_prob[1:])


def test_rows_that_cost_nothing_are_all_taken() -> None:
    tree = grown([0, 1, 2, 0], [0.9, 0.01, 0.5, 0.3])
    assert len(TreeCutter(None).cut([Offer(tree, SequenceRecord(), 63)], 1, 63, rate=1.0)[0]) == 5


def test_hopeless_rows_are_left_out() -> None:
    cutter = TreeCutter(StepCost([(1, 1.0), (2, 1.5), (64, 40.0)]))
    tree = grown([0, 0], [0.02, 0.01])
    assert len(cutter.cut([Offer(tree, SequenceRecord(), 63)], 1, 63, rate=1.3)[0]) == 1


def test_the_batch_shares_its_rows_by_worth() -> None:
    good, bad = grown([0, 1, 2], [0.95, 0.95, 0.95]), grown([0, 1, 2], [0.1, 0.1, 0.1])
    offers = [Offer(bad, SequenceRecord(), 63), Offer(good, SequenceRecord(), 63)]
    cut = TreeCutter(None).cut(offers, 2, max_nodes=3, rate=1.0)
    assert [len(one) for one in cut] == [1, 4]


@pytest.mark.parametrize("scores", [[0.1, 0.9, 0.5, 0.99], [0.0] * 4, [1.0] * 4], ids=["mixed", "hopeless", "sure"])
@pytest.mark.parametrize("cost", [None, StepCost([(1, 1.0), (64, 640.0)])], ids=["free", "dear"])
def test_in_order_takes_a_prefix_whatever_the_scores(scores: list[float], cost: StepCost | None) -> None:
    tree = grown([0, 0, 0, 1], scores)
    cut = TreeCutter(cost).cut([Offer(tree, SequenceRecord(), 2, in_order=True)], 1, 63, rate=1.0)[0]
    assert cut.token_ids == (0, 1, 2)


def test_a_row_must_earn_what_its_time_earns_elsewhere() -> None:
    """The same draft is worth verifying to a batch that makes little, and not to one that makes much."""
    cost = StepCost([(1, 1.0), (2, 1.2), (64, 14.0)])
    offers = [Offer(grown([0], [0.5]), SequenceRecord(), 63)]
    assert [len(TreeCutter(cost).cut(offers, 1, 63, rate)[0]) for rate in (1.0, 4.0)] == [2, 1]


def test_of_a_tree_in_order_no_more_than_its_number_is_used() -> None:
    """Whatever it is worth: a number that does not depend on what was sampled."""
    tree = grown([0] * 40, [0.5] * 40)
    cut = TreeCutter(None).cut([Offer(tree, SequenceRecord(), 63, in_order=True)], 1, 63, rate=1.0)[0]
    assert cut.drafted == IN_ORDER_NODES


def test_calibration_learns_what_scores_are_worth() -> None:
    calibration = Calibration()
    for i in range(400):
        calibration.observe_node(0.9, accepted=i % 4 == 0)
    assert calibration.probability(0.9) == pytest.approx(0.25, abs=0.05)
    assert calibration.probability(0.1) == pytest.approx(0.1, abs=0.05)


def test_only_children_of_accepted_rows_teach() -> None:
    cutter = TreeCutter(None)
    before = cutter.calibration.probability(0.4)
    # Row 2 hangs below row 1, which is rejected: its score says nothing.
    tree = TokenTree((0, 1, 2), (0, 0, 1), (1.0, 0.8, 0.4))
    cutter.calibration.observe_tree(tree, tree.scores, (), SequenceRecord())
    assert cutter.calibration.probability(0.4) == before
    assert cutter.calibration.probability(0.8) < 0.8


def test_cost_rises_with_rows_even_when_measured_otherwise() -> None:
    cost = StepCost([(1, 2.0), (2, 1.5), (4, 3.0)])
    assert cost(2) == 2.0
    assert cost(3) == pytest.approx(2.5)
    assert cost(8) == pytest.approx(6.0)


def test_costs_are_measured_with_tokens_from_all_over_the_vocabulary() -> None:
    """Rows of a mixture of experts then choose different ones, as a tree's do."""
    tokens = spread_tokens(40_000, 256)
    # A larger size has the smaller one's tokens, and reads no fewer experts.
    assert spread_tokens(40_000, 16) == tokens[:16]
    assert len(set(tokens)) > 250
    assert all(20 < sum(token // 5_000 == eighth for token in tokens) < 45 for eighth in range(8))


def test_a_wrong_measurement_is_lived_down() -> None:
    cost = StepCost([(1, 1.0), (16, 6.0), (64, 7.0)])
    for _ in range(200):
        cost.observe_step(16, 1.2)
        cost.observe_step(1, 1.0)
    assert cost(16) / cost(1) == pytest.approx(1.2, rel=0.02)


@pytest.mark.parametrize("speed", [1 / 40, 40.0])
def test_rows_cost_what_they_did_when_the_machine_becomes_faster_or_slower(speed: float) -> None:
    """Also those of steps that nobody runs meanwhile; else drafts would never be tried again."""
    cost = StepCost([(1, 1.0), (16, 1.3), (64, 2.0)])
    for _ in range(20):
        cost.observe_step(16, 1.3)
        cost.observe_step(1, 1.0)
    for _ in range(400):
        cost.observe_step(1, 1 / speed)
    assert cost(1) == pytest.approx(1 / speed, rel=0.05)
    assert 0.6 < cost(16) / cost(1) / 1.3 < 1.7 and 0.6 < cost(64) / cost(1) / 2.0 < 1.7


def test_sizes_that_take_turns_in_runs_are_told_apart() -> None:
    cost = StepCost([(1, 1.0), (16, 6.0), (64, 7.0)])
    for _ in range(60):
        for rows, seconds in ((16, 1.2), (1, 1.0)):
            for _ in range(20):
                cost.observe_step(rows, seconds)
    assert cost(16) / cost(1) == pytest.approx(1.2, rel=0.05)


def test_one_pause_of_the_machine_costs_no_size_its_place() -> None:
    cost = StepCost([(1, 1.0), (16, 1.2), (64, 2.0)])
    cost.observe_step(16, 60.0)
    assert cost(16) == pytest.approx(1.26)
    assert cost(1) == 1.0


def test_a_chain_takes_the_likeliest_child_of_each_node() -> None:
    tree = grown([0, 0, 2, 2, 4], [0.6, 0.9, 0.3, 0.8, 0.7])
    cut = TreeCutter(None).cut([Offer(tree, SequenceRecord(), 63, chain=True)], 1, 63, rate=1.0)[0]
    assert cut.is_chain
    assert cut.token_ids == (0, 2, 4, 5)


@given(
    st.lists(
        st.tuples(st.integers(1, 40), st.floats(0.1, 9.0)), min_size=1, max_size=6, unique_by=lambda size: size[0]
    ),
    st.integers(0, 60),
    st.integers(0, 90),
)
def test_what_each_further_row_adds_is_what_sizes_differ_by(
    measured: list[tuple[int, float]], rows: int, count: int
) -> None:
    cost = StepCost(sorted(measured))
    steps = [cost(rows + n + 1) - cost(rows + n) for n in range(count)]
    assert cost.marginal(rows, count) == pytest.approx(steps, abs=1e-9)


@given(st.lists(st.tuples(st.floats(0.0, 1.0), st.booleans()), max_size=60))
def test_calibration_by_table_is_accepted_over_verified(observed: list[tuple[float, bool]]) -> None:
    calibration = Calibration()
    for score, accepted in observed:
        calibration.observe_node(score, accepted)
    scores = [bucket / 32 for bucket in range(33)]
    of_each = zip(calibration._accepted, calibration._verified, strict=True)
    plain = [accepted / verified for accepted, verified in of_each]
    expected = [plain[min(int(score * 16), 15)] for score in scores]
    assert calibration.probabilities(scores) == pytest.approx(expected)
    assert [calibration.probability(score) for score in scores] == pytest.approx(expected)
