"""Pages that drafted rows may take: none that known tokens or an arrival need."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import pytest
import torch
from engine_harness import engine_config, make_runner, request
from transformers import PreTrainedModel

from outrider.sampling import SamplingParams, VerificationMode
from target_service.config import TargetConfig
from target_service.core.kv_cache import KVCache
from target_service.core.scheduler import Scheduler
from target_service.core.sequence import Sequence, SequenceRequest, SequenceState, SequenceTotals
from target_service.engine.loop import EngineLoop
from target_service.execution.device_executor import DeviceSteps

PAGE = 4


def scheduler(pages: int, running: int = 8, chunk: int = 8) -> Scheduler:
    cache = KVCache(pages, PAGE, [(1, 4, 4)], torch.float32, torch.device("cpu"))
    return Scheduler(TargetConfig(max_running=running, max_step_rows=64, prefill_chunk=chunk), cache)


def sequence(number: int, prompt: int) -> Sequence:
    tokens = tuple(range(1, prompt + 1))
    wanted = SequenceRequest(tokens, SamplingParams(), VerificationMode.GREEDY, 0, 16)
    return Sequence(number, wanted, list(tokens), SequenceTotals(prompt_tokens=prompt))


def read(scheduled: Scheduler) -> None:
    """Run a step: what reaches its root makes a token."""
    for chunk in scheduled.schedule().chunks:
        one, reaches = chunk.sequence, chunk.reaches_root
        one.kv_length += chunk.count
        if reaches:
            one.token_ids.append(1)
            one.state = SequenceState.RUNNING


def drafts(scheduled: Scheduler, one: Sequence, rows: int) -> bool:
    return scheduled.pages.reserve_for_drafts([(one, one.kv_length + 1 + rows)], scheduled.running)


def test_drafted_rows_take_free_pages_and_give_them_back() -> None:
    scheduled = scheduler(pages=8)
    one = sequence(1, prompt=PAGE)
    scheduled.add(one)
    read(scheduled)
    assert drafts(scheduled, one, 10) and len(one.pages) == 4
    # A pass under way may write ten keys.
    scheduled.pages.trim(one, 10)
    assert len(one.pages) == 3
    scheduled.pages.trim(one)
    assert len(one.pages) == 2
    assert not drafts(scheduled, one, 100) and len(one.pages) == 2


def test_pages_that_are_needed_to_read_a_prompt_are_not_for_drafts() -> None:
    scheduled = scheduler(pages=8, chunk=PAGE)
    one, long = sequence(1, prompt=PAGE), sequence(2, prompt=4 * PAGE)
    scheduled.add(one)
    read(scheduled)
    scheduled.add(long)
    read(scheduled)
    assert (len(one.pages), len(long.pages)) == (2, 1)
    # Five are free, and three of them are for the rest of the prompt.
    assert not drafts(scheduled, one, 3 * PAGE) and len(one.pages) == 2
    assert drafts(scheduled, one, 2 * PAGE) and len(one.pages) == 4


def test_drafts_give_way_to_an_arrival_that_they_keep_out() -> None:
    scheduled = scheduler(pages=8)
    one, arrival = sequence(1, prompt=PAGE), sequence(2, prompt=4 * PAGE)
    scheduled.add(one)
    read(scheduled)
    assert drafts(scheduled, one, 4 * PAGE - 1)
    scheduled.add(arrival)
    scheduled.schedule()
    assert scheduled.running == [one]
    assert not drafts(scheduled, one, 1), "although its pages would do"
    scheduled.pages.trim(one)
    scheduled.schedule()
    assert scheduled.running == [one, arrival]
    assert drafts(scheduled, one, 1)


def test_drafts_do_not_give_way_to_who_has_to_wait_anyway() -> None:
    for running, prompt in ((8, 7 * PAGE), (1, PAGE)):
        scheduled = scheduler(pages=8, running=running)
        one = sequence(1, prompt=PAGE)
        scheduled.add(one)
        read(scheduled)
        assert drafts(scheduled, one, 4 * PAGE - 1)
        # It needs more pages than there are beside the other's known tokens, or there is no place.
        scheduled.add(sequence(2, prompt))
        scheduled.schedule()
        assert scheduled.running == [one]
        assert drafts(scheduled, one, 1)


@dataclass
class MissingStates:
    """Of a drafter that reads hidden states, of which none are kept."""

    worth: float

    def most_without(self, _sequence: Sequence) -> int:
        return 0

    def most_read_again(self, _sequence: Sequence) -> float:
        return self.worth

    def of_page(self, _sequence: Sequence, _start: int, _stop: int) -> None:
        return None

    def resume(self, _sequence: Sequence, _start: int, _pages: object) -> bool:
        raise AssertionError("there are none")


@pytest.mark.parametrize(("worth", "begins"), [(inf, 0), (3 * PAGE, 0), (3 * PAGE - 1, 3 * PAGE)])
def test_a_prompt_is_read_again_for_its_states_where_the_draft_is_worth_it(worth: float, begins: int) -> None:
    scheduled = scheduler(pages=16, chunk=8 * PAGE)
    scheduled.pages.states = MissingStates(worth)
    one, alike = sequence(1, prompt=3 * PAGE + 2), sequence(2, prompt=3 * PAGE + 2)
    scheduled.add(one)
    read(scheduled)
    scheduled.pages.publish(one, one.kv_length)
    scheduled.add(alike)
    scheduled.schedule()
    assert alike.kv_length == begins


def test_an_arrival_begins_about_as_soon_as_without_drafted_rows(tiny_model: PreTrainedModel) -> None:
    """With room for the known tokens of all, where the rows that the device drafts for others could fill the cache."""

    def steps_until_its_first_token(*, drafted: bool) -> int:
        runner = make_runner(tiny_model, page_size=16, kv_tokens=16 * 40)
        if drafted:
            runner.enable_device_row_selection(16, 0)
        steps = DeviceSteps(runner, max_sequences=16, max_rows=256, backend="torch")
        loop = EngineLoop(runner, engine_config(), steps=steps)
        greedy = SamplingParams(ignore_eos=True)
        for number in range(1, 4):
            loop.add(loop.make(number, request([5 + number] * 12, 100, sampling=greedy)))
        for _ in range(10):
            loop.step()
        arrival = loop.make(9, request([7] * 200, 4, sampling=greedy))
        loop.add(arrival)
        count = 0
        while not arrival.sequence.totals.first_token_ns:
            loop.step()
            count += 1
        assert not any(live.sequence.totals.preemptions for live in loop.live.values())
        return count

    # A pass that is under way keeps its rows, and one more may be launched behind it.
    assert steps_until_its_first_token(drafted=True) <= steps_until_its_first_token(drafted=False) + 2
