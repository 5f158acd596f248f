"""The engine over a real draft process that is killed, frozen and restarted while it decodes: same output, no error."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from draft_process import Service
from engine_harness import make_runner, plain_each, request, run
from scripted_drafter import Listener
from transformers import PreTrainedModel
from waits import HUNG_SECONDS, wait_until

from outrider.drafting import link_process
from outrider.drafting.events import DraftEvents
from outrider.drafting.link import GrpcDraftLink, LinkOptions
from outrider.drafting.link_process import LinkProcess
from outrider.sampling import SamplingParams
from outrider.wire.frames import DraftLink

Link = GrpcDraftLink | LinkProcess
VOCABULARY = 211
SAMPLINGS = {
    "greedy": SamplingParams(ignore_eos=True),
    "coupled": SamplingParams(temperature=0.8, top_p=0.9, seed=99, ignore_eos=True),
}
# A draft that is frozen for longer than this is given up and met anew.
OPTIONS = LinkOptions(min_backoff=0.01, max_backoff=0.1, connect_timeout=HUNG_SECONDS, answer_timeout=0.3)


@contextmanager
def trouble(service: Service, seed: int, link: Link) -> Iterator[None]:
    """Freeze and kill the draft process, and that of a link that has one, at random moments until the block ends."""
    over, coins = threading.Event(), random.Random(seed)

    def make() -> None:
        while not over.wait(coins.uniform(0.02, 0.2)):
            if isinstance(link, LinkProcess) and coins.random() < 0.1:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(link.pid, signal.SIGKILL)
            elif coins.random() < 0.3:
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
    heard.until(lambda it: it.infos)
    link.stop()


@pytest.mark.parametrize("kind", [GrpcDraftLink, LinkProcess])
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_output_is_plain_decoding_whatever_befalls_the_draft(
    tiny_model: PreTrainedModel,
    tmp_path: Path,
    sampling: SamplingParams,
    kind: type[GrpcDraftLink | LinkProcess],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # So that one that is killed is replaced while the texts are made.
    monkeypatch.setattr(link_process, "_PAUSE_SECONDS", 0.02)
    prompts = [[(7 * i + j) % 200 + 3 for j in range(length)] for i, length in enumerate((3, 17, 30))]
    wanted = [request(prompt, 60, sampling=sampling) for prompt in prompts]
    expected = plain_each(tiny_model, wanted)
    service = Service(tmp_path)
    drafted = fallbacks = 0
    # Until both have happened, however slow draft and engine are.
    while not (drafted and fallbacks):
        service.start()
        connected_once(service.address)
        with contextlib.ExitStack() as ending:

            def connect(events: DraftEvents, ending: contextlib.ExitStack = ending) -> DraftLink:
                link = kind(service.address, events, VOCABULARY, "", OPTIONS)
                ending.callback(link.stop)
                # A process takes a second to start, in which all would be over.
                wait_until(lambda: link._connected)
                ending.enter_context(trouble(service, 5, link))
                return link

            outcomes = run(make_runner(tiny_model), wanted, connect=connect, stagger=20)
        assert [outcome.token_ids for outcome in outcomes] == expected
        drafted += sum(outcome.finished.totals.drafted_tokens for outcome in outcomes)
        fallbacks += sum(outcome.finished.totals.fallback_steps for outcome in outcomes)
