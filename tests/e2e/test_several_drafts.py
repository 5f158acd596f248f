"""Two real drafts for an engine, killed in turn: the other takes over, and no output changes."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from draft_process import Service
from engine_harness import make_runner, plain_each, request, run
from scripted_drafter import Listener, opening
from transformers import PreTrainedModel
from waits import HUNG_SECONDS, wait_until

from outrider.drafting.events import DraftEvents
from outrider.drafting.link import LinkOptions, connect_draft
from outrider.wire.frames import DraftLink, StoppableLink

VOCABULARY = 211
OPTIONS = LinkOptions(min_backoff=0.01, max_backoff=0.1, connect_timeout=HUNG_SECONDS, answer_timeout=HUNG_SECONDS)


@pytest.fixture
def services(tmp_path: Path) -> Iterator[list[Service]]:
    found = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        found.append(Service(tmp_path / name))
    for service in found:
        service.start()
    for service in found:
        connected_once(service)
    yield found
    for service in found:
        service.end()


def connected_once(service: Service) -> None:
    """Wait until it answers."""
    heard = Listener()
    link = connect_draft(service.address, heard, VOCABULARY, "")
    heard.until(lambda it: it.infos)
    link.stop()


def both(services: list[Service]) -> str:
    return ",".join(service.address for service in services)


def test_the_other_takes_over(services: list[Service]) -> None:
    heard = Listener()
    link = connect_draft(both(services), heard, VOCABULARY, "", OPTIONS)
    try:
        heard.until(lambda it: it.infos)
        # Until both are there, all go to the first.
        wait_until(lambda: all(member.offered for member in link._members))
        # A tenant's sequences go to one draft. That all of these go to one has a chance of 2 ** -39.
        for number in range(40):
            link.open(opening(number, tenant=str(number), vocabulary_size=VOCABULARY))
        heard.until(lambda it: all(it.answered(number, 0) for number in range(40)))
        services[0].end(signal.SIGKILL)
        heard.until(lambda it: it.lost)
        lost = list(heard.lost)
        assert 0 < len(lost) < 40 and not heard.losses
        heard.growths.clear()
        for number in lost:
            link.open(opening(number, tenant=str(number), vocabulary_size=VOCABULARY))
        heard.until(lambda it: all(it.answered(number, 0) for number in lost))
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
            connected_once(service)
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
    wanted = [request(prompt, 60, tenant=str(number)) for number, prompt in enumerate(prompts * 4)]
    expected = plain_each(tiny_model, wanted)
    links: list[StoppableLink] = []

    def connect(events: DraftEvents) -> DraftLink:
        link = connect_draft(both(services), events, VOCABULARY, "", OPTIONS)
        links.append(link)
        # Before the first is killed, or all might be over when they are met.
        wait_until(lambda: any(member.offered for member in link._members))
        return link

    drafted = 0
    with killed_in_turn(services) as kills:
        # Until both have happened, however slow either is.
        while not (drafted and kills[0]):
            outcomes = run(make_runner(tiny_model), wanted, connect=connect, stagger=20)
            links.pop().stop()
            assert [outcome.token_ids for outcome in outcomes] == expected
            drafted += sum(outcome.finished.totals.drafted_tokens for outcome in outcomes)
