"""The head that comes with Outrider, on the real SmolLM2: it is what its record says, helps, and loses nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from engine_harness import Outcome, engine_config, probs_of, real_drafter, request, run
from examples import is_full
from sampled_outputs import assert_follow
from transformers import AutoModelForCausalLM

from draft_service.eagle.config import EagleConfig
from draft_service.eagle.drafter import EagleDrafter
from outrider.heads import ShippedHead, head_made_for
from outrider.sampling import SamplingParams, VerificationMode
from target_service.config import TargetConfig
from target_service.core.sequence import SequenceRequest
from target_service.model.loading.loader import load_runner
from target_service.model.loading.store import resolve
from target_service.model.runner import ModelRunner
from target_service.sampling.distribution import LogitShaper
from target_service.text.prompt_encoder import PromptEncoder

MODEL = "smollm2-135m-instruct"
# Tokens a step over `QUESTIONS`, greedy, the target's own token included.
LEAST_ACCEPTED_LENGTH = 2.0
# Tokens of each answer that are compared, and of those whose steps are counted, which are compared too.
TOKENS, COUNTED = 8, 16
MOST_MEGABYTES = 32.0

FOUND = head_made_for(MODEL)
pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(FOUND is None, reason=f"no head for {MODEL} lies in draft_service/heads"),
]
QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Write a Python function that adds two numbers.",
    "Explain in two sentences why the sky is blue.",
    "Give me a short recipe for pancakes.",
)
SAMPLINGS = {
    "greedy": SamplingParams(ignore_eos=True),
    "coupled": SamplingParams(temperature=0.8, top_p=0.9, seed=11, ignore_eos=True),
}


@pytest.fixture(scope="module")
def head() -> ShippedHead:
    assert FOUND is not None
    return FOUND


@pytest.fixture(scope="module")
def runner() -> Iterator[ModelRunner]:
    yield load_runner(TargetConfig(model=MODEL, dtype="float32", kv_tokens=8192))


@pytest.fixture(scope="module")
def said_plainly(runner: ModelRunner) -> dict[str, list[tuple[int, ...]]]:
    """What is said without drafts, by the sampling's name."""
    lengths = {"greedy": COUNTED, "coupled": TOKENS}
    return {
        name: [one.token_ids for one in run(runner, asked(runner, sampling, lengths[name]), config=engine_config())]
        for name, sampling in SAMPLINGS.items()
    }


