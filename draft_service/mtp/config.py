"""Settings of the MTP drafter. Each default lives here, or in `HeadDrafterConfig`, and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass

from draft_service.eagle.config import HeadDrafterConfig
from outrider.settings import setting


@dataclass(frozen=True)
class MtpConfig(HeadDrafterConfig):
    """Settings of the MTP drafter: flags, environment (`OUTRIDER_MTP_*`) or the `[mtp]` table."""

    base_model: str = setting(
        "",
        "target whose checkpoint holds the module: a name from `outrider model list`, a folder, or a hub id; "
        "safetensors only",
    )
