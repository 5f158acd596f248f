"""Compiled loops are cached by the state of all their sources, and work where nothing can be cached."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from waits import HUNG_SECONDS

from draft_service import compiling

DRAFT = """
from draft_service.drafters.base import DraftSequence, create
drafter = create("trie")
drafter.start()
sequence = DraftSequence(1, [1, 2, 3, 1, 2], 5, 10)
drafter.open(sequence)
assert drafter.propose([sequence])[0].token_ids[1] == 3
drafter.stop()
"""


def test_the_cache_is_named_after_the_sources() -> None:
    folder = compiling.LOOPS.folder
    assert folder == compiling.LOOPS.folder
    assert len(folder.name) == 16


@pytest.mark.full
def test_a_process_that_can_write_nowhere_compiles_anew(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    environment = {"NUMBA_CACHE_DIR": str(blocked), "XDG_CACHE_HOME": str(blocked), "HOME": str(blocked), "PATH": ""}
    subprocess.run([sys.executable, "-c", DRAFT], env=environment, check=True, timeout=HUNG_SECONDS)
