"""The README's program, as it stands, over vLLM's runner as `vllm_runner` mimics it and a real draft service."""

from __future__ import annotations

import re
import sys
import time
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from draft_process import Service
from vllm_runner import Runner, plain, repeating, vllm_config
from waits import HUNG_SECONDS

README = Path(__file__).parents[2] / "clients/outrider_vllm/README.md"
ADDRESS = "127.0.0.1:50052"
PROMPT = [3, 5, 6]


class LLM:
    """vLLM's own, as far as the program goes: it loads the class that `speculative_config` names, and asks it for
    drafts in every step."""

    def __init__(self, *, speculative_config: dict[str, Any], additional_config: dict[str, Any], **_: Any) -> None:
        assert speculative_config["method"] == "custom_class"
        module, _, name = speculative_config["model"].rpartition(".")
        settings = additional_config["outrider"]
        self._config = vllm_config(tokens=speculative_config["num_speculative_tokens"], **settings, wait_ms=1000)
        self._proposer = getattr(import_module(module), name)(self._config)
        deadline = time.monotonic() + HUNG_SECONDS
        empty = Runner(self._config, [])
        while not self._proposer._drafting.connected:
            self._proposer.propose([], empty._lengths, empty._token_ids)
            assert time.monotonic() < deadline, "the proposer has met no draft"
            time.sleep(0.01)

    def generate(self, text: str, sampling: Any) -> list[Any]:
        assert text
        try:
            (request,) = Runner(self._config, [self._proposer], repeating).answer((PROMPT, sampling.max_tokens))
        finally:
            self._proposer.close()
        assert request.accepted > 0
        return [SimpleNamespace(outputs=[SimpleNamespace(text=str(request.output))])]


def test_ten_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert found is not None and ADDRESS in found[1] and len(found[1].splitlines()) <= 10
    vllm: Any = ModuleType("vllm")
    vllm.LLM, vllm.SamplingParams = LLM, SimpleNamespace
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    service = Service(tmp_path)
    service.start("--drafter", "trie")
    try:
        exec(found[1].replace(ADDRESS, service.address), {})  # noqa: S102
    finally:
        service.end()
    assert capsys.readouterr().out.strip() == str(plain(repeating, PROMPT, 64))
