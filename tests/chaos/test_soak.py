"""Twenty thousand requests with a draft: neither service keeps memory or descriptors of them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chaos.soak import MOST_KB_PER_THOUSAND, Watched, leaks, soak
from chaos.taught import Taught
from forked import Child


def watched(kb_per_request: float, descriptors: int = 30) -> Watched:
    """A service whose memory goes up and down by a megabyte, and grows."""
    coins, found = random.Random(2), Watched(Child("draft_service", (), Path()))
    for number in range(100):
        found.requests.append(200 * number)
        found.memory.append(400_000 + 200 * number * kb_per_request + coins.uniform(-500, 500))
        found.descriptors.append(descriptors if number else 30)
    return found


def test_a_leak_is_found_in_the_noise() -> None:
    sound = {"target": watched(0.0).figures(), "draft": watched(0.0).figures()}
    assert leaks(sound) == []
    assert "target keeps" in leaks(sound | {"target": watched(2 * MOST_KB_PER_THOUSAND / 1000).figures()})[0]
    assert "draft holds 40" in leaks(sound | {"draft": watched(0.0, descriptors=40).figures()})[0]


@pytest.mark.chaos
@pytest.mark.timeout(2 * 3600)
def test_nothing_is_kept_of_twenty_thousand_requests(
    taught_model: Taught, tmp_path: Path, keep: Callable[[str, dict[str, Any]], None]
) -> None:
    told = asyncio.run(soak(taught_model, tmp_path, 20_000))
    keep("soak", told)
    assert told["drafted"] > 0 and told["requests"] == 20_000
    assert leaks(told) == []
