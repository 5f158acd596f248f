"""Faults of a real draft process: whatever happens to it, the link says so, never raises, and finds it again."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from draft_process import Service
from scripted_drafter import VOCABULARY, Listener, opening, step
from waits import HUNG_SECONDS
from warm_python import shared_python

from benchmarks.drafters.random_trees import RANDOM
from outrider.drafting.link import GrpcDraftLink, LinkOptions

# A draft is lost when its process is, and not because the machine is busy.
OPTIONS = LinkOptions(min_backoff=0.02, max_backoff=0.2, connect_timeout=HUNG_SECONDS, answer_timeout=HUNG_SECONDS)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    service = Service(tmp_path)
    yield service
    if service.alive:
        service.end()


@pytest.fixture
def listener() -> Listener:
    return Listener()


@pytest.fixture
def link(service: Service, listener: Listener) -> Iterator[GrpcDraftLink]:
    link = GrpcDraftLink(service.address, listener, VOCABULARY, "", OPTIONS)
    yield link
    link.stop()


def draft_a_step(link: GrpcDraftLink, listener: Listener, base: int) -> None:
    """Open a sequence at step `base` and advance it once, as an engine does whenever it is (re)connected."""
    opened_for = 0

    def answered(it: Listener) -> bool:
        nonlocal opened_for
        if it.connected and opened_for < len(it.infos):
            opened_for = len(it.infos)
            link.open(opening(1, step=base))
            link.advance([step(base + 1, 20)])
        return it.answered(1, base + 1)

    listener.until(answered)


def test_killed_and_started_again(service: Service, link: GrpcDraftLink, listener: Listener) -> None:
    service.start()
    listener.until(lambda it: it.connected)
    draft_a_step(link, listener, 0)
    service.end(signal.SIGKILL)
    listener.until(lambda it: not it.connected)
    link.advance([step(2, 5)])
    link.open(opening(2))
    link.close([1, 2])
    service.start()
    listener.until(lambda it: len(it.infos) >= 2)
    draft_a_step(link, listener, 10)


def test_frozen_in_the_middle_of_a_conversation(service: Service, listener: Listener) -> None:
    link = GrpcDraftLink(service.address, listener, VOCABULARY, "", replace(OPTIONS, answer_timeout=1.0))
    service.start()
    listener.until(lambda it: it.connected)
    draft_a_step(link, listener, 0)
    service.send(signal.SIGSTOP)
    # The engine's calls return while the draft does nothing.
    for number in range(2, 200):
        link.advance([step(number, 20)])
    listener.until(lambda it: not it.connected)
    service.send(signal.SIGCONT)
    listener.until(lambda it: len(it.infos) >= 2)
    draft_a_step(link, listener, 500)
    link.stop()


def test_frozen_while_nothing_is_asked(service: Service, listener: Listener) -> None:
    """Keepalive notices what no step would."""
    options = replace(OPTIONS, keepalive=1.0, ping_timeout=0.5)
    link = GrpcDraftLink(service.address, listener, VOCABULARY, "", options)
    service.start()
    listener.until(lambda it: it.connected)
    draft_a_step(link, listener, 0)
    service.send(signal.SIGSTOP)
    listener.until(lambda it: not it.connected)
    service.send(signal.SIGCONT)
    listener.until(lambda it: len(it.infos) >= 2)
    link.stop()


def test_started_again_with_another_vocabulary(service: Service, link: GrpcDraftLink, listener: Listener) -> None:
    service.start("--vocabulary-size", str(VOCABULARY))
    listener.until(lambda it: it.connected)
    service.end()
    service.start("--vocabulary-size", str(VOCABULARY + 1))
    listener.until(lambda it: any("vocabulary" in loss for loss in it.losses))
    assert len(listener.infos) == 1
    service.end()
    service.start("--vocabulary-size", str(VOCABULARY))
    listener.until(lambda it: len(it.infos) >= 2)
    draft_a_step(link, listener, 3)


def test_told_to_stop_it_drains_and_ends_well(service: Service, link: GrpcDraftLink, listener: Listener) -> None:
    service.start("--drain-seconds", "20")
    listener.until(lambda it: it.connected)
    draft_a_step(link, listener, 0)
    service.send(signal.SIGTERM)
    listener.until(lambda it: link.open(opening(2)) or it.failures)
    assert listener.failures[0].reason == "DRAINING"
    # Sequences that were open go on until the target ends them.
    link.advance([step(2, 21)])
    listener.until(lambda it: it.answered(1, 2))
    link.close([1])
    assert service.wait() == 0


def test_something_else_on_the_socket(tmp_path: Path, service: Service, listener: Listener) -> None:
    """Bytes that are not even HTTP/2."""
    path = tmp_path / "draft.sock"
    with socket.socket(socket.AF_UNIX) as impostor:
        impostor.bind(str(path))
        impostor.listen()
        link = GrpcDraftLink(service.address, listener, VOCABULARY, "", OPTIONS)
        peer, _ = impostor.accept()
        with peer:
            peer.sendall(b"HTTP/1.1 200 OK\r\n\r\nhello")
            listener.until(lambda it: it.losses)
            link.open(opening(1))
    path.unlink()
    service.start()
    listener.until(lambda it: it.connected)
    draft_a_step(link, listener, 0)
    link.stop()


def test_settings_come_from_flags_environment_and_file(tmp_path: Path, service: Service, listener: Listener) -> None:
    path = tmp_path / "outrider.toml"
    path.write_text(f'[draft]\ndrafter = "{RANDOM}"\nvocabulary_size = {VOCABULARY}\n[drafter]\nrandom_nodes = 3\n')
    environment = {"OUTRIDER_CONFIG": str(path), "OUTRIDER_DRAFTER_RANDOM_DEPTH": "2"}
    service.start("--random-nodes", "5", environment=environment)
    link = GrpcDraftLink(service.address, listener, VOCABULARY, "", OPTIONS)
    listener.until(lambda it: it.infos)
    link.stop()
    info = listener.infos[0]
    assert (info.vocabulary_size, info.limits.max_nodes, info.limits.max_depth) == (VOCABULARY, 5, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--drafter", "nothing"], "no drafter is called 'nothing'"),
        (["--random-nodes", "many"], "--random-nodes: 'many' is not a whole number"),
        (["--listen", "nowhere"], "cannot listen: 'nowhere' is not HOST:PORT"),
        (["--auth-tokens", "/nonexistent"], "/nonexistent"),
        (["--colour", "red"], "unrecognized arguments: --colour red"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_settings_that_cannot_work_end_the_process_with_a_word(arguments: list[str], message: str) -> None:
    python = str(shared_python("services") / "python")
    command = [python, "-m", "draft_service", "--drafter", RANDOM, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HUNG_SECONDS)
    assert done.returncode == 2 and message in done.stderr
    assert "Traceback" not in done.stderr


def test_the_slow_poller_of_grpc_is_off_in_the_process() -> None:
    code = (
        "import json, os, sys\n"
        "sys.argv = ['draft', '--drafter', 'nothing']\n"
        "from draft_service.__main__ import main\n"
        "before = 'grpc' in sys.modules\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print(json.dumps([before, os.environ['GRPC_EXPERIMENTS']]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported_before, experiments = json.loads(done.stdout)
    assert not imported_before and "-event_engine_client" in experiments
