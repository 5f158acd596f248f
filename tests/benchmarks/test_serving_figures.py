"""What a load's answers come to, on answers whose figures are known."""

from __future__ import annotations

import pytest

from benchmarks.serving.figures import (
    LONG,
    SHORT,
    Share,
    TimedAnswer,
    closed_figures,
    full_window,
    latencies,
    line,
    step_figures,
    wave_figures,
)
from benchmarks.shared.report import percentile


def steady(begin: float, count: int, each: int = 1) -> TimedAnswer:
    """One message a second, the first after a second."""
    return TimedAnswer(begin, [begin + 1.0 + i for i in range(count)], [each] * count)


def test_a_closed_loop_is_measured_while_all_of_it_is_in_flight() -> None:
    """Two slots, ends at 2 and 4, then answers of 4 seconds, the last of which begin at 10 and 12."""
    first = [steady(0, 2), steady(2, 4), steady(6, 4), steady(10, 4)]
    second = [steady(0, 4), steady(4, 4), steady(8, 4), steady(12, 4)]
    for shares in ([Share(2, first + second)], [Share(1, first), Share(1, second)]):
        window = full_window(shares)
        figures = closed_figures(shares)
        assert window.end == min(max(answer.begin for answer in share.answers) for share in shares)
        assert figures["tokens"] == 2 * (window.end - window.begin)
        assert figures["tokens_per_second"] == 2.0
        assert figures["message_gap_ms"]["median"] == 1000.0


def test_waves_sum_tokens_and_seconds_and_keep_the_median() -> None:
    figures = wave_figures([(2.0, [steady(0, 4)]), (1.0, [steady(0, 4)]), (4.0, [steady(0, 4)])])
    assert figures["tokens"] == 12
    assert figures["tokens_per_second"] == pytest.approx(12 / 7, abs=0.01)
    assert figures["median_tokens_per_second"] == 2.0
    assert (figures["least"], figures["most"]) == (1.0, 4.0)


def test_times_between_tokens_do_not_hang_on_how_many_come_at_once() -> None:
    figures = latencies([steady(5.0, 3, each=4)])
    assert figures["first_token_ms"] == {"median": 1000.0, "p99": 1000.0, "n": 1}
    assert figures["token_ms"]["median"] == 250.0
    assert figures["message_gap_ms"]["median"] == 1000.0


def test_an_answer_of_one_message_has_no_time_between_tokens() -> None:
    assert latencies([steady(0.0, 1)])["token_ms"] is None


@pytest.mark.parametrize(("share", "value"), [(0.0, 1), (0.5, 51), (0.99, 100), (1.0, 100)])
def test_percentiles_are_values_that_were_measured(share: float, value: int) -> None:
    assert percentile(range(1, 101), share) == value


def test_a_line_says_what_is_known() -> None:
    row = {"arrangement": "own", "mode": "trie", "concurrency": 8} | wave_figures([(1.0, [steady(0, 4)])])
    assert "own" in line(row) and "4.0 tok/s" in line(row) and "1000.00" in line(row)
    assert "token" not in line(row | {"first_token_ms": None, "token_ms": None})


def test_reading_prompts_cancels_out_of_what_a_step_takes() -> None:
    reading, step = 0.5, 2e-3
    seconds = [(reading + slow * SHORT * step, reading + slow * LONG * step) for slow in (1.0, 1.5, 1.25)]
    figures = step_figures(4, seconds)
    assert figures["step_ms"] == pytest.approx(2.5) and figures["n"] == 3
    assert (figures["least_step_ms"], figures["most_step_ms"]) == pytest.approx((2.0, 3.0))
    assert figures["tokens_per_second"] == pytest.approx(1600)
    assert "2.500 ms (2.000 to 3.000)" in line({"arrangement": "own", "mode": "plain", "concurrency": 4, **figures})
