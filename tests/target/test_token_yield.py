"""What is expected of passes is corrected by what passes of about so many rows made."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from target_service.core.sequence import DevicePass
from target_service.speculation.policy.estimates import TokenYield
from tree_kernels.node_table.layout import PROSPECTS


def _passes(drafted: int, accepted: int, count: int = 64) -> Sequence[DevicePass]:
    """Passes of `count` sequences whose rows promise 0.5 tokens each up to the third and 0.25 each from then on."""
    prospects = tuple(0.5 * min(rows, 3) + 0.25 * max(0, rows - 3) for rows in PROSPECTS)
    expected = 0.5 * min(drafted, 3) + 0.25 * max(0, drafted - 3)
    one = DevicePass(
        drafted=drafted, drafted_from_table=0, accepted=accepted, accepted_from_table=0, expected=expected,
        expected_from_table=0.0, prospects=prospects, root_row=0, path=(),
    )  # fmt: skip
    return [one] * count


def test_rows_that_brought_nothing_are_expected_to_bring_nothing() -> None:
    made = TokenYield()
    for _ in range(20):
        made.observe_passes(_passes(3, 2))
        made.observe_passes(_passes(7, 2))
    assert made.tokens(3) == pytest.approx(3.0, rel=0.1)
    # 2.5 were expected of seven rows.
    assert made.tokens(7) == pytest.approx(3.0, rel=0.1)


def test_more_rows_are_never_expected_to_make_fewer_tokens() -> None:
    made = TokenYield()
    for _ in range(20):
        made.observe_passes(_passes(3, 3))
        made.observe_passes(_passes(15, 1))
    tokens = [made.tokens(rows) for rows in (0.25, 1, 3, 7, 15, 31)]
    assert tokens == sorted(tokens)


def test_sizes_that_were_not_met_follow_all_passes() -> None:
    made = TokenYield()
    for _ in range(200):
        made.observe_passes(_passes(3, 3))
    assert made.tokens(7) == pytest.approx(1 + 2 * 2.5, rel=0.1)
