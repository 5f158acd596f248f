"""Random numbers that no test seeds: they are the same whichever tests and fixtures ran before in the process.

Each test begins a sequence of its own, and so does each fixture that tests share, which gives back what it interrupted.
"""

from __future__ import annotations

import random
import sys
import zlib
from collections.abc import Generator

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    _begin(item.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object]) -> Generator[None, object, object]:
    if fixturedef.scope == "function":
        return (yield)
    torch, before = sys.modules.get("torch"), random.getstate()
    drawn = torch.default_generator.get_state() if torch else None
    _begin(f"{fixturedef.baseid} {fixturedef.argname}")
    try:
        return (yield)
    finally:
        random.setstate(before)
        if torch:
            torch.default_generator.set_state(drawn)


def _begin(name: str) -> None:
    seed = zlib.crc32(name.encode())
    random.seed(seed)
    # Tests of clients run without it.
    if torch := sys.modules.get("torch"):
        torch.default_generator.manual_seed(seed)
