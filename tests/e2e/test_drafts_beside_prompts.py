"""Sequences are drafted for in steps that read others' prompts, and say what they would have said alone."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from engine_harness import ScriptedDraft, engine_config, knowing_tree, make_runner, plain_each, request
from transformers import PreTrainedModel

from outrider.sampling import SamplingParams
from target_service.core.schedule import PromptRows
from target_service.core.sequence import SequenceFinished, SequenceRequest, StepStats, StepVerdict
from target_service.engine.loop import EngineLoop
from target_service.execution.device_executor import DeviceSteps

pytestmark = pytest.mark.values

RUNNING = 4


class Watching:
    """Keeps what every step was. See `EngineObserver`."""

    def __init__(self) -> None:
        self.steps: list[StepStats] = []

    def on_step(self, stats: StepStats) -> None:
        self.steps.append(stats)

    def on_finished(self, *_: object) -> None:
        """Nothing is to be noted."""

    def on_speculation(self, active: bool) -> None:
        """Nothing is to be noted."""


def asked(temperature: float) -> list[SequenceRequest]:
    """Prompts of 10 to 90 tokens, which are read in chunks of 16."""
    dice = random.Random(3)
    return [
        request(
            [dice.randrange(90) for _ in range(length)],
            20 + 3 * place,
            sampling=SamplingParams(temperature=temperature, seed=place, ignore_eos=True),
        )
        for place, length in enumerate((10, 90, 40, 17, 64, 33, 80, 12))
    ]


def run(
    model: PreTrainedModel,
    wanted: Sequence[SequenceRequest],
    truths: Sequence[tuple[int, ...]],
    passes: int,
    arrives: dict[int, int] | None = None,
) -> tuple[list[tuple[int, ...]], list[StepStats], int]:
    """What each said, every step, and how many drafted tokens they accepted. `arrives`: the step before which each
    arrives; all before the first without."""
    runner, watching = make_runner(model), Watching()
    runner.enable_device_row_selection(RUNNING, 7)
    config = engine_config(max_running=RUNNING, prefill_chunk=16)
    steps = DeviceSteps(runner, max_sequences=RUNNING, max_rows=256)
    loop = EngineLoop(runner, config, steps=steps, observer=watching)
    loop.speculation.updates.multi_step.passes = passes
    whole = [(*one.token_ids, *truth) for one, truth in zip(wanted, truths, strict=True)]
    loop.drafting.attach(ScriptedDraft(loop.drafting, knowing_tree(whole, runner.vocabulary_size, 12, right=0.8)))
    loop.drafting.listen()
    said: list[list[int]] = [[] for _ in wanted]
    accepted = 0
    arriving = sorted(range(len(wanted)), key=lambda number: (arrives or {}).get(number, 0))
    for step in itertools.count():
        while arriving and (arrives or {}).get(arriving[0], 0) <= step:
            number = arriving.pop(0)
            loop.add(loop.make(number, wanted[number]))
        if not loop.live and not arriving:
            break
        for event in loop.step() or ():
            if isinstance(event, StepVerdict):
                said[event.sequence_id] += event.token_ids
            elif isinstance(event, SequenceFinished):
                accepted += event.totals.accepted_tokens
        loop.scheduler.pages.check_integrity(live.sequence for live in loop.live.values())
    return [tuple(one) for one in said], watching.steps, accepted


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("passes", [1, 4])
def test_rows_are_drafted_beside_prompts(tiny_model: PreTrainedModel, temperature: float, passes: int) -> None:
    wanted = asked(temperature)
    truths = plain_each(tiny_model, wanted)
    said, steps, accepted = run(tiny_model, wanted, truths, passes)
    assert said == truths
    beside = [one for one in steps if one.prefill_rows and one.chosen_rows]
    reading = [one for one in steps if one.prefill_rows]
    # The first prompts are read together, with nobody to draft for.
    assert len(beside) > 0.5 * len(reading) > 3
    gained = sum(one.chosen_accepted for one in beside)
    assert gained > len(beside)
    # Nothing is counted twice or lost: each committed token is a drafted one or a pass's own.
    assert sum(one.accepted_tokens for one in steps) == accepted
    assert sum(one.committed_tokens for one in steps) == sum(map(len, truths))
    for one in beside:
        assert one.committed_tokens <= one.committed_sequences + one.accepted_tokens
        assert one.chosen_rows + one.prefill_rows + one.committed_sequences <= 256


@pytest.mark.parametrize("seed", range(3))
def test_prompts_arrive_in_the_middle_and_are_read_in_pieces_of_any_width(
    tiny_model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """As pieces follow what streams may wait, and sizes that passes are captured for."""
    dice, widths, within = random.Random(seed), set[int](), PromptRows.choose

    def any_width(self: PromptRows, due: Sequence[int], decoding: int, rows: int) -> int:
        rows = within(self, due, decoding, rows)
        widths.add(width := dice.randint(1, max(1, min(rows, 40))))
        return width

    monkeypatch.setattr(PromptRows, "choose", any_width)
    wanted = asked(0.0)
    truths = plain_each(tiny_model, wanted)
    arrives = {number: dice.randrange(60) for number in range(len(wanted))}
    said, steps, _ = run(tiny_model, wanted, truths, 1 + seed, arrives)
    assert said == truths
    # Others had drafts accepted in passes that read.
    assert len(widths) > 5 and sum(one.chosen_accepted for one in steps if one.prefill_rows) > 3
