"""An hour of requests with drafts and one without: no process keeps memory or descriptors of them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chaos.soak import MOST_KB_PER_MINUTE, Watched, leaks, soak
from chaos.taught import Taught


def watched(kb_per_minute: float, descriptors: int = 30) -> Watched:
    """A process whose memory goes up and down by a megabyte, and grows."""
    coins, found = random.Random(2), Watched(None)
    for number in range(120):
        minutes = number / 2
        found.minutes.append(minutes)
        found.memory.append(400_000 + minutes * kb_per_minute + coins.uniform(-500, 500))
        found.descriptors.append(descriptors if number else 30)
    return found


def test_a_leak_is_found_in_the_noise() -> None:
    sound = {name: watched(0.0).figures() for name in ("target", "engine", "draft", "gateway")}
    assert leaks({"processes": sound}) == []
    growing = sound | {"engine": watched(4 * MOST_KB_PER_MINUTE).figures()}
    assert [leak.partition(" keeps")[0] for leak in leaks({"processes": growing})] == ["engine"]
    holding = sound | {"draft": watched(0.0, descriptors=40).figures()}
    assert leaks({"processes": holding}) == ["draft holds 40 descriptors after 30"]


def test_what_grows_before_the_warm_up_is_no_leak() -> None:
    found = watched(0.0)
    for number in range(30):
        found.memory[number] -= 1000 * (30 - number)
    assert leaks({"processes": {"engine": found.figures()}}) == []


def test_what_has_stopped_growing_is_no_leak() -> None:
    found = watched(0.0)
    for number in range(75):
        found.memory[number] -= 500 * (75 - number)
    assert found.figures()["kb_per_minute"] > MOST_KB_PER_MINUTE
    assert leaks({"processes": {"target": found.figures()}}) == []


@pytest.mark.chaos
@pytest.mark.timeout(3 * 3600)
@pytest.mark.parametrize("drafts", [True, False], ids=["drafts", "plain"])
def test_nothing_is_kept_of_an_hour_of_requests(
    taught_model: Taught, tmp_path: Path, keep: Callable[[str, dict[str, Any]], None], drafts: bool
) -> None:
    found = asyncio.run(soak(taught_model, tmp_path, 60.0, drafts=drafts))
    keep("soak" if drafts else "soak_plain", found)
    assert set(found["processes"]) >= {"target", "engine", "draft", "gateway"}
    assert (found["drafted"] > 0, found["compared"] > 0) == (drafts, drafts)
    assert leaks(found) == []
