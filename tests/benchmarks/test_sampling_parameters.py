"""The cases that the benchmark of sampling parameters measures, and what it compares them with."""

from __future__ import annotations

import argparse

import pytest

from benchmarks.engine.sampling_parameters import PARTS, Wave, cases_of, rows_of

OPTIONS = argparse.Namespace(concurrency=[1, 4], parameters=["penalties", "seeded", "seeded-penalties"], tokens=5)


@pytest.mark.parametrize("part", [part for part in PARTS if part != "first"])
def test_every_case_is_compared_with_one_that_is_measured_before_it(part: str) -> None:
    names = [(case.name, case.concurrency, case.drafting) for case in cases_of(part, OPTIONS)]
    assert len(set(names)) == len(names) > 0
    for place, case in enumerate(cases_of(part, OPTIONS)):
        name, drafting = case.compared
        assert (name, case.concurrency, drafting) in names[: place + 1]
        requests = case.requests([(1, 2, 3)] * case.concurrency)
        assert len(requests) == case.concurrency
        assert {one.speculate for one in requests} == {case.drafting == "lookup"}


def test_beside_counts_the_tokens_of_the_others_alone() -> None:
    wave = Wave((9, 5, 7), (9, 3, 3), (0.1, 0.1, 0.1), (9.0, 1.0, 2.0))
    assert wave.rate(1) == 6.0
    # Six passes, of which the first of each request are left out of the time.
    assert wave.per_pass(1) == pytest.approx((2.0, 1e3 * 2.8 / 4))
    assert wave.rate() == pytest.approx(21 / 9)
    assert {case.counted_from for case in cases_of("beside", OPTIONS)} == {1}


def test_ratios_are_of_the_same_turn(capsys: pytest.CaptureFixture[str]) -> None:
    cases = [case for case in cases_of("all", OPTIONS) if case.concurrency == 1]
    rates = {case: [10, 20, 30] if case.name == "none" else [9, 10, 27] for case in cases}
    waves = {case: [Wave((rate,), (rate,), (0.5,), (1.0,)) for rate in own] for case, own in rates.items()}
    ratios = {(row["case"], row["drafting"]): row["ratio"] for row in rows_of(waves)}
    assert ratios["penalties", "plain"] == pytest.approx(0.9)
    assert ratios["seeded-penalties", "lookup"] == 1.0
    assert "penalties" in capsys.readouterr().out
