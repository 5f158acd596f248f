"""The benchmark of a decoder layer runs, and what it compares computes the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from kernel_worker import FOLDER, INTERPRETED
from warm_python import shared_python

ROOT = Path(__file__).parents[2]
COMMAND = "benchmarks/kernels/decoder_layer.py --device cpu --shape tiny --rows 5 33 --sequences 2 --layers 2 --json"


def test_every_way_through_a_layer_computes_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    for name, value in INTERPRETED.items():
        monkeypatch.setenv(name, value)
    # The script finds its own folder alone.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), *sys.path])))
    path = tmp_path / "layers.json"
    runner = str(FOLDER.with_name("interpreted.py"))
    command = [str(shared_python("interpreter") / "python"), runner, *COMMAND.split(), str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert len(done.stdout.splitlines()) == 3
    results = json.loads(path.read_text(encoding="utf-8"))["results"]
    assert [one["rows"] for one in results] == [5, 33]
    for one in results:
        assert one["own"]["error"] == 0.0
        for way in ("few", "many"):
            # Written so that NaN fails; nothing at all would be exact.
            assert 0.0 < one[way]["error"] < 1e-5 and one[way]["us"] > 0.0
