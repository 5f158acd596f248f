"""Random faults while requests run: every answer is the plain loop's, and the services are whole again by themselves.

`python -m chaos.runs --seed N` runs one again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from chaos.faults import ENDING, FAULTS
from chaos.runs import Outcome, Plan, run_seeds, summary, unexplained_ends
from chaos.taught import Taught
from chaos.world import Supervisor
from forked import Child

# Of the drafted rows: below it drafts are hardly in use, and nothing would be proved.
ACCEPTED_SHARE = 0.3


def check(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    figures = summary(outcomes)
    assert figures["failed_runs"] == []
    assert figures["all"]["accepted_share"] >= ACCEPTED_SHARE
    return figures


def test_a_seed_is_a_run() -> None:
    assert Plan.of(17, 4) == Plan.of(17, 4) != Plan.of(18, 4)
    plans = [Plan.of(seed, 4) for seed in range(1000)]
    assert {fault.kind for plan in plans for fault in plan.faults} == set(FAULTS)
    cells = {(plan.drafter, plan.sampling, plan.placement) for plan in plans}
    assert len(cells) == 3 * 3 * 2


def test_a_service_that_ends_by_itself_is_a_problem() -> None:
    """Its supervisor starts it again, and callers ask again."""
    assert {kind for kinds in ENDING for kind in kinds} <= set(FAULTS)
    target, draft = (Supervisor(Child(name, (), Path())) for name in ("target_service", "draft_service"))
    target.statuses, draft.statuses = [-9], [-9, -11]
    both = (target, draft)
    assert unexplained_ends(both, (1, 2), set()) == []
    (problem,) = unexplained_ends(both, (1, 1), {"target killed", "draft lying"})
    assert "draft_service" in problem and "-11" in problem
    assert unexplained_ends(both, (1, 1), {"draft killed"}) == []


@pytest.mark.parametrize("seeds", [(0, 4, 8), pytest.param(range(9), marks=pytest.mark.full)], ids=["three", "nine"])
def test_answers_under_a_few_faults_are_plain_decoding(
    taught_model: Taught, tmp_path: Path, seeds: Sequence[int]
) -> None:
    """Of each drafter and each way of choosing tokens; `make test-chaos` has a thousand runs."""
    check(asyncio.run(run_seeds(seeds, taught_model, tmp_path)))


@pytest.mark.chaos
@pytest.mark.timeout(2 * 3600)
def test_answers_under_a_thousand_fault_runs_are_plain_decoding(
    taught_model: Taught, tmp_path: Path, keep: Callable[[str, dict[str, Any]], None]
) -> None:
    figures = check(asyncio.run(run_seeds(range(1000), taught_model, tmp_path, lanes_each=2)))
    for cell in figures["by_cell"].values():
        assert cell["accepted_share"] >= ACCEPTED_SHARE
    keep("runs", figures)
