"""The model, head and answers that all fault runs share."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chaos.taught import Taught, taught


@pytest.fixture(scope="session")
def taught_model(tmp_path_factory: pytest.TempPathFactory) -> Taught:
    return taught(tmp_path_factory.mktemp("taught"))


@pytest.fixture
def keep() -> Callable[[str, dict[str, Any]], None]:
    """Writes a proof's figures where `OUTRIDER_CHAOS_RESULTS` says, if anywhere."""

    def kept(name: str, figures: dict[str, Any]) -> None:
        folder = os.environ.get("OUTRIDER_CHAOS_RESULTS")
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            (Path(folder) / f"{name}.json").write_text(json.dumps(figures, indent=1) + "\n")

    return kept
