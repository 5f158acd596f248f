"""One tenant attacks in every way that was found; another's 99th percentile stays within twice its quiet value."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chaos.actors import ATTACKS
from chaos.attacks import BAR, BY_DRAFTS, Actor, judged, measure
from chaos.taught import Taught
from scripted_engine import ScriptedEngine
from scripted_service import target_over
from waits import HUNG_SECONDS


async def test_the_time_of_an_answer_that_is_owed_counts() -> None:
    """An attack that lets no answer end would otherwise be seen in no time at all."""
    async with (
        target_over(ScriptedEngine(tick=0.05)) as target,
        Actor.started("victim", target.server.address, "127.0.0.1:1", "127.0.0.1:1") as victim,
    ):
        await victim.go()
        async with asyncio.timeout(HUNG_SECONDS):
            while not target.engine.requests:
                await asyncio.sleep(0.01)
        (found,) = await victim.rest()
        assert not found["error"] and len(found["said"]) == 16
        assert found["seconds"] > 0.5
        # It goes again, and rests again.
        await victim.go()
        assert len(await victim.rest()) <= 1


@pytest.mark.chaos
@pytest.mark.parametrize("name", [*ATTACKS, *BY_DRAFTS])
def test_anothers_requests_go_on(
    taught_model: Taught, tmp_path: Path, name: str, keep: Callable[[str, dict[str, Any]], None]
) -> None:
    told = asyncio.run(measure(taught_model, tmp_path, [name], rounds=3, seconds=5.0))
    keep(f"attack-{name.partition(' ')[0]}-{name.partition(' ')[2][:20].replace(' ', '-')}", told)
    figures = told["attacks"][name]
    assert figures["errors"] == []
    assert judged(figures) <= BAR
