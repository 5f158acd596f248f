"""Settings of the assistant drafter, in addition to `NeuralConfig`."""

from __future__ import annotations

from dataclasses import dataclass

from draft_service.neural.config import NeuralConfig
from outrider.settings import setting


@dataclass(frozen=True)
class AssistantConfig(NeuralConfig):
    """Settings of the assistant drafter: flags, environment (`OUTRIDER_ASSISTANT_*`) or the `[assistant]` table. It has
    the target's type, device and cache."""

    head: str = setting("", "Gemma 4's assistant for the target: a folder, or a hub id; safetensors only")
