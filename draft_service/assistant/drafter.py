"""The assistant drafter. In a service of its own it has nothing to read: `draft_service.assistant.in_pass` drafts."""

from __future__ import annotations

from typing import NoReturn

from draft_service.assistant.config import AssistantConfig
from draft_service.drafters.base import DrafterSpec
from outrider.settings import SettingsError

NAME = "assistant"


def _refused(_: AssistantConfig) -> NoReturn:
    """Raises `SettingsError`."""
    raise SettingsError(
        f"the {NAME} drafter attends to its target's keys and values, so that it runs in the target's passes alone: "
        f"outrider target --draft 'inpass:{NAME} --head HEAD'"
    )


SPEC = DrafterSpec("assistant", AssistantConfig, _refused)
