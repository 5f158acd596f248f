"""Random faults while requests run: every answer is the plain loop's, and the services are whole again by themselves.

`python -m chaos.runs --seed N` runs one again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from chaos.faults import FAULTS
from chaos.runs import Outcome, Plan, run_seeds, summary
from chaos.taught import Taught

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


def test_answers_under_a_few_faults_are_plain_decoding(taught_model: Taught, tmp_path: Path) -> None:
    """Nine runs, of each drafter and each way of choosing tokens; `make test-chaos` has the thousand."""
    check(asyncio.run(run_seeds(range(9), taught_model, tmp_path)))


@pytest.mark.chaos
@pytest.mark.timeout(2 * 3600)
def test_answers_under_a_thousand_fault_runs_are_plain_decoding(
    taught_model: Taught, tmp_path: Path, keep: Callable[[str, dict[str, Any]], None]
) -> None:
    figures = check(asyncio.run(run_seeds(range(1000), taught_model, tmp_path, lanes_each=2)))
    for cell in figures["by_cell"].values():
        assert cell["accepted_share"] >= ACCEPTED_SHARE
    keep("runs", figures)
