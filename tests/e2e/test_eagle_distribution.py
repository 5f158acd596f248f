"""With EAGLE or Medusa heads, sampled output has the target's distribution: counted over many seeds on seven tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
from conftest import make_tiny
from eagle_heads import make_head
from engine_harness import engine_config, make_runner, request, run
from medusa_heads import make_heads
from sampled_outputs import LENGTH, PROMPT, VOCABULARY, assert_follow, distribution, samples_drawn

from draft_service.drafters.base import Drafter
from draft_service.eagle.config import EagleConfig
from draft_service.eagle.drafter import EagleDrafter
from draft_service.in_process import InprocessLink
from draft_service.medusa.config import MedusaConfig
from draft_service.medusa.drafter import MedusaDrafter
from outrider.drafting.events import DraftEvents
from outrider.sampling import SamplingParams, VerificationMode
from outrider.wire.frames import DraftLink

pytestmark = pytest.mark.pairs

SAMPLING = SamplingParams(temperature=1.5, top_k=5, top_p=0.95, ignore_eos=True)


def eagle(topk: int) -> Drafter:
    head = make_head(
        vocab_size=VOCABULARY,
        draft_vocab_size=VOCABULARY,
        target_hidden_size=48,
        num_features=2,
        feature_layers=(0, 2),
    )
    return EagleDrafter(EagleConfig(topk=topk, num_steps=3, dtype="float32", projection="draft"), head)


def medusa(topk: int) -> Drafter:
    sizes = {"vocab_size": VOCABULARY, "draft_vocab_size": VOCABULARY, "target_hidden_size": 48}
    heads = make_heads(**sizes, num_heads=3, target_layers=2)
    return MedusaDrafter(MedusaConfig(topk=topk, dtype="float32"), heads)


@samples_drawn
@pytest.mark.parametrize("mode", [VerificationMode.REJECTION, VerificationMode.COUPLED], ids=lambda mode: mode.value)
@pytest.mark.parametrize("topk", [1, 3], ids=["chain", "tree"])
@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_outputs_have_the_targets_distribution(kind: str, mode: VerificationMode, topk: int, samples: int) -> None:
    teacher = make_tiny(vocab_size=VOCABULARY)

    def connect(events: DraftEvents) -> DraftLink:
        drafter = eagle(topk) if kind == "eagle" else medusa(topk)
        drafter.start()
        return InprocessLink(drafter, events)

    config = replace(engine_config(max_running=64, disable_above=64), max_waiting=samples)
    wanted = [replace(request(PROMPT, LENGTH, sampling=SAMPLING, mode=mode), seed=seed) for seed in range(samples)]
    runner = make_runner(make_tiny(vocab_size=VOCABULARY), kv_tokens=4096)
    outcomes = run(runner, wanted, connect=connect, config=config)
    assert_follow(outcomes, distribution(teacher, SAMPLING))
    assert sum(outcome.finished.totals.accepted_tokens for outcome in outcomes) > samples / 20
