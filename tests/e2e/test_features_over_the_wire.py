"""An EAGLE head in a draft process of its own: features over gRPC, a restart in the middle, and what it costs."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from draft_process import Service
from engine_harness import make_runner, plain, plain_each
from head_runs import WireRun, wire_loop
from taught_heads import HIDDEN, LAYERS, SAMPLINGS, prompts, request_of, taught_head
from transformers import PreTrainedModel
from waits import HUNG_SECONDS

from draft_service.eagle.checkpoint import save_head
from outrider.sampling import SamplingParams
from target_service.model.head_projection import read_draft_head

TOKENS = 40
HEAD_SETTINGS = ("--dtype", "float32", "--num-steps", "4", "--gumbel-sharpness", "2.0")


@pytest.fixture(scope="module")
def folder(teacher: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    head = taught_head(teacher, "eagle-3.1", max_tokens=TOKENS)
    return save_head(head, tmp_path_factory.mktemp("head"), embedding=True)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("projection", ["target", "draft"])
def test_a_restart_in_the_middle_costs_some_acceptance_and_nothing_else(
    teacher: PreTrainedModel,
    tiny_model: PreTrainedModel,
    folder: Path,
    service: Service,
    sampling: SamplingParams,
    projection: str,
) -> None:
    runner = make_runner(tiny_model)
    runner.draft_head = read_draft_head(str(folder), LAYERS, HIDDEN)
    loop, link = wire_loop(runner, service, feature_window=64)
    wanted = [request_of(prompt, sampling, TOKENS) for prompt in prompts()]
    arguments = ("--drafter", "eagle", "--head", str(folder), "--projection", projection, *HEAD_SETTINGS)
    going = WireRun(loop, service, arguments)
    try:
        going.begin()
        going.add(wanted)
        going.steps(6)
        before = going.accepted / going.tokens
        going.lose()
        going.steps(4)
        assert going.going
        going.begin()
        sent = loop.features.sent_vectors
        # Every sequence is opened anew, with what was kept of it.
        assert sent and loop.features.kept_bytes
        going.steps()
        after = going.accepted / going.tokens
    finally:
        link.stop()
    assert [tuple(said) for said in going.said.values()] == plain_each(teacher, wanted)
    # With the window whole, drafts are as good as before but for the first step of each sequence.
    assert before > 0.4 and after > 0.3
    width = HIDDEN if projection == "target" else 2 * HIDDEN
    assert loop.features.sent_bytes == 2 * width * loop.features.sent_vectors


def test_a_head_that_the_target_does_not_have_is_not_asked(
    tiny_model: PreTrainedModel,
    teacher: PreTrainedModel,
    folder: Path,
    service: Service,
    caplog: pytest.LogCaptureFixture,
) -> None:
    loop, link = wire_loop(make_runner(tiny_model), service)
    service.start("--drafter", "eagle", "--head", str(folder), *HEAD_SETTINGS)
    try:
        deadline = time.monotonic() + HUNG_SECONDS
        while "--draft-head" not in caplog.text:
            assert time.monotonic() < deadline
            time.sleep(0.01)
            loop.drafting.listen()
        going = WireRun(loop, service)
        going.add([request_of(prompts()[1], SAMPLINGS["greedy"], 8)])
        going.steps()
    finally:
        link.stop()
    assert not loop.drafting.connected and going.accepted == 0
    assert tuple(going.said[1]) == plain(teacher, request_of(prompts()[1], SAMPLINGS["greedy"], 8))