@pytest.fixture(autouse=True)
def exact_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that acceptance is the same on every machine, up to near-ties."""
    monkeypatch.setenv("OUTRIDER_EAGLE_DTYPE", "float32")


def asked(runner: ModelRunner, sampling: SamplingParams, max_tokens: int) -> list[SequenceRequest]:
    turns = [[{"role": "user", "content": question}] for question in QUESTIONS]
    prompts = [PromptEncoder(runner.tokenizer).chat(t) for t in turns]
    # Prompts are what takes the time of a few tokens: two say what four do where nothing is counted.
    prompts = prompts if max_tokens == COUNTED or is_full() else prompts[:2]
    return [request(prompt, max_tokens, sampling=sampling) for prompt in prompts]


def drafted(runner: ModelRunner, requests: list[SequenceRequest], drafter: str) -> list[Outcome]:
    # Every row that is drafted is verified, whatever it costs: what is judged is the head.
    with real_drafter(drafter, runner.vocabulary_size) as connect:
        return run(runner, requests, connect=connect, config=engine_config())


def test_its_record_is_of_these_files(head: ShippedHead, runner: ModelRunner) -> None:
    assert head.megabytes < MOST_MEGABYTES
    drafter = EagleDrafter(EagleConfig(dtype="float32"))
    # Refuses a head that does not fit the model.
    drafter.start()
    loaded, shape = drafter._head, drafter._head.config
    record = json.loads((head.folder / "training.json").read_text())
    assert record["finished"] and record["model"] == shape.target == head.target == MODEL
    assert shape.tokenizer_fingerprint == runner.tokenizer_fingerprint
    assert (shape.vocab_size, shape.target_hidden_size) == (runner.vocabulary_size, runner.hidden_size)
    learnt = [weights for name, weights in loaded.weights().items() if not name.startswith("embed_tokens")]
    assert record["parameters"] == sum(weights.numel() for weights in learnt)
    assert all(bool(weights.isfinite().all()) for weights in learnt)
    settings = record["settings"]
    assert settings["layers"] == shape.num_layers
    if not settings["init"] or settings["new_vocabulary"]:
        assert shape.draft_vocab_size == (settings["vocabulary"] or shape.vocab_size)
    assert record["acceptance"]["mean_length"] == head.accepted_length


@pytest.mark.parametrize(
    ("sampling", "drafter"),
    [
        ("coupled", "merged"),
        pytest.param("coupled", "eagle", marks=pytest.mark.full),
        pytest.param("greedy", "merged", marks=pytest.mark.full),
    ],
)
def test_output_is_plain_decoding(
    runner: ModelRunner, said_plainly: dict[str, list[tuple[int, ...]]], sampling: str, drafter: str
) -> None:
    outcomes = drafted(runner, asked(runner, SAMPLINGS[sampling], TOKENS), drafter)
    assert [one.token_ids for one in outcomes] == [said[:TOKENS] for said in said_plainly[sampling]]
    assert sum(one.finished.totals.accepted_tokens for one in outcomes) > 0


def test_drafts_are_accepted_and_output_is_plain_decoding(
    runner: ModelRunner, said_plainly: dict[str, list[tuple[int, ...]]]
) -> None:
    outcomes = drafted(runner, asked(runner, SAMPLINGS["greedy"], COUNTED), "eagle")
    assert [one.token_ids for one in outcomes] == said_plainly["greedy"]
    tokens = sum(len(one.token_ids) for one in outcomes)
    steps = sum(len(one.verdicts) for one in outcomes)
    assert tokens / steps >= LEAST_ACCEPTED_LENGTH


# Small models' rejection is in every run: test_eagle_distribution.py.
@pytest.mark.full
def test_rejection_keeps_the_targets_distribution(runner: ModelRunner) -> None:
    samples, length = 128, 4
    sampling = SamplingParams(temperature=1.5, top_k=3, ignore_eos=True)
    prompt = tuple(runner.tokenizer.encode("The dog sat on the"))
    wanted = [
        replace(request(prompt, length, sampling=sampling, mode=VerificationMode.REJECTION), seed=seed)
        for seed in range(samples)
    ]
    # Few rows, of two or three children each: rows are what such a model's steps cost.
    config = replace(engine_config(max_running=32), max_waiting=samples, max_draft_nodes=6)
    with real_drafter("eagle", runner.vocabulary_size) as connect:
        outcomes = run(runner, wanted, connect=connect, config=config)
    exact = distribution(prompt, sampling, length)
    assert_follow(outcomes, exact)
    assert sum(one.finished.totals.accepted_tokens for one in outcomes) > 0


@torch.inference_mode()
def distribution(prompt: tuple[int, ...], sampling: SamplingParams, length: int) -> dict[tuple[int, ...], float]:
    """The exact probability of every output of `length` tokens, by transformers' own attention."""
    shaper = LogitShaper(sampling, prompt, ())
    known: dict[tuple[int, ...], float] = {(): 1.0}
    model = AutoModelForCausalLM.from_pretrained(resolve(MODEL), dtype=torch.float32)
    for _ in range(length):
        paths = list(known)
        logits = model(torch.tensor([[*prompt, *path] for path in paths]), use_cache=False).logits[:, -1]
        grown = {}
        for path, of_path in zip(paths, logits, strict=True):
            for token, probability in enumerate(probs_of(sampling, shaper.shaped(of_path, path)).tolist()):
                if probability:
                    grown[(*path, token)] = known[path] * probability
        known = grown
    return known
