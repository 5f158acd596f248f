"""The peer's loops over a stand-in with vLLM's interface: vLLM itself runs on a GPU only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from benchmarks.serving.vllm_peer import Peer, engine_options, measure, parse


@dataclass
class Output:
    """One message of one request."""

    request_id: str
    outputs: list[Any]
    finished: bool


@dataclass
class Completion:
    token_ids: list[int]


@dataclass
class StandIn:
    """Says two tokens a step for each request, as a speculating engine may, and none in a request's first step."""

    left: dict[str, int] = field(default_factory=dict)
    most: int = 0
    begun: set[str] = field(default_factory=set)

    @property
    def llm_engine(self) -> StandIn:
        return self

    def add_request(self, name: str, prompt: dict[str, list[int]], params: dict[str, Any]) -> None:
        assert prompt["prompt_token_ids"] and params["output_kind"] == "delta" and params["ignore_eos"]
        self.left[name] = params["max_tokens"]
        self.most = max(self.most, len(self.left))

    def step(self) -> list[Output]:
        said = []
        for name in list(self.left):
            count = min(2, self.left[name]) if name in self.begun else 0
            self.begun.add(name)
            self.left[name] -= count
            said.append(Output(name, [Completion([7] * count)], self.left[name] == 0))
            if not self.left[name]:
                del self.left[name]
        return said

    def generate(self, prompts: list[Any], params: dict[str, Any], use_tqdm: bool) -> list[Output]:
        assert not use_tqdm
        return [Output("", [Completion([7] * params["max_tokens"])], True) for _ in prompts]


def test_both_loops_are_measured_in_the_form_of_serving() -> None:
    options = parse(["--model", "x", "--concurrency", "1,3", "--max-tokens", "5", "--waves", "2"])
    engine, rows = StandIn(), list[dict[str, Any]]()
    measure(Peer(engine, dict, "delta", detokenize=True), [(1, 2), (3,), (4,)], options, rows)
    assert [(row["loop"], row["concurrency"]) for row in rows] == [
        ("waves", 1),
        ("closed", 1),
        ("waves", 3),
        ("closed", 3),
    ]
    assert engine.most == 3
    assert rows[0]["tokens"] == 10 and rows[2]["tokens"] == 30
    assert all(row["tokens"] > 0 and row["tokens_per_second"] > 0 for row in rows)
    assert rows[0]["token_ms"] is None and rows[1]["token_ms"]["n"] > 0


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--model", "x", "--mode", "ngram"], {"model": "x", "max_num_seqs": 64, "enable_prefix_caching": False}),
        (["--shape", "y", "--prompt-tokens", "8"], {"model": "y", "load_format": "dummy", "skip_tokenizer_init": True}),
    ],
    ids=["ngram", "shape"],
)
def test_engine_options(arguments: list[str], wanted: dict[str, Any]) -> None:
    settings = engine_options(parse(arguments))
    assert wanted.items() <= settings.items()
    assert ("speculative_config" in settings) == ("ngram" in arguments)
