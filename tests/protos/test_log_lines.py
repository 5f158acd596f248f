"""Log lines that callers can cause: short, and few."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from outrider.runtime import LOG_FORMAT, MOST_LINE, OneLineFormatter, OthersSeldom
from outrider.telemetry.tracing import context_from_metadata

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """What a service's log has, at one moment."""
    monkeypatch.setattr("outrider.log_limit.time", SimpleNamespace(monotonic=lambda: 1e9))
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(OneLineFormatter(LOG_FORMAT))
    handler.addFilter(OthersSeldom())
    logging.getLogger().addHandler(handler)
    yield stream
    logging.getLogger().removeHandler(handler)


@pytest.mark.parametrize("state", ["!" * 500, "a" * 8000, "a=\x01,b", ",".join(f"k{i}=v" for i in range(100))])
def test_a_bad_trace_writes_one_line(written: io.StringIO, state: str) -> None:
    for _ in range(100):
        context_from_metadata([("traceparent", PARENT), ("tracestate", state)])
        context_from_metadata([("traceparent", "0" * 5000), ("tracestate", state)])
    assert len(written.getvalue().splitlines()) <= 3
    assert len(written.getvalue()) < 3000


def test_lines_are_bounded(written: io.StringIO) -> None:
    logging.getLogger("outrider_gateway.test").warning("%s", "a" * 100_000)
    line = written.getvalue()
    assert len(line) < MOST_LINE + 100 and "100" in line[MOST_LINE:]


def test_ours_are_all_written(written: io.StringIO) -> None:
    for name in ("outrider.serving", "outrider_client", "outrider_gateway", "target_service.engine", "draft_service"):
        for _ in range(3):
            logging.getLogger(name).warning("something")
    for _ in range(3):
        logging.getLogger("uvicorn.error").warning("something else")
    assert len(written.getvalue().splitlines()) == 15 + 1


def test_those_left_out_are_counted(written: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    def warn() -> None:
        logging.getLogger("other.library").warning("of %d", 1)

    for _ in range(4):
        warn()
    monkeypatch.setattr("outrider.log_limit.time", SimpleNamespace(monotonic=lambda: 1e9 + 11))
    warn()
    assert written.getvalue().splitlines()[1].endswith("of 1 (and 3 like it)")
