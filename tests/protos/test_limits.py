"""Limits by tenant, as the tokens' file says them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from outrider.limits import TenantLimits, TenantTable
from outrider.serving import Authenticator
from outrider.settings import SettingsError

TOKEN = "0123456789abcdef-secret"
DEFAULT = TenantLimits(waiting=8, requests_per_second=2.0, burst=4)


def table(tmp_path: Path, text: str) -> TenantTable:
    path = tmp_path / "tokens"
    path.write_text(text)
    return TenantTable.from_file(str(path), DEFAULT)


def test_a_line_changes_what_it_mentions(tmp_path: Path) -> None:
    read = table(tmp_path, f"# who may call\n{TOKEN} acme\ntenant acme weight=2.5 running=16 requests-per-second=9\n")
    assert read.of("acme") == TenantLimits(2.5, running=16, waiting=8, requests_per_second=9.0, burst=4)
    assert read.of("other") == DEFAULT


def test_tokens_are_read_from_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"tenant acme weight=2\n{TOKEN} acme\n")
    assert Authenticator.from_file(str(path)).caller([("authorization", f"Bearer {TOKEN}")]).tenant == "acme"


def test_no_file_names_nobody() -> None:
    assert TenantTable.from_file("", DEFAULT).of("anybody") == DEFAULT


@pytest.mark.parametrize(
    "line",
    [
        "tenant",
        "tenant a/b weight=1",
        "tenant a weight",
        "tenant a wait=1",
        "tenant a running=1.5",
        "tenant a running=-1",
        "tenant a weight=0",
        "tenant a weight=nan",
        "tenant a weight=1e9",
        "tenant a requests_per_second=inf",
        "tenant a burst=0",
        "tenant a running=1 running=2",
        "tenant a running=1\ntenant a running=2",
    ],
)
def test_lines_that_cannot_be_meant_are_refused_by_number(tmp_path: Path, line: str) -> None:
    with pytest.raises(SettingsError, match=rf"tokens:{1 + line.count(chr(10))}: "):
        table(tmp_path, line)


def test_every_limit_has_bounds() -> None:
    for value in (-1, math.nan, math.inf):
        with pytest.raises(SettingsError):
            TenantLimits(waiting=value)  # type: ignore[arg-type]


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="No such file"):
        TenantTable.from_file(str(tmp_path / "absent"), DEFAULT)
