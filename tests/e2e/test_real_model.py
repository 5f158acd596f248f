"""SmolLM2-135M-Instruct on real prompts: the same tokens with every drafter as without (fp32)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from engine_harness import engine_config, real_drafter, request, run
from transformers import AutoModelForCausalLM

from benchmarks.drafters.random_trees import RANDOM
from outrider.sampling import SamplingParams
from target_service.config import TargetConfig
from target_service.core.sequence import SequenceRequest
from target_service.model.loading.loader import load_runner
from target_service.model.loading.store import resolve
from target_service.model.runner import ModelRunner
from target_service.speculation.policy.step_cost import StepCost
from target_service.text.prompt_encoder import PromptEncoder

pytestmark = [pytest.mark.model]
PROMPTS = Path(__file__).parents[2] / "benchmarks" / "prompts.jsonl"
GREEDY = SamplingParams(ignore_eos=True)
SEEDED = SamplingParams(temperature=0.8, top_p=0.9, seed=11, ignore_eos=True)
PENALTIES = SamplingParams(temperature=0.6, repetition_penalty=1.1, frequency_penalty=0.2, seed=12, ignore_eos=True)
# Longer prompts say no more about equality, and cost their prefill for plain decoding and once for every draft.
SHORT, LONGEST = 90, 400


@pytest.fixture(scope="module")
def runner() -> Iterator[ModelRunner]:
    yield load_runner(TargetConfig(dtype="float32", kv_tokens=16384))


def wanted(
    runner: ModelRunner, per_task: int, max_tokens: int, sampling: SamplingParams, longest: int = SHORT
) -> list[SequenceRequest]:
    """The first prompts of each task that have no more tokens than `longest`."""
    by_task: dict[str, list[SequenceRequest]] = {}
    for line in PROMPTS.read_text().splitlines():
        row = json.loads(line)
        of_task = by_task.setdefault(row["task"], [])
        if len(of_task) == per_task:
            continue
        ids = PromptEncoder(runner.tokenizer).chat([{"role": "user", "content": row["turns"][0]}])
        if len(ids) <= longest:
            of_task.append(request(ids, max_tokens, sampling=sampling))
    assert len(by_task) == 7
    return [one for of_task in by_task.values() for one in of_task]


def check(
    runner: ModelRunner, requests: list[SequenceRequest], drafters: tuple[str, ...], priced: tuple[str, ...] = ()
) -> None:
    """With each of `drafters`, and with each that is `priced` once more where rows cost."""
    config: TargetConfig = engine_config(max_running=8)
    cost = StepCost([(1, 1.0), (16, 1.3), (64, 2.0)])
    plain = [one.token_ids for one in run(runner, requests, config=config)]
    for name in drafters:
        for step_cost in (None, cost) if name in priced else (None,):
            with real_drafter(name, runner.vocabulary_size) as connect:
                outcomes = run(runner, requests, connect=connect, config=config, step_cost=step_cost)
            assert [one.token_ids for one in outcomes] == plain, name
            # Where cost counts, whether anything is drafted hangs on how busy the machine is.
            drafted = sum(one.finished.totals.drafted_tokens for one in outcomes)
            assert drafted > 0 or step_cost is not None, name


def test_a_handful_of_prompts(runner: ModelRunner) -> None:
    # Trees that nothing is accepted of are those of small models, everywhere else.
    check(runner, wanted(runner, 1, 8, GREEDY)[::2], ("trie",))


@pytest.mark.full
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_handful_of_prompts_where_rows_cost(runner: ModelRunner, sampling: SamplingParams) -> None:
    check(runner, wanted(runner, 1, 16, sampling), ("trie", RANDOM), priced=("trie",))


@pytest.mark.full
@pytest.mark.parametrize(
    ("sampling", "drafters", "priced"),
    [
        (GREEDY, ("trie", "prompt_lookup", RANDOM), ()),
        (SEEDED, ("trie",), ("trie",)),
        (PENALTIES, ("prompt_lookup",), ("prompt_lookup",)),
    ],
    ids=["greedy", "seeded", "penalties"],
)
def test_forty_two_prompts(
    runner: ModelRunner, sampling: SamplingParams, drafters: tuple[str, ...], priced: tuple[str, ...]
) -> None:
    """Not every drafter with every sampling, as `test_lossless.py` has them with a tiny model: 48 tokens of each took
    this one 450 s of a core for each sampling."""
    check(runner, wanted(runner, 6, 32, sampling, LONGEST), drafters, priced)


TOKENS = 12


def test_plain_decoding_is_transformers_own(runner: ModelRunner) -> None:
    one = wanted(runner, 1, TOKENS, GREEDY)[0]
    (outcome,) = run(runner, [one])
    model = AutoModelForCausalLM.from_pretrained(resolve(runner.name), dtype=torch.float32)
    ids = torch.tensor([one.token_ids])
    said = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False
    )
    assert tuple(said[0, len(one.token_ids) :].tolist()) == outcome.token_ids
