"""Two real drafts for an engine, killed in turn: the other takes over within a second, and no output changes."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from draft_process import Service
from engine_harness import make_runner, plain, request, run
from scripted_drafter import Listener, opening
from transformers import PreTrainedModel

from outrider.drafting.events import DraftEvents
from outrider.drafting.link import LinkOptions, connect_draft
from outrider.wire.frames import DraftLink, StoppableLink

VOCABULARY = 211
OPTIONS = LinkOptions(min_backoff=0.01, max_backoff=0.1, connect_timeout=0.5, answer_timeout=0.5)
TAKEN_OVER_SECONDS = 1.0


@pytest.fixture
def services(tmp_path: Path) -> Iterator[list[Service]]:
    found = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        found.append(Service(tmp_path / name))
    for service in found:
        service.start()
    for service in found:
        heard = Listener()
        link = connect_draft(service.address, heard, VOCABULARY, "")
        heard.until(lambda it: it.infos)
        link.stop()
    yield found
    for service in found:
        service.end()


def both(services: list[Service]) -> str:
    return ",".join(service.address for service in services)


def test_the_other_takes_over_within_a_second(services: list[Service]) -> None:
    heard = Listener()
    link = connect_draft(both(services), heard, VOCABULARY, "", OPTIONS)
    try:
        heard.until(lambda it: it.infos)
        # Until both are there, all go to the first.
        time.sleep(0.3)
        for number in range(12):
            link.open(opening(number, vocabulary_size=VOCABULARY))
        heard.until(lambda it: all(it.answered(number, 0) for number in range(12)))
        begun = time.monotonic()
        services[0].end(signal.SIGKILL)
        heard.until(lambda it: it.lost, seconds=TAKEN_OVER_SECONDS)
        lost = list(heard.lost)
        assert 0 < len(lost) < 12 and not heard.losses
        heard.growths.clear()
        for number in lost:
            link.open(opening(number, vocabulary_size=VOCABULARY))
        heard.until(lambda it: all(it.answered(number, 0) for number in lost), seconds=TAKEN_OVER_SECONDS)
        assert time.monotonic() - begun < TAKEN_OVER_SECONDS
    finally:
        link.stop()


@contextmanager
def killed_in_turn(services: list[Service]) -> Iterator[list[int]]:
    """One of them is always there. Counts kills."""
    over, coins, kills = threading.Event(), random.Random(3), [0]

    def kill() -> None:
        turn = 0
        while not over.wait(coins.uniform(0.05, 0.2)):
            service = services[turn % 2]
            service.end(signal.SIGKILL)
            kills[0] += 1
            service.start()
            # It takes a second or two to be there again.
            over.wait(2.5)
            turn += 1

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield kills
    finally:
        over.set()
        thread.join()


def test_output_is_plain_decoding_while_they_are_killed(tiny_model: PreTrainedModel, services: list[Service]) -> None:
    prompts = [[(7 * i + j) % 200 + 3 for j in range(length)] for i, length in enumerate((3, 17, 30, 9))]
    wanted = [request(prompt, 60) for prompt in prompts * 4]
    expected = [plain(tiny_model, each) for each in wanted]
    links: list[StoppableLink] = []

    def connect(events: DraftEvents) -> DraftLink:
        links.append(connect_draft(both(services), events, VOCABULARY, "", OPTIONS))
        return links[-1]

    with killed_in_turn(services) as kills:
        outcomes = run(make_runner(tiny_model), wanted, connect=connect, stagger=20)
    links[0].stop()
    assert [outcome.token_ids for outcome in outcomes] == expected
    assert kills[0] > 0 and sum(outcome.finished.totals.drafted_tokens for outcome in outcomes) > 0
