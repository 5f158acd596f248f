"""How many rows the device drafts: as many as pay, by what they make and what passes with them take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from engine_harness import make_runner, request
from transformers import PreTrainedModel

from outrider.sampling import SamplingParams, VerificationMode
from target_service.commit import LiveSequence
from target_service.config import MOST_LOOKED_UP
from target_service.lookup_budget import LookupBudget
from target_service.model.runner import ModelRunner
from target_service.scheduler import Chunk, Schedule
from target_service.sequence import SequenceRequest
from target_service.step_cost import StepCost
from target_service.verifier import Verified
from tree_kernels.lookup import MAX_LOOKED_UP
from tree_kernels.verification import Walk

CHEAP = StepCost([(1, 1.0), (64, 1.1)])
DEAR = StepCost([(1, 1.0), (64, 64.0)])
MAX_ROWS = 256


# By sequences and rows of a pass, 0 for a plain one.
Seconds = Callable[[int, int], float]


class Engine:
    """A load whose drafts are right to a given depth, on a device that takes `seconds` for a pass."""

    def __init__(self, runner: ModelRunner, budget: LookupBudget, live: dict[int, LiveSequence]) -> None:
        self.budget, self.live = budget, live
        self._runner = runner

    def schedule(self, *requests: SequenceRequest) -> Schedule:
        self.live.clear()
        chunks = []
        for number, one in enumerate(requests):
            live = LiveSequence.of(number, one, self._runner)
            live.sequence.kv_length = len(one.token_ids) - 1
            self.live[number] = live
            chunks.append(Chunk(live.sequence, 1))
        return Schedule(tuple(chunks))

    def run(self, sequences: int, right: int, seconds: Seconds, launches: int = 400) -> list[int]:
        """Rows of the passes that were drafted for, launch by launch."""
        schedule, chosen = self.schedule(*[request([5, 7], 9)] * sequences), []
        for _ in range(launches):
            lookup = self.budget.choose(schedule, MAX_ROWS)
            rows = lookup.rows if lookup is not None else 0
            chosen.append(rows)
            if lookup is not None:
                each = (rows - sequences) // sequences
                accepted = min(right, each)
                said = Verified(Walk((), 3), (), (3,) * accepted, (each,), (accepted,))
                self.budget.observe(lookup, [said] * sequences)
            self.budget.observe_time(sequences, lookup, seconds(sequences, rows))
        return chosen


@pytest.fixture
def engine(tiny_model: PreTrainedModel) -> Callable[[int, StepCost | None], Engine]:
    runner = make_runner(tiny_model)

    def make(most: int, cost: StepCost | None) -> Engine:
        live: dict[int, LiveSequence] = {}
        return Engine(runner, LookupBudget(most, cost, live), live)

    return make


Make = Callable[[int, StepCost | None], Engine]


def free(_sequences: int, _rows: int) -> float:
    return 1.0


def by_the_row(sequences: int, rows: int) -> float:
    return float(max(sequences, rows))


def test_without_costs_as_many_as_are_allowed(engine: Make) -> None:
    assert engine(15, None).run(1, 0, free, 3) == [16, 16, 16]
    assert engine(15, None).run(2, 0, free, 1) == [32]
    # The smallest size that holds all that are allowed.
    assert engine(3, None).run(1, 0, free, 1) == [4]
    assert engine(5, None).run(2, 0, free, 1) == [16]
    assert engine(0, None).run(2, 9, free, 1) == [0]


def test_as_many_as_are_right_where_rows_cost_little(engine: Make) -> None:
    assert engine(15, CHEAP).run(1, 15, free)[-1] == 16
    assert engine(15, CHEAP).run(1, 3, lambda _, rows: 1 + 0.05 * rows).count(4) > 250
    # Of many, the few rows go where they are right.
    assert engine(15, CHEAP).run(16, 2, lambda _, rows: 1 + rows / 64).count(32) > 250


def test_none_where_rows_cost_as_much_as_they_may_bring(engine: Make) -> None:
    chosen = engine(15, DEAR).run(1, 15, by_the_row)
    assert chosen.count(0) > 0.9 * len(chosen)


def test_what_passes_take_counts_and_not_what_rows_should_cost(engine: Make) -> None:
    chosen = engine(15, CHEAP).run(4, 1, lambda _, rows: 1.0 if not rows else 4.0)
    # Each size was timed, and all were found wanting.
    assert set(chosen[:30]) == {0, 16, 32, 64}
    assert set(chosen[100:160]) == {0}


def test_they_are_tried_again_and_timed_again(engine: Make) -> None:
    one = engine(7, CHEAP)
    assert set(one.run(2, 0, lambda _, rows: 1 + rows, 200)[60:]) == {0, 4}
    # From now on they are right.
    assert one.run(2, 7, free, 2000)[-1] == 16
    # And now they take too long.
    assert one.run(2, 7, lambda _, rows: 1 + 4 * rows, 2000)[-500:].count(0) > 450


def test_loads_are_told_apart(engine: Make) -> None:
    one = engine(7, CHEAP)

    def dear_at_8(sequences: int, rows: int) -> float:
        return 1.0 + rows * (sequences >= 8)

    assert one.run(1, 3, dear_at_8)[-1] > 0
    assert one.run(8, 3, dear_at_8).count(0) > 300
    assert one.run(1, 3, dear_at_8, 20).count(0) == 0


def test_above_a_load_there_are_none(engine: Make) -> None:
    one = engine(15, None)
    one.budget = LookupBudget(15, None, one.live, disable_above=3)
    assert [one.run(sequences, 9, free, 1)[0] for sequences in (3, 4)] == [64, 0]


def test_several_sequences_have_to_gain_more(engine: Make) -> None:
    """Where drafts make a little more, one sequence has them."""
    for sequences, right, drafted in ((1, 1, True), (4, 3, False)):
        # As many tokens, less three in a hundred.
        took = (1 + right) / 1.03
        chosen = engine(3, CHEAP).run(sequences, right, lambda _, rows, took=took: took if rows else 1.0)[200:]  # type: ignore[misc]
        assert (chosen.count(4 * sequences) > 150) is drafted


def test_steps_have_only_so_many_rows(engine: Make) -> None:
    one = engine(15, None)
    schedule = one.schedule(*[request([5, 7], 9)] * 4)
    chosen = [one.budget.choose(schedule, rows) for rows in (64, 63, 32, 16, 6, 4)]
    assert [lookup and lookup.rows for lookup in chosen] == [64, 63, 32, 16, 6, None]


@pytest.mark.parametrize(
    ("changes", "limits"),
    [
        ({}, (15, 15)),
        ({"max_draft_nodes": 5}, (15, 5)),
        ({"max_draft_nodes": 0}, (15, 0)),
        ({"speculate": False}, (15, 0)),
        ({"external": True}, None),
        ({"mode": VerificationMode.REJECTION}, None),
        ({"sampling": SamplingParams(repetition_penalty=1.2)}, None),
    ],
)
def test_those_get_them_who_want_them(engine: Make, changes: dict[str, object], limits: tuple[int, ...] | None) -> None:
    """And none does beside a sequence whose law does not allow it."""
    one, plain = engine(15, None), request([5, 7], 9)
    schedule = one.schedule(plain, replace(plain, **changes))  # type: ignore[arg-type]
    lookup = one.budget.choose(schedule, MAX_ROWS)
    assert (lookup and lookup.limits) == limits


def test_settings_allow_what_the_kernel_holds() -> None:
    assert MOST_LOOKED_UP == MAX_LOOKED_UP


def test_tokens_of_a_pass_are_followed(engine: Make) -> None:
    one = engine(7, None)
    assert one.budget.tokens_each == 1.0
    one.run(4, 2, free)
    assert one.budget.tokens_each == pytest.approx(3.0, rel=0.01)
    # And forgotten with requests that have none.
    schedule = one.schedule(request([5, 7], 9, speculate=False))
    assert not any(one.budget.choose(schedule, MAX_ROWS) for _ in range(300))
    assert one.budget.tokens_each == pytest.approx(1.0, rel=0.01)
