"""One tenant attacks in every way that was found; another's 99th percentile stays within twice its quiet value."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chaos.actors import ATTACKS
from chaos.attacks import BAR, HOSTILE_DRAFT, measure
from chaos.taught import Taught


@pytest.mark.chaos
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", [*ATTACKS, HOSTILE_DRAFT])
def test_anothers_requests_go_on(
    taught_model: Taught, tmp_path: Path, name: str, keep: Callable[[str, dict[str, Any]], None]
) -> None:
    told = asyncio.run(measure(taught_model, tmp_path, [name], rounds=3, seconds=5.0))
    keep(f"attack-{name.partition(' ')[0]}-{name.partition(' ')[2][:20].replace(' ', '-')}", told)
    figures = told["attacks"][name]
    assert figures["errors"] == []
    assert figures["p99_ratio"] <= BAR
