"""Settings of all drafters with heads: the only place of their defaults."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.settings import Settings, setting


@dataclass(frozen=True)
class HeadSettings(Settings):
    """The draft vocabulary of a head, and the format in which it receives the target's hidden states."""

    token_map: str = setting("", "JSON or safetensors file of the only token ids to draft (FR-Spec); all when empty")
    feature_dtype: str = setting(
        "bfloat16", "type of features on the wire", choices=("float32", "bfloat16", "float8_e4m3")
    )
