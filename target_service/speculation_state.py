"""Whether anything drafts right now, and why: what operators ask of a target."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.wire.frames import DraftInfo
from target_service.core.events import EngineSnapshot
from target_service.speculation.config import DraftingConfig

# Drafter of a target whose device drafts and nobody else.
LOOKUP = "lookup"
_DEVICE_DRAFTS = "the device drafts from the text so far"


@dataclass(frozen=True, slots=True)
class SpeculationState:
    """`drafter` and `draft` are empty where there is none; `reason` is for people."""

    drafter: str = ""
    # Its address, as the settings have it.
    draft: str = ""
    draft_connected: bool = False
    speculating: bool = False
    reason: str = ""


def speculation_state(
    drafting: DraftingConfig,
    snapshot: EngineSnapshot,
    info: DraftInfo | None,
    *,
    draft: str,
    wanted: bool,
    lookup: bool,
) -> SpeculationState:
    """How things stand.

    Args:
        drafting: when the engine drafts.
        snapshot: what it holds now.
        info: what the draft reports of itself; None while there is none.
        draft: address of the draft; empty without one.
        wanted: speculation is not switched off.
        lookup: the device drafts too.
    """
    drafter = info.drafter if info is not None else LOOKUP if lookup else ""
    if not wanted:
        return SpeculationState("", draft, reason="it is switched off (--no-speculation)")
    about_draft = _about_draft(drafting, snapshot, draft)
    reason = f"{_DEVICE_DRAFTS}; {about_draft}" if lookup else about_draft
    return SpeculationState(drafter, draft, snapshot.draft_connected, snapshot.speculating or lookup, reason)


def _about_draft(drafting: DraftingConfig, snapshot: EngineSnapshot, draft: str) -> str:
    if not draft:
        return "no draft service is configured (--draft)"
    if not snapshot.draft_connected:
        return f"the draft at {draft} is not connected"
    if snapshot.speculating:
        return f"the draft at {draft} is connected; steps use what it says where that pays"
    if snapshot.running > drafting.resumes_at:
        return (
            f"the draft is not asked while so many sequences run: {snapshot.running} do; it is left out above "
            f"{drafting.disable_above}, and asked again at {drafting.resumes_at}"
        )
    if snapshot.measuring:
        return "the draft is asked soon: the first passes at this load say what one takes without it"
    return "the draft is not asked for now: what it says makes less than it takes; it is tried again now and then"
