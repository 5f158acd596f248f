"""Whether anything drafts right now, and why, for operators."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.drafting.link import INPROCESS_SCHEME
from outrider.wire.frames import DraftInfo
from target_service.config import TargetConfig
from target_service.core.events import EngineSnapshot

# The drafter of a target without a draft service whose device drafts.
LOOKUP = "lookup"


@dataclass(frozen=True, slots=True)
class SpeculationState:
    """The present state of drafting. `drafter` and `draft` are empty where there is none."""

    drafter: str = ""
    # Its address, as the settings have it.
    draft: str = ""
    draft_connected: bool = False
    speculating: bool = False
    # In words, for people.
    reason: str = ""


def speculation_state(
    config: TargetConfig, snapshot: EngineSnapshot, info: DraftInfo | None, *, lookup: bool
) -> SpeculationState:
    """The present state of drafting. `info` is from the draft service, None while it is not connected; `lookup`: the
    device drafts too."""
    if not config.speculation:
        return SpeculationState("", config.draft, reason="it is switched off (--no-speculation)")
    drafter = info.drafter if info is not None else LOOKUP if lookup else ""
    about_draft = _about_draft(config, snapshot)
    reason = f"the device drafts from the text so far; {about_draft}" if lookup else about_draft
    return SpeculationState(drafter, config.draft, snapshot.draft_connected, snapshot.speculating or lookup, reason)


def _about_draft(config: TargetConfig, snapshot: EngineSnapshot) -> str:
    draft, resumes_at = config.draft, config.drafting_resumes_at
    if not draft:
        return "no draft service is configured (--draft)"
    if not snapshot.draft_connected:
        # A remote draft's text about itself is not passed on to callers.
        lost = snapshot.draft_lost if draft.startswith(INPROCESS_SCHEME) else ""
        return f"the draft at {draft} is not connected{lost and ': '}{lost}"
    if snapshot.speculating:
        return f"the draft at {draft} is connected; steps use its drafts where that pays"
    if snapshot.running > resumes_at:
        return (
            f"drafting is off at this load: {snapshot.running} sequences run; it stops above "
            f"{config.speculative_disable_queue_size} and resumes at {resumes_at}"
        )
    if snapshot.measuring:
        return "drafting goes on soon: some passes at this load measure the speed without it"
    return "drafting is paused, since it costs more than it brings; it is tried again now and then"
