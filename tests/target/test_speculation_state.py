"""Why a target speculates or not, as operators are told."""

from __future__ import annotations

import re
from typing import Any

import pytest

from outrider.wire.frames import DraftInfo, TreeLimits
from target_service.config import TargetConfig
from target_service.core.events import EngineSnapshot
from target_service.speculation_state import speculation_state

INFO = DraftInfo("trie", 0, "f", TreeLimits(63, 8), 4096, "0.1")


def state(
    *,
    running: int = 1,
    speculating: bool = False,
    measuring: bool = False,
    info: DraftInfo | None = INFO,
    lost: str = "",
    lookup: bool = False,
    **settings: Any,
) -> tuple[str, bool, bool, str]:
    connected = info is not None
    snapshot = EngineSnapshot(
        running,
        0,
        running,
        0,
        1,
        speculating=speculating,
        draft_connected=connected,
        measuring=measuring,
        draft_lost=lost,
    )
    config = TargetConfig(**{"draft": "host:1", "speculative_disable_queue_size": 8, **settings})
    found = speculation_state(config, snapshot, info, lookup=lookup)
    return found.drafter, found.draft_connected, found.speculating, found.reason


@pytest.mark.parametrize(
    ("asked", "drafter", "speculating", "reason"),
    [
        ({"speculating": True}, "trie", True, "draft at host:1 is connected"),
        ({"info": None}, "", False, "draft at host:1 is not connected"),
        (
            {"info": None, "draft": "inprocess:m:D", "lost": "a bug"},
            "",
            False,
            "at inprocess:m:D is not connected: a bug$",
        ),
        ({"info": None, "lost": "a text of its own"}, "", False, "draft at host:1 is not connected$"),
        ({"info": None, "draft": ""}, "", False, "no draft service is configured"),
        ({"running": 9}, "trie", False, "off at this load: 9 sequences run; it stops above 8 and resumes at 6"),
        ({"running": 6}, "trie", False, "costs more than it brings"),
        ({"measuring": True}, "trie", False, "goes on soon: some passes at this load"),
        ({"info": None, "speculation": False}, "", False, "--no-speculation"),
        ({"info": None, "draft": "", "lookup": True}, "lookup", True, "the device drafts .*; no draft service"),
        ({"running": 9, "lookup": True}, "trie", True, "the device drafts .*; drafting is off at this load"),
    ],
    ids=[
        "on",
        "away",
        "failed-here",
        "failed-there",
        "alone",
        "loaded",
        "unpaid",
        "unmeasured",
        "off",
        "lookup",
        "lookup-loaded",
    ],
)
def test_the_reason_is_the_one_that_holds(asked: dict[str, Any], drafter: str, speculating: bool, reason: str) -> None:
    found_drafter, connected, found_speculating, found_reason = state(**asked)
    assert (found_drafter, found_speculating) == (drafter, speculating)
    assert connected == ("info" not in asked)
    assert re.search(reason, found_reason), found_reason
