"""What pairs of an answer with a wrong prediction and one without come to."""

from __future__ import annotations

from benchmarks.serving.wrong_prediction import Half, Pair, rows_of
from benchmarks.shared.report import record_table


def pair(case: str, wrong: float, plain: float) -> Pair:
    """Answers of ten tokens that took so many processor seconds; the wrong one five steps, for 8 ms of waiting."""
    one = Half(seconds=9 * wrong, processor=wrong, tokens=10, steps=5, rejected=2, accepted=0, drafted=7, waited=0.008)
    other = Half(seconds=9 * plain, processor=plain, tokens=10, steps=4, rejected=0, accepted=0, drafted=9, waited=0.0)
    return Pair(case, "prompt_lookup", 0, one, other, same=True)


def test_rows_have_both_ways_of_each_count() -> None:
    pairs = [pair("a", 1.0, 1.0), pair("a", 1.2, 1.0), pair("b", 3.0, 2.0)]
    by_cost = {row["cost"]: row for row in rows_of(pairs)}
    assert set(by_cost) == {"seconds", "processor"}
    row = by_cost["processor"]
    assert (row["pairs"], row["cases"], row["same_answers"]) == (3, 2, 3)
    # The middle one of 1, 1.2 and 1.5; and 5.2 for 4.
    assert (row["median"], row["together"]) == (1.2, 1.3)
    assert row["steps_an_answer"] == [5.0, 4.0]
    assert row["drafted_rows_an_answer"] == [7.0, 9.0]
    assert row["ms_waited_an_answer"] == [8.0, 0.0]
    assert row["rejected_rows_an_answer"] == 2.0
    header, rule, *lines = record_table(list(by_cost.values())).splitlines()
    assert header.count("|") == rule.count("|") == lines[0].count("|") and len(lines) == 2
