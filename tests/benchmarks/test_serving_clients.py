"""Client processes against a scripted target: who sent what and when, and what becomes of failures."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from benchmarks.serving.clients import Clients, ServiceLost, ServingRequest
from outrider.v1 import target_pb2, target_pb2_grpc, tree_pb2

SECONDS = 0.05


class ScriptedTarget(target_pb2_grpc.TargetServiceServicer):
    """Answers every request with its prompt, one token a message; the prompt (0,) fails."""

    def __init__(self) -> None:
        self.requests: list[tuple[target_pb2.GenerateRequest, str]] = []
        self.most = 0
        self._active = 0
        self._lock = threading.Lock()

    def Generate(
        self, request: target_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[target_pb2.GenerateResponse]:
        tenant = dict(context.invocation_metadata())["outrider-tenant"]
        with self._lock:
            self.requests.append((request, str(tenant)))
            self._active += 1
            self.most = max(self.most, self._active)
        time.sleep(SECONDS)
        with self._lock:
            self._active -= 1
        tokens = list(request.tokens.token_ids)
        if tokens == [0]:
            context.abort(grpc.StatusCode.INTERNAL, "scripted")
        for token in tokens:
            yield target_pb2.GenerateResponse(chunk=target_pb2.GenerateChunk(token_ids=[token]))
        finished = target_pb2.GenerateFinished()
        finished.speculation.steps = len(tokens)
        if request.speculation.mode == tree_pb2.VERIFICATION_MODE_TYPICAL:
            finished.usage.lossy_tokens = 1
        yield target_pb2.GenerateResponse(finished=finished)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ScriptedTarget, str]]:
    address = f"unix:{tmp_path_factory.mktemp('clients')}/target"
    target, server = ScriptedTarget(), grpc.server(ThreadPoolExecutor(8))
    target_pb2_grpc.add_TargetServiceServicer_to_server(target, server)
    server.add_insecure_port(address)
    server.start()
    yield target, address
    server.stop(None).wait()


@pytest.fixture(scope="module")
def clients(served: tuple[ScriptedTarget, str]) -> Iterator[Clients]:
    with Clients(served[1], 2) as started:
        yield started


@pytest.fixture
def target(served: tuple[ScriptedTarget, str]) -> ScriptedTarget:
    served[0].requests.clear()
    served[0].most = 0
    return served[0]


def test_a_mode_of_verification_is_asked_for_by_name(target: ScriptedTarget, clients: Clients) -> None:
    requests = [ServingRequest((1, 2), 2, "one"), ServingRequest((1, 2), 2, "one", verification="typical")]
    assert sorted(reply.lossy_tokens for reply in clients.streams(requests, 1)) == [0, 1]
    modes = [request.speculation.mode for request, _ in target.requests]
    assert modes == [tree_pb2.VERIFICATION_MODE_UNSPECIFIED, tree_pb2.VERIFICATION_MODE_TYPICAL]


def test_slots_ask_one_request_after_the_other(target: ScriptedTarget, clients: Clients) -> None:
    requests = [ServingRequest((number, 9), 4, f"tenant-{number % 2}", 0.5, 70 + number) for number in range(1, 8)]
    replies = clients.streams(requests, 3)
    assert sorted(reply.slot for reply in replies) == [0, 0, 0, 1, 1, 2, 2]
    assert all(reply.steps == 2 and reply.answer.counts == [1, 1] for reply in replies)
    assert target.most == 3
    sent = sorted((request.tokens.token_ids[0], request.sampling.seed, tenant) for request, tenant in target.requests)
    assert sent == [(one.prompt[0], one.seed, one.tenant) for one in requests]
    assert not any(request.HasField("speculation") for request, _ in target.requests)
    by_slot = {slot: [one.answer for one in replies if one.slot == slot] for slot in range(3)}
    for answers in by_slot.values():
        ordered = sorted(answers, key=lambda answer: answer.begin)
        assert all(sooner.end <= later.begin for sooner, later in itertools.pairwise(ordered))


def test_no_request_begins_after_the_time_is_up(target: ScriptedTarget, clients: Clients) -> None:
    replies = clients.streams([ServingRequest((1,), 1, "one")] * 200, 2, seconds=3 * SECONDS)
    # Of each slot one at every twentieth of a second; a busy machine takes longer.
    assert len(replies) == len(target.requests) <= 8


def test_a_closed_loop_shares_its_requests_among_slots(target: ScriptedTarget, clients: Clients) -> None:
    shares = clients.closed([((number,), 3) for number in range(1, 8)], 3, speculate=False, tenant="loop")
    assert [(share.slots, len(share.answers)) for share in shares] == [(2, 4), (1, 3)]
    assert target.most == 3
    assert {(request.speculation.enabled, tenant) for request, tenant in target.requests} == {(False, "loop")}
    assert all(request.sampling.max_tokens == 3 and request.sampling.ignore_eos for request, _ in target.requests)


def test_a_wave_has_all_requests_in_flight(target: ScriptedTarget, clients: Clients) -> None:
    seconds, answers = clients.wave([(1,), (2,), (3,), (4,), (5,)], 3, speculate=True, tenant="wave")
    assert len(answers) == target.most == 5
    assert seconds >= SECONDS


@pytest.mark.parametrize(
    ("prompt", "limit", "message"), [((0,), None, "INTERNAL: scripted"), ((1,), SECONDS / 5, "DEADLINE_EXCEEDED")]
)
def test_a_failed_request_ends_the_run(
    served: tuple[ScriptedTarget, str], prompt: tuple[int, ...], limit: float | None, message: str
) -> None:
    with Clients(served[1], 1, limit) as clients, pytest.raises(ServiceLost, match=message):
        clients.streams([ServingRequest(prompt, 1, "one")], 1)
