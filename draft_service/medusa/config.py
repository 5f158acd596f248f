"""Settings of the Medusa drafter, in addition to `NetworkConfig`."""

from __future__ import annotations

from dataclasses import dataclass

from draft_service.neural.config import HeadSettings, NetworkConfig
from outrider.settings import SettingsError, setting
from outrider.tree import MAX_ROWS


@dataclass(frozen=True)
class MedusaConfig(HeadSettings, NetworkConfig):
    """Settings of the Medusa drafter: flags, environment (`OUTRIDER_MEDUSA_*`) or the `[medusa]` table."""

    head: str = setting("", "Medusa heads: a folder, or a hub id, in any published layout; safetensors only")
    base_model: str = setting(
        "",
        "target that the heads were made for: a name from `outrider model list`, a folder, or a hub id; empty takes it "
        "from the heads' record",
    )
    # The sizes of Medusa's own trees, which have the same ranks for every text.
    num_draft_tokens: int = setting(63, "nodes of a tree, the root not counted", ge=1, le=MAX_ROWS - 1)
    topk: int = setting(10, "children of a node; 1 drafts a chain", ge=1)
    num_steps: int = setting(0, "levels of a tree, one for each head; 0 takes all heads", ge=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gumbel_candidates < self.topk:
            raise SettingsError("gumbel_candidates must be at least topk")
