"""The engine over a real draft process that is killed, frozen and restarted while it decodes: same output, no error."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from draft_process import Service
from engine_harness import make_runner, plain, request, run
from scripted_drafter import Listener
from transformers import PreTrainedModel

from outrider.drafting.link import GrpcDraftLink, LinkOptions
from outrider.sampling import SamplingParams
from outrider.wire.frames import DraftEvents, DraftLink

VOCABULARY = 211
SAMPLINGS = {
    "greedy": SamplingParams(ignore_eos=True),
    "coupled": SamplingParams(temperature=0.8, top_p=0.9, seed=99, ignore_eos=True),
}
# A draft that is frozen for longer than this is given up and met anew.
OPTIONS = LinkOptions(min_backoff=0.01, max_backoff=0.1, connect_timeout=0.5, answer_timeout=0.3)


@contextmanager
def trouble(service: Service, seed: int) -> Iterator[None]:
    """Freeze and kill the draft process at random moments until the block ends."""
    over, coins = threading.Event(), random.Random(seed)

    def make() -> None:
        while not over.wait(coins.uniform(0.02, 0.2)):
            if coins.random() < 0.3:
                service.end(signal.SIGKILL)
                over.wait(coins.uniform(0.0, 0.1))
                service.start()
            else:
                service.send(signal.SIGSTOP)
                over.wait(coins.choice([0.03, 0.1, 0.6]))
                service.send(signal.SIGCONT)

    thread = threading.Thread(target=make)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        service.end()


def connected_once(address: str) -> None:
    """Wait until the service answers."""
    heard = Listener()
    link = GrpcDraftLink(address, heard, VOCABULARY, "")
    heard.until(lambda it: it.infos, seconds=30)
    link.stop()


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_output_is_plain_decoding_whatever_befalls_the_draft(
    tiny_model: PreTrainedModel, tmp_path: Path, sampling: SamplingParams
) -> None:
    prompts = [[(7 * i + j) % 200 + 3 for j in range(length)] for i, length in enumerate((3, 17, 30))]
    wanted = [request(prompt, 60, sampling=sampling) for prompt in prompts]
    expected = [plain(tiny_model, each) for each in wanted]
    service = Service(tmp_path)
    service.start()
    connected_once(service.address)
    links: list[GrpcDraftLink] = []

    def connect(events: DraftEvents) -> DraftLink:
        links.append(GrpcDraftLink(service.address, events, VOCABULARY, "", OPTIONS))
        return links[-1]

    with trouble(service, seed=5):
        outcomes = run(make_runner(tiny_model), wanted, connect=connect, stagger=20)
    links[0].stop()
    assert [outcome.token_ids for outcome in outcomes] == expected
    assert sum(outcome.finished.totals.drafted_tokens for outcome in outcomes) > 0
    assert sum(outcome.finished.totals.fallback_steps for outcome in outcomes) > 0
