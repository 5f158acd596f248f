"""Settings that drafters with heads of every kind have. Each default lives here and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.settings import Settings, setting


@dataclass(frozen=True)
class HeadSettings(Settings):
    """What of the vocabulary a head may say, and how the target's hidden states travel to it."""

    token_map: str = setting("", "JSON or safetensors file of the only token ids to draft (FR-Spec); all when empty")
    feature_dtype: str = setting(
        "bfloat16", "type of features on the wire", choices=("float32", "bfloat16", "float8_e4m3")
    )

    def read_token_map(self) -> tuple[int, ...] | None:
        """The ids of `token_map`; None without one. Raises `HeadRefused` for what is no token map."""
        # Here, since it takes PyTorch.
        from draft_service.checkpoints.vocabulary import read_token_map

        return read_token_map(self.token_map) if self.token_map else None
