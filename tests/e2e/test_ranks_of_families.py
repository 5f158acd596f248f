"""Layers that keep states, or share keys, divided over processes: drafts change nothing (fp32)."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from conftest import make_tiny
from engine_harness import engine_config, knowing_tree, plain_each, request, run
from recurrent_models import RECURRENT
from scripted_service import byte_tokenizer
from windowed_models import WINDOWED

from outrider.sampling import SamplingParams
from target_service.config import TargetConfig
from target_service.model.ranks.leading import load_ranks

VOCABULARY, MAX_TOKENS = 211, 14


@pytest.mark.usefixtures("started_in_a_moment")
@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        pytest.param("lfm2", 2, marks=pytest.mark.full),
        ("qwen3_next, dense", 2),
        # Groups that ranks have in common, and norms over several ranks.
        pytest.param("nemotron_h", 4, marks=pytest.mark.full),
        # Values of the token on one rank, and of the one before on the other.
        pytest.param("zaya", 2, marks=pytest.mark.full),
        # Layers that attend to others' keys, and a table of vectors for each layer.
        pytest.param("gemma4", 2, marks=pytest.mark.full),
    ],
)
def test_layers_of_other_kinds(kind: str, ranks: int, tmp_path: Path) -> None:
    """Accepted inputs move on every rank, by the host or behind the pass; states are copied where texts part, and kept
    behind answers."""
    model_type, settings = (RECURRENT | WINDOWED)[kind]
    model = make_tiny(model_type, **settings)
    model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    config = TargetConfig(
        model=str(tmp_path),
        dtype="float32",
        tensor_parallel=ranks,
        kv_tokens=256,
        page_size=4,
        max_running=4,
        kept_states=16,
    )
    divided, link = load_ranks(config)
    try:
        rng = random.Random(3)
        sampling = SamplingParams(temperature=0.8, top_p=0.9, seed=99, ignore_eos=True)
        prompts = [[rng.randrange(3, VOCABULARY) for _ in range(length)] for length in (5, 17)]
        wanted = [request(prompt, MAX_TOKENS, sampling=sampling) for prompt in (*prompts, prompts[0] * 6)]
        said = plain_each(model, wanted)
        # What comes behind each answer.
        asked = [
            request([*one.token_ids, *output, 4], MAX_TOKENS, sampling=sampling)
            for one, output in zip(wanted, said, strict=True)
        ]
        requests = [*wanted, *wanted, *asked]
        expected = plain_each(model, requests)
        whole = [(*one.token_ids, *output) for one, output in zip(requests, expected, strict=True)]
        propose = knowing_tree(whole, VOCABULARY, 12, right=0.8)
        for on_device in (False, True):
            settings = {"config": engine_config(max_running=4), "on_device": on_device, "stagger": 9}
            outcomes = run(divided, requests, propose=propose, **settings)
            assert [outcome.token_ids for outcome in outcomes] == expected
            assert sum(outcome.finished.totals.accepted_tokens for outcome in outcomes) > 5
            cached = [outcome.finished.totals.cached_tokens for outcome in outcomes]
            assert kind in WINDOWED or all(
                one > len(before.token_ids) for one, before in zip(cached[-len(asked) :], wanted, strict=True)
            ), cached
            assert sum(cached) > 0
    finally:
        link.close()
