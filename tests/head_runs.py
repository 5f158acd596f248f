"""Runs of a tiny target with a drafter that has a head of whatever kind, and what must hold of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from draft_process import Service
from engine_harness import Connect, Outcome, engine_config, make_runner, plain_each, run
from taught_heads import SAMPLINGS, VOCABULARY, prompts, request_of
from transformers import PreTrainedModel
from waits import HUNG_SECONDS

from draft_service import in_process
from draft_service.drafters.base import Drafter
from draft_service.in_process import InprocessLink
from outrider.drafting.events import DraftEvents
from outrider.drafting.link import GrpcDraftLink, LinkOptions
from outrider.wire.frames import DraftLink
from target_service.core.sequence import SequenceFinished, SequenceRequest, StepVerdict
from target_service.engine.loop import EngineLoop
from target_service.model.runner import ModelRunner

OPTIONS = LinkOptions(min_backoff=0.01, max_backoff=0.1, connect_timeout=HUNG_SECONDS, answer_timeout=HUNG_SECONDS)
Made = TypeVar("Made", bound=Drafter)


def drafting(make: Callable[[], Made], drafters: list[Made]) -> Connect:
    """How to connect to a drafter in this process; every one that was made so is added to `drafters`."""

    def connect(events: DraftEvents) -> DraftLink:
        drafters.append(make())
        drafters[-1].start()
        return InprocessLink(drafters[-1], events)

    return connect


def accepted_in(outcomes: Sequence[Outcome]) -> int:
    return sum(outcome.finished.totals.accepted_tokens for outcome in outcomes)


def check_chunks_and_preemption(
    teacher: PreTrainedModel, model: PreTrainedModel, connect: Connect, kv_tokens: int, prefill_chunk: int = 3
) -> None:
    """Outputs are plain decoding's, twice, when prompts come in small chunks; and where there are few pages, sequences
    are preempted and lose nothing by it."""
    wanted = [request_of(prompt, SAMPLINGS["greedy"]) for prompt in prompts()]
    said = plain_each(teacher, wanted)
    runner = make_runner(model, page_size=4, kv_tokens=kv_tokens)
    # Few pages are too few only where prompts that come twice share none.
    config = replace(engine_config(prefill_chunk=prefill_chunk), prefix_cache=kv_tokens == 2048)
    outcomes = run(runner, [*wanted, *wanted], connect=connect, config=config)
    assert [outcome.token_ids for outcome in outcomes] == [*said, *said]
    assert accepted_in(outcomes) > 80
    assert (sum(outcome.finished.totals.preemptions for outcome in outcomes) > 0) is (kv_tokens < 2048)


def check_ignorance(teacher: PreTrainedModel, model: PreTrainedModel, connect: Connect, sampling: str) -> None:
    """Outputs are plain decoding's with drafts of a head that knows nothing."""
    wanted = [request_of(prompt, SAMPLINGS[sampling]) for prompt in prompts()]
    outcomes = run(make_runner(model), wanted, connect=connect, stagger=2)
    assert [outcome.token_ids for outcome in outcomes] == plain_each(teacher, wanted)
    assert sum(outcome.finished.totals.drafted_tokens for outcome in outcomes) > 0


def check_merged_with_trie(teacher: PreTrainedModel, runner: ModelRunner, least: int) -> Mapping[str, float]:
    """Outputs are plain decoding's with the merged drafter of the environment, and more is accepted the second time,
    when the trie knows what was said the first time. Returns the drafter's figures."""
    wanted = [request_of(prompt, SAMPLINGS["greedy"]) for prompt in prompts()]
    said = plain_each(teacher, wanted)
    links: list[InprocessLink] = []

    def connect(events: DraftEvents) -> DraftLink:
        links.append(in_process.connect("merged")(events, runner.vocabulary_size, ""))
        return links[-1]

    outcomes = run(runner, [*wanted, *wanted], connect=connect, stagger=4)
    assert [outcome.token_ids for outcome in outcomes] == [*said, *said]
    assert least < accepted_in(outcomes[:4]) < accepted_in(outcomes[4:])
    stats = links[0]._drafter.stats()
    links[0].stop()
    return stats


@dataclass
class WireRun:
    """A loop that is stepped by hand, so that a test decides when its draft process comes and goes."""

    loop: EngineLoop
    service: Service
    arguments: tuple[str, ...] = ()
    said: dict[int, list[int]] = field(default_factory=dict)
    going: set[int] = field(default_factory=set)
    # Drafted tokens that were kept, and tokens that were said, since the last `begin`.
    accepted: int = 0
    tokens: int = 0

    def begin(self) -> None:
        """Start the draft process and wait until it is connected."""
        self.service.start(*self.arguments)
        self._listen_until(lambda: self.loop.drafting.connected, "no draft service came up")
        self.accepted = self.tokens = 0

    def lose(self) -> None:
        """Kill the draft process and wait until it is missed."""
        self.service.end()
        self._listen_until(lambda: not self.loop.drafting.connected, "nobody misses the draft service")

    def _listen_until(self, over: Callable[[], bool], problem: str) -> None:
        deadline = time.monotonic() + HUNG_SECONDS
        while not over():
            assert time.monotonic() < deadline, problem
            time.sleep(0.01)
            self.loop.drafting.listen()

    def add(self, requests: list[SequenceRequest]) -> None:
        for number, wanted in enumerate(requests, start=1):
            self.said[number] = []
            self.going.add(number)
            self.loop.add(self.loop.make(number, wanted))

    def steps(self, count: int = 1000) -> None:
        while self.going and count:
            count -= 1
            for event in self.loop.step() or ():
                if isinstance(event, StepVerdict):
                    self.said[event.sequence_id] += event.token_ids
                    self.accepted += event.drafted_tokens
                    self.tokens += len(event.token_ids)
                else:
                    assert isinstance(event, SequenceFinished)
                    self.going.discard(event.sequence_id)


def wire_loop(runner: ModelRunner, service: Service, **drafting: object) -> tuple[EngineLoop, GrpcDraftLink]:
    """A loop that waits long for its drafts, since the tests' machine may be busy and what counts is what drafts say;
    and its link to the draft process, to be stopped."""
    config = replace(engine_config(prefill_chunk=16, wait_seconds=5.0), **drafting)  # type: ignore[arg-type]
    loop = EngineLoop(runner, config)
    link = GrpcDraftLink(service.address, loop.drafting, VOCABULARY, "", OPTIONS)
    loop.drafting.attach(link)
    return loop, link
