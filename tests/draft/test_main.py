"""What the draft service's process is told before anything is there to read it."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator

import pytest
from waits import HUNG_SECONDS

from draft_service.__main__ import main
from outrider.runtime import SWITCH_SECONDS, collect_seldom, settled


@pytest.fixture(autouse=True)
def _switch_interval() -> Iterator[None]:
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize(("given", "found"), [("", "1"), ("3", "3")], ids=["unless-told", "as-told"])
def test_it_computes_with_one_thread(given: str, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def note(_: list[str]) -> int:
        seen.append(os.environ["OMP_NUM_THREADS"])
        return 0

    monkeypatch.setattr("draft_service.service.run_service", note)
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    if not given:
        monkeypatch.delenv("OMP_NUM_THREADS")
    assert main() == 0
    assert seen == [found]


def test_its_threads_take_short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draft_service.service.run_service", lambda _: 0)
    assert main() == 0
    assert sys.getswitchinterval() == pytest.approx(SWITCH_SECONDS)


def test_the_collector_looks_only_at_what_came_since(monkeypatch: pytest.MonkeyPatch) -> None:
    # As in a process that does not serve; this one is settled itself.
    monkeypatch.setattr("outrider.runtime._settled", 0)

    class Cycle:
        def __init__(self) -> None:
            self.itself = self

    with settled():
        assert gc.get_freeze_count() > 10_000
        gone = weakref.ref(Cycle())
        gc.collect()
        assert gone() is None
        with settled():
            pass
        # One of two services has ended.
        assert gc.get_freeze_count() > 10_000
    assert gc.get_freeze_count() == 0


def test_the_collector_looks_seldom_until_the_process_serves() -> None:
    with settled():
        usual = gc.get_threshold()
    collect_seldom()
    assert gc.get_threshold()[0] > 100 * usual[0]
    with settled():
        assert gc.get_threshold() == usual
    assert gc.isenabled()


def test_no_process_imports_pytorch_before_it_collects_seldom() -> None:
    """Which is what takes the time."""
    programs = ["draft_service", "draft_service.training", "target_service", "target_service.engine_process"]
    modules = [f"{program}.__main__" for program in programs]
    modules += ["draft_service.training.worker"]
    code = f"import sys, {', '.join(modules)}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=HUNG_SECONDS)
