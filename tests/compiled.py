"""Imported by the process that services are forked from: compiled loops are loaded once and not in each of them."""

from __future__ import annotations

import os

# As `python -m draft_service` has it, before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from eagle_heads import make_head
from medusa_heads import make_heads

from draft_service.drafters.base import create, drafter_spec
from draft_service.eagle.checkpoint import save_head
from draft_service.eagle.config import EagleConfig
from draft_service.medusa.checkpoint import save_heads
from draft_service.medusa.config import MedusaConfig
from target_service.execution import node_tables
from target_service.grammars import row_masks
from target_service.speculation.policy import estimates, lookup_baseline

_SIZES = {"vocab_size": 50, "draft_vocab_size": 50}


def _load() -> None:
    """Run a target's, and start the drafters that together run all of theirs."""
    estimates.compile_pooled()
    lookup_baseline.compile_loops()
    node_tables.warm_up()
    row_masks.warm_up()
    with TemporaryDirectory() as folder:
        head = save_head(make_head(**_SIZES), Path(folder) / "eagle", embedding=True)
        heads = save_heads(make_heads(**_SIZES), Path(folder) / "medusa")
        settings: dict[str, Any] = {
            "eagle": EagleConfig(head=str(head), dtype="float32", projection="draft"),
            "medusa": MedusaConfig(head=str(heads), dtype="float32"),
        }
        for name in ("merged", "medusa"):
            drafter = create(name, lambda part: settings.get(part) or drafter_spec(part).config())
            drafter.start()
            drafter.stop()


_load()
