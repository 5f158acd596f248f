"""`outrider tune` with real services over a tiny model."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

from scripted_service import byte_tokenizer
from warm_python import shared_python

from draft_service.config import drafter_config
from outrider.settings import load
from target_service.config import TargetConfig

_PROMPTS = '{"id": "a", "task": "a", "turns": ["Say a."]}\n{"id": "b", "task": "b", "turns": ["Say b, b, b."]}\n'


def test_a_tiny_model_is_tuned(tiny_model: Any, tmp_path: Path) -> None:
    model, prompts, own, out = (tmp_path / name for name in ("model", "prompts.jsonl", "own.toml", "tuned.toml"))
    tiny_model.save_pretrained(model)
    byte_tokenizer().save_pretrained(model)
    prompts.write_text(_PROMPTS)
    # A taken port would stop what is started from this, if it were not for us alone.
    own.write_text('[target]\nmetrics_listen = "127.0.0.1:1"\nmax_running = 9\n[trie]\nbreadth = 5\n')
    words = ["--model", str(model), "--dtype", "float32", "--prompts", str(prompts), "--max-tokens", "8"]
    words += ["--candidates", "target.max_draft_nodes=3; trie.num_draft_tokens=4; target.max_draft_nodes=200"]
    # Where services take all of it to start, the settings in force are measured alone.
    words += ["--minutes", "0.12", "--concurrency", "1,2", "--config", str(own), "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    argv = [str(shared_python("services") / "outrider"), "tune", *words]
    done = subprocess.run(argv, capture_output=True, text=True, env=environment)
    again = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "measuring the settings in force against plain decoding" in done.stderr
    assert "The settings in force make" in done.stdout and "Tuning adds" in done.stdout
    assert "Not measured, the target's own max_draft_nodes is 63: target.max_draft_nodes=200." in done.stdout
    target, trie = load(TargetConfig, "target", path=out), drafter_config("trie", path=out)
    assert (target.model, target.dtype, target.max_running, trie.breadth) == (str(model), "float32", 9, 5)
    if "Tuning adds nothing" in done.stdout:
        assert (target.max_draft_nodes, trie.num_draft_tokens) == (63, 32)
    else:
        assert (target.max_draft_nodes, trie.num_draft_tokens) in ((3, 32), (63, 4))
    # Nothing is overwritten, and that is found out before anything is measured.
    assert again.returncode == 2 and "is there already" in again.stderr
