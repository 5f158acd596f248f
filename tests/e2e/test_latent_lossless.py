"""Targets with latent attention say what transformers' own generate says, whatever drafts for them (fp32)."""

from __future__ import annotations

import random

import pytest
import torch
from engine_harness import engine_config, knowing_tree, make_runner, plain_each, random_tree, real_drafter, request, run
from kernel_worker import INTERPRETED, work
from latent_models import CHECKPOINTS, make_latent
from transformers import PreTrainedModel

from outrider.sampling import SamplingParams
from target_service.core.sequence import SequenceRequest

pytestmark = pytest.mark.values

VOCABULARY = 211
GREEDY = SamplingParams(ignore_eos=True)
SEEDED = SamplingParams(temperature=0.8, top_p=0.9, seed=99, ignore_eos=True)
MAX_TOKENS = 20


def prompts() -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(3, VOCABULARY) for _ in range(length)] for length in (1, 5, 17, 40)]


def requests(sampling: SamplingParams = GREEDY) -> list[SequenceRequest]:
    return [request(prompt, MAX_TOKENS, sampling=sampling) for prompt in prompts()]


@torch.inference_mode()
def generated(model: PreTrainedModel) -> list[tuple[int, ...]]:
    """What transformers says to each prompt, by its own cache and its own attention."""
    model.set_attn_implementation("eager")
    assert model.generation_config is not None
    model.generation_config.eos_token_id = None
    said = []
    for prompt in prompts():
        ids = torch.tensor([prompt])
        whole = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=MAX_TOKENS)
        said.append(tuple(whole[0, len(prompt) :].tolist()))
    return said


def knowing(said: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    return [(*prompt, *output) for prompt, output in zip(prompts(), said, strict=True)]


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_trees_change_nothing(name: str, page_size: int) -> None:
    """Trees that are often right: accepted paths are moved in the cache, and read by the steps after."""
    model = make_latent(name)
    said = generated(model)
    runner = make_runner(model, page_size)
    assert runner.latent
    drafts = knowing_tree(knowing(said), VOCABULARY, 24, right=0.8)
    config = engine_config(prefill_chunk=7)
    outcomes = run(runner, requests(), propose=drafts, config=config, stagger=1)
    assert [outcome.token_ids for outcome in outcomes] == said
    assert sum(outcome.finished.totals.accepted_tokens for outcome in outcomes) > 20


@pytest.mark.parametrize("name", ["v2, yarn, query latents, groups", "v3"])
def test_preempted_and_late_it_is_the_same(name: str) -> None:
    model = make_latent(name)
    said = generated(model)
    runner = make_runner(model, page_size=4, kv_tokens=120)
    outcomes = run(runner, [*requests(), *requests()], propose=random_tree(VOCABULARY, 9), late=1, stagger=2)
    assert [outcome.token_ids for outcome in outcomes] == [*said, *said]
    assert sum(outcome.finished.totals.preemptions for outcome in outcomes) > 0


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("name", ["v2, one query projection", "v3"])
def test_what_the_device_verifies_and_moves(name: str, sampling: SamplingParams) -> None:
    """Passes that a device would launch ahead, with the move of accepted vectors that a device makes."""
    model = make_latent(name)
    wanted = requests(sampling)
    said = plain_each(model, wanted)
    drafts = knowing_tree(knowing(said), VOCABULARY, 24, right=0.8)
    runner = make_runner(model)
    outcomes = run(runner, wanted, propose=drafts, on_device=True, can_launch_before_results=True, stagger=1)
    assert [outcome.token_ids for outcome in outcomes] == said
    assert sum(outcome.finished.totals.accepted_tokens for outcome in outcomes) > 20


def test_a_trie_drafts_for_latents() -> None:
    """Of what was said once, the second time is drafted."""
    model = make_latent("v3")
    said = generated(model)
    runner = make_runner(model)
    with real_drafter("trie", VOCABULARY) as connect:
        outcomes = run(runner, [*requests(), *requests()], connect=connect, stagger=24)
    assert [outcome.token_ids for outcome in outcomes] == [*said, *said]
    assert sum(outcome.finished.totals.accepted_tokens for outcome in outcomes) > 20


@pytest.mark.parametrize("name", ["v2, yarn, query latents, groups", "v3"])
def test_expanded_says_the_same(name: str) -> None:
    model = make_latent(name)
    said = generated(model)
    runner = make_runner(model, latent=False)
    assert not runner.latent
    drafts = knowing_tree(knowing(said), VOCABULARY, 24, right=0.8)
    assert [outcome.token_ids for outcome in run(runner, requests(), propose=drafts)] == said


def test_padded_steps_of_the_kernels_are_plain_ones() -> None:
    """As captured steps run on a GPU, but for the graph: prompts, trees and chains in one batch, and free rows."""
    pytest.importorskip("triton")
    found = work("../latent_steps_worker.py", **INTERPRETED)
    assert len(found) == 2
    # Logits of three steps, and the cache.
    assert all(len(errors) == 4 and max(errors) < 1e-5 for errors in found.values()), found
