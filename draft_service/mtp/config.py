"""Settings of the MTP drafter, in addition to `HeadDrafterConfig`."""

from __future__ import annotations

from dataclasses import dataclass

from draft_service.eagle.config import HeadDrafterConfig
from outrider.settings import setting


@dataclass(frozen=True)
class MtpConfig(HeadDrafterConfig):
    """Settings of the MTP drafter: flags, environment (`OUTRIDER_MTP_*`) or the `[mtp]` table."""

    base_model: str = setting(
        "",
        "target whose checkpoint holds the modules: a name from `outrider model list`, a folder, or a hub id; "
        "safetensors only",
    )
    num_modules: int = setting(
        0, "modules that draft, each a level of the trees and the last one all that follow; 0 takes all there are", ge=0
    )
