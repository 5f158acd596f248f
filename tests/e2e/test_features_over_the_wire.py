"""An EAGLE head in a draft process of its own: features over gRPC, a restart in the middle, and what it costs."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from conftest import make_tiny
from draft_process import Service
from engine_harness import engine_config, make_runner, plain
from taught_heads import HIDDEN, LAYERS, SAMPLINGS, VOCABULARY, prompts, request_of, taught_head
from transformers import PreTrainedModel

from draft_service.eagle.checkpoint import save_head
from outrider.drafting.link import GrpcDraftLink, LinkOptions
from outrider.sampling import SamplingParams
from target_service.core.sequence import SequenceFinished, SequenceRequest, Verdict
from target_service.engine.loop import EngineLoop
from target_service.model.head_projection import read_draft_head

TOKENS = 40
OPTIONS = LinkOptions(min_backoff=0.01, max_backoff=0.1, connect_timeout=0.5)
HEAD_SETTINGS = ("--dtype", "float32", "--num-steps", "4", "--race-sharpness", "2.0")


@pytest.fixture(scope="module")
def teacher() -> PreTrainedModel:
    model = make_tiny()
    model.set_attn_implementation("eager")
    return model


@pytest.fixture(scope="module")
def folder(teacher: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    head = taught_head(teacher, "eagle-3.1", max_tokens=TOKENS)
    return save_head(head, tmp_path_factory.mktemp("head"), embedding=True)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    service = Service(tmp_path)
    yield service
    if service.process is not None:
        service.end(signal.SIGKILL)


@dataclass
class Run:
    """A loop that is stepped by hand, so that a test decides when the draft comes and goes."""

    loop: EngineLoop
    service: Service
    arguments: tuple[str, ...]
    said: dict[int, list[int]] = field(default_factory=dict)
    going: set[int] = field(default_factory=set)
    # Drafted tokens that were kept, and tokens that were said, since the last `begin`.
    accepted: int = 0
    tokens: int = 0

    def begin(self) -> None:
        """Start the draft process and wait until it is connected."""
        self.service.start("--drafter", "eagle", *self.arguments)
        deadline = time.monotonic() + 60
        while not self.loop.drafting.connected:
            assert time.monotonic() < deadline, "no draft service came up"
            time.sleep(0.01)
            self.loop.drafting.listen()
        self.accepted = self.tokens = 0

    def lose(self) -> None:
        """Kill the draft process and wait until it is missed."""
        self.service.end(signal.SIGKILL)
        deadline = time.monotonic() + 60
        while self.loop.drafting.connected:
            assert time.monotonic() < deadline, "nobody misses the draft service"
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
                if isinstance(event, Verdict):
                    self.said[event.sequence_id] += event.token_ids
                    self.accepted += event.drafted_tokens
                    self.tokens += len(event.token_ids)
                else:
                    assert isinstance(event, SequenceFinished)
                    self.going.discard(event.sequence_id)


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
    base = engine_config(prefill_chunk=16)
    # The tests' machine may be busy, and what counts here is what drafts say, not when.
    config = replace(base, drafting=replace(base.drafting, wait_seconds=5.0, feature_window=64))
    loop = EngineLoop(runner, config)
    link = GrpcDraftLink(service.address, loop.drafting, VOCABULARY, "", OPTIONS)
    loop.drafting.attach(link)
    wanted = [request_of(prompt, sampling, TOKENS) for prompt in prompts()]
    going = Run(loop, service, ("--head", str(folder), "--projection", projection, *HEAD_SETTINGS))
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
    assert [tuple(said) for said in going.said.values()] == [plain(teacher, one) for one in wanted]
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
    loop = EngineLoop(make_runner(tiny_model), engine_config())
    link = GrpcDraftLink(service.address, loop.drafting, VOCABULARY, "", OPTIONS)
    loop.drafting.attach(link)
    service.start("--drafter", "eagle", "--head", str(folder), *HEAD_SETTINGS)
    try:
        deadline = time.monotonic() + 60
        while "--draft-head" not in caplog.text:
            assert time.monotonic() < deadline
            time.sleep(0.01)
            loop.drafting.listen()
        going = Run(loop, service, ())
        going.add([request_of(prompts()[1], SAMPLINGS["greedy"], 8)])
        going.steps()
    finally:
        link.stop()
    assert not loop.drafting.connected and going.accepted == 0
    assert tuple(going.said[1]) == plain(teacher, request_of(prompts()[1], SAMPLINGS["greedy"], 8))
