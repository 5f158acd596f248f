"""Settings of the drafters that run a head, in addition to `NeuralConfig`."""

from __future__ import annotations

from dataclasses import dataclass

from draft_service.neural.config import HeadSettings, NeuralConfig
from outrider.settings import setting


@dataclass(frozen=True)
class HeadDrafterConfig(HeadSettings, NeuralConfig):
    """Settings of every head that reads the target's features."""

    feature_window: int = setting(
        8192, "features of a sequence that may wait for its next tree; the oldest go first", ge=1
    )
    head_weights: str = setting(
        "int8",
        "weights of fc, layers and lm_head in passes of up to 64 rows on a GPU: the head's `own`, or copies in "
        "int8, which take half the head's bytes more and less time a level, with guesses hardly worse; experts and "
        "latent attention have their own weights alone",
        choices=("own", "int8"),
    )


@dataclass(frozen=True)
class EagleConfig(HeadDrafterConfig):
    """Settings of the EAGLE drafter: flags, environment (`OUTRIDER_EAGLE_*`) or the `[eagle]` table."""

    head: str = setting(
        "smollm2-135m-instruct",
        "head: a name from `outrider head list`, a folder, or a hub id, in any published layout; safetensors only",
    )
    embeddings: str = setting(
        "",
        "target, for what the head does not carry: a name from `outrider model list`, a folder, or a hub id; "
        "empty takes it from the head's record",
    )
    window: int = setting(
        0,
        "tokens that the head's attention sees, the last ones: a head that was trained on short texts guesses worse "
        "behind long ones; 0 takes what its config.json says, and all where it says nothing",
        ge=0,
    )
    projection: str = setting("target", "who fuses the target's hidden states", choices=("target", "draft"))
