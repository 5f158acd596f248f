"""One tenant takes all it can get of a real engine; another's request is served as if it were not there, and right."""

from __future__ import annotations

from dataclasses import replace

from engine_harness import engine_config, make_runner, plain, request
from transformers import PreTrainedModel

from target_service.core.sequence import SequenceFinished, StepVerdict
from target_service.engine.loop import EngineLoop
from target_service.execution.host_executor import HostSteps

TOKENS = 8


def steps_until_finished(loop: EngineLoop, sequence_id: int, most: int) -> tuple[int, tuple[int, ...]]:
    """How many steps one sequence took from now on, and what it said."""
    said: list[int] = []
    for step in range(1, most + 1):
        for event in loop.step() or ():
            if event.sequence_id == sequence_id:
                if isinstance(event, StepVerdict):
                    said += event.token_ids
                elif isinstance(event, SequenceFinished):
                    return step, tuple(said)
    raise AssertionError(f"not finished after {most} steps")


def test_long_requests_of_one_tenant_do_not_delay_anothers(tiny_model: PreTrainedModel) -> None:
    runner = make_runner(tiny_model, kv_tokens=4096)
    loop = EngineLoop(runner, engine_config(max_running=8, max_step_rows=64), steps=HostSteps(runner))
    for number in range(1, 61):
        loop.add(loop.make(number, request(range(1, 40), 100, tenant="loud")))
    for _ in range(20):
        loop.step()
    wanted = request(range(1, 30), TOKENS, tenant="quiet")
    loop.add(loop.make(99, wanted))
    steps, said = steps_until_finished(loop, 99, 100)
    # A step under way, the prompt's, and one for each token.
    assert steps <= TOKENS + 3
    assert said == plain(tiny_model, wanted)
    assert not any(live.sequence.totals.preemptions for live in loop.live.values())


def test_idle_verify_sequences_that_hold_every_page_do_not_delay_a_request(tiny_model: PreTrainedModel) -> None:
    runner = make_runner(tiny_model, kv_tokens=512)
    loop = EngineLoop(runner, engine_config(max_running=8, max_step_rows=64), steps=HostSteps(runner))
    for number in range(1, 41):
        # Each its own text, so that they share no page.
        prompt = [100 + number, *range(2, 34)]
        loop.add(loop.make(number, replace(request(prompt, 16, tenant="idler"), external=True)))
    for _ in range(80):
        loop.step()
    assert runner.cache.free_pages <= 3
    assert not loop.scheduler.waiting
    wanted = request(range(1, 60), TOKENS, tenant="quiet")
    loop.add(loop.make(99, wanted))
    steps, said = steps_until_finished(loop, 99, 100)
    assert steps <= TOKENS + 3
    assert said == plain(tiny_model, wanted)
    loop.scheduler.pages.check_integrity(live.sequence for live in loop.live.values())
