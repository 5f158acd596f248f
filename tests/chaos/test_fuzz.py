"""Spoilt frames on every call of both services crash nothing, are never UNKNOWN or INTERNAL, and leave nothing open."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chaos.doors import doors
from chaos.fuzz import draw_calls, fuzz_doors, run
from chaos.mutations import Mutator
from chaos.sound_frames import DRAFT, TARGET, calls
from google.protobuf.message import DecodeError

from outrider.v1 import draft_pb2, target_pb2


def test_every_call_of_both_services_is_tried() -> None:
    named = {(call.service, call.method) for call in calls()}
    for module, name in ((target_pb2, "TargetService"), (draft_pb2, "DraftService")):
        service = module.DESCRIPTOR.services_by_name[name]
        assert {(service.full_name, method.name) for method in service.methods} <= named
    assert {TARGET, DRAFT} < {call.service for call in calls()}


def test_frames_are_spoilt_in_both_ways_and_by_their_seed() -> None:
    assert next(draw_calls(3)) == next(draw_calls(3))
    verify = next(call for call in calls() if call.method == "Verify")
    mutator, sound = Mutator(1), {message.SerializeToString() for message in verify.later}
    readable = spoilt = 0
    for _ in range(1000):
        payload = mutator.payload(verify.later)
        try:
            target_pb2.VerifyRequest.FromString(payload)
            readable += 1
            spoilt += payload not in sound
        except DecodeError:
            pass
    # Most are still messages, or the services would only ever see their parsers' refusals.
    assert spoilt > 400 and readable < 1000


async def test_sound_frames_are_answered() -> None:
    """What is spoilt would go far."""
    async with doors() as open_doors:
        for call in calls():
            if call.endless or call.method == "UpdateWeights":
                continue
            payloads = [
                message.SerializeToString() for message in (call.first if call.reads_stream else call.first[:1])
            ]
            context = await open_doors.by_service[call.service].call(call, payloads)
            # A corpus that is not there yet is the one that cannot be deleted.
            assert context.code in ((0, 5) if call.method == "DeleteCorpus" else (0, 1)), call.method
            assert context.reads == len(payloads)


async def test_spoilt_frames_are_refused_and_nothing_else() -> None:
    async with doors() as open_doors:
        told = await fuzz_doors(open_doors, seed=11, frames=5_000)
    assert told["frames"] >= 5_000


@pytest.mark.chaos
@pytest.mark.timeout(2 * 3600)
def test_a_million_spoilt_frames(tmp_path: Path, keep: Callable[[str, dict[str, Any]], None]) -> None:
    """Most straight to the servicers, some over gRPC."""
    told = asyncio.run(run(1, 1_000_000, 100_000, tmp_path))
    assert told["frames"] >= 1_000_000
    keep("fuzz", told)
