"""Imported by the process that services are forked from: compiled loops are loaded once and not in each of them."""

from __future__ import annotations

import os

# As `python -m draft_service` has it, before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from draft_service.ngram.config import TrieConfig
from draft_service.ngram.drafter import NgramDrafter


def _load() -> None:
    drafter = NgramDrafter(TrieConfig())
    drafter.start()
    drafter.stop()


_load()
