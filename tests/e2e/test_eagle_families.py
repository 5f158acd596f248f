"""EAGLE heads draft for targets with windows, sinks, experts and states, whose outputs stay plain decoding's (fp32)."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from conftest import make_tiny
from engine_harness import Connect, make_runner, plain_each, run
from head_runs import accepted_in, drafting
from recurrent_models import RECURRENT
from taught_heads import HIDDEN, SAMPLINGS, prompts, request_of, taught_head
from transformers import PreTrainedModel
from usual_models import usual
from windowed_models import WINDOWED

from draft_service.eagle.checkpoint import save_head
from draft_service.eagle.config import EagleConfig
from draft_service.eagle.drafter import EagleDrafter
from draft_service.eagle.head import EagleHead
from target_service.model.head_projection import read_draft_head

pytestmark = pytest.mark.values

FAMILIES = {
    "gpt_oss": WINDOWED["gpt_oss"],
    "gemma4": WINDOWED["gemma4"],
    "qwen3_moe": WINDOWED["qwen3_moe, windows"],
    "nemotron_h": RECURRENT["nemotron_h"],
}


@cache
def target_of(name: str) -> PreTrainedModel:
    model_type, settings = FAMILIES[name]
    return make_tiny(model_type, **settings)


def made(head: EagleHead, topk: int) -> Connect:
    config = EagleConfig(num_steps=4, dtype="float32", gumbel_sharpness=2.0, topk=topk)
    return drafting(lambda: EagleDrafter(config, head), [])


# With windows and experts is gpt_oss too.
@pytest.mark.parametrize("name", usual(FAMILIES, FAMILIES.keys() - {"qwen3_moe"}))
def test_output_is_plain_decoding(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Greedy, which the head was taught, and seeded."""
    model, count = target_of(name), target_of(name).config.num_hidden_layers
    kind = "without fc" if name == "gpt_oss" else "eagle-3.1"
    head = taught_head(model, kind, steps=60, samplings={"greedy": SAMPLINGS["greedy"]})
    folder = save_head(head, tmp_path_factory.mktemp("head"), embedding=True)
    # The layers of a head without fc depend on its target, which a folder tells.
    head.config = replace(head.config, feature_layers=head.config.layers_of(count))
    accepted: dict[str, int] = {}
    for way, sampling in SAMPLINGS.items():
        wanted = [request_of(prompt, sampling) for prompt in prompts()]
        runner = make_runner(model)
        runner.draft_head = read_draft_head(str(folder), count, HIDDEN)
        assert (runner.draft_head.projection is None) is (kind == "without fc")
        outcomes = run(runner, wanted, connect=made(head, topk=4), stagger=1)
        assert [outcome.token_ids for outcome in outcomes] == plain_each(model, wanted)
        accepted[way] = accepted_in(outcomes)
    # 68 to 72 of 96 tokens.
    assert accepted["greedy"] > 40
