"""What the draft service's process is told before PyTorch is there to read it."""

from __future__ import annotations

import os

import pytest

from draft_service.__main__ import main


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
