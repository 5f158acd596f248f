"""A million spoilt frames: `python -m chaos.fuzz --frames 1000000 --wire 100000`.

Most go straight to the servicers (`doors`), a share over real gRPC to services in processes of their own. No frame may
crash anything, be answered UNKNOWN or INTERNAL, or leave anything open; and afterwards each service answers rightly.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc
from chaos.doors import Door, Doors, doors
from chaos.mutations import Mutator
from chaos.report import say, write
from chaos.sound_frames import DRAFT, HEALTH, TARGET, Call, calls
from chaos.taught import taught
from chaos.world import World, free_ports, world_of
from google.rpc import code_pb2
from waits import HUNG_SECONDS

from outrider.sampling import SamplingParams

# Frames of a stream at most, and calls beside each other.
_LONGEST_STREAM, _BESIDE = 24, 16
# No caller of ours may see these, whatever it sent.
FORBIDDEN = ("UNKNOWN", "INTERNAL", "DATA_LOSS")
# What gRPC's own client makes of a write to a call that has ended; the services' figures say with what it had.
_BROKEN_WRITE = "Internal error from Core"
# Far more than any takes; and what those get that do not end by themselves.
_CALL_SECONDS, _ENDLESS_SECONDS = 120.0, 0.02


def draw_calls(seed: int) -> Iterator[tuple[Call, list[bytes]]]:
    """Calls with spoilt requests, without end; streams more often, for they take more."""
    coins, mutator = random.Random(seed), Mutator(seed)
    every = calls()
    weights = [6 if call.method in ("Verify", "Propose") else 3 if call.method == "Generate" else 1 for call in every]
    while True:
        call = coins.choices(every, weights)[0]
        payloads = [mutator.payload(call.first)]
        if call.reads_stream:
            count = coins.randint(0, _LONGEST_STREAM)
            # One that begins wrongly ends at once; most begin soundly, so that the rest is looked at.
            if coins.random() < 0.8:
                payloads = [message.SerializeToString() for message in call.first]
            payloads += [mutator.payload(call.later or call.first) for _ in range(count)]
        yield call, payloads


def _shown(payloads: Sequence[bytes]) -> str:
    return " ".join(payload.hex() for payload in payloads)[:2000]


async def fuzz_doors(open_doors: Doors, seed: int, frames: int) -> dict[str, Any]:
    """Spoilt frames straight to the servicers, until they have read so many. Raises `AssertionError`, with the seed, at
    the first that goes wrong."""
    every = enumerate(draw_calls(seed))
    by_service = open_doors.by_service
    seen: list[Door] = list({id(door): door for door in by_service.values()}.values())

    async def work() -> None:
        while sum(door.frames.total() for door in seen) < frames:
            number, (call, payloads) = next(every)
            seconds = _ENDLESS_SECONDS if call.endless else _CALL_SECONDS
            context = await asyncio.wait_for(by_service[call.service].call(call, payloads), seconds)
            assert call.endless or not context.late, (
                f"seed {seed}, call {number} ({call.method}) hangs: {_shown(payloads)}"
            )
            name = code_pb2.Code.Name(context.code or 0)
            assert name not in FORBIDDEN and not open_doors.bugs, (
                f"seed {seed}, call {number} ({call.method}): {name}, {open_doors.bugs}, {_shown(payloads)}"
            )

    async with asyncio.TaskGroup() as group:
        for _ in range(_BESIDE):
            group.create_task(work())
    async with asyncio.timeout(HUNG_SECONDS):
        while open_doors.engine.open_sequences:
            await asyncio.sleep(0.01)
    return {
        "frames": sum((door.frames for door in seen), Counter()).total(),
        "frames_by_call": dict(sum((door.frames for door in seen), Counter())),
        "statuses": dict(sum((door.statuses for door in seen), Counter())),
    }


async def fuzz_wire(world: World, seed: int, frames: int, metrics_ports: Sequence[int]) -> dict[str, Any]:
    """Spoilt frames over gRPC to the services of a world, which must be the same processes afterwards. Frames are those
    that were sent: some of a stream that a bad one ends are never read."""
    statuses: Counter[str] = Counter()
    sent: Counter[str] = Counter()
    starts = [supervisor.child.starts for supervisor in world.supervisors]
    every = draw_calls(seed)
    async with (
        grpc.aio.insecure_channel(f"unix:{world.folder}/target.sock") as target,
        grpc.aio.insecure_channel(f"unix:{world.folder}/draft.sock") as draft,
    ):
        channels = {TARGET: target, DRAFT: draft, HEALTH: target}

        async def work() -> None:
            while sent.total() < frames:
                call, payloads = next(every)
                code = await _call(channels[call.service], call, payloads)
                allowed = code not in FORBIDDEN and (code != "DEADLINE_EXCEEDED" or call.endless)
                assert allowed, f"{call.method}: {code}, {_shown(payloads)}"
                statuses[code] += 1
                sent[f"{call.service.rpartition('.')[2]}.{call.method}"] += len(payloads)

        async with asyncio.TaskGroup() as group:
            for _ in range(_BESIDE):
                group.create_task(work())
    assert starts == [supervisor.child.starts for supervisor in world.supervisors], "a service has died"
    await _still_answers(world)
    told = await asyncio.gather(*(asyncio.to_thread(_calls_ended, port) for port in metrics_ports))
    by_services = sum(told, Counter())
    wrong = {name: count for name, count in by_services.items() if name in FORBIDDEN}
    assert not wrong, f"by the services' own figures: {wrong}"
    return {
        "frames": sent.total(),
        "frames_by_call": dict(sent),
        "statuses_read": dict(statuses),
        "statuses_by_the_services": dict(by_services),
    }


def _calls_ended(port: int) -> Counter[str]:
    """How many calls a service has ended with each status."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=HUNG_SECONDS) as response:
        text = response.read().decode()
    found: Counter[str] = Counter()
    for code, count in re.findall(r'^outrider_rpc_calls_total\{[^}]*code="(\w+)"[^}]*\} ([0-9.e+]+)', text, re.M):
        found[code] += int(float(count))
    assert found, text[:1000]
    return found


async def _call(channel: grpc.aio.Channel, call: Call, payloads: Sequence[bytes]) -> str:
    """One call with these bytes; the name of its status. A caller that has read enough hangs up."""
    running = channel.stream_stream(call.path)(timeout=_ENDLESS_SECONDS if call.endless else _CALL_SECONDS)
    try:
        for payload in payloads:
            await running.write(payload)
        await running.done_writing()
    except (grpc.aio.AioRpcError, grpc.aio.InternalError, asyncio.InvalidStateError):
        # It has ended before, which its status tells.
        pass
    try:
        for _ in range(_LONGEST_STREAM):
            if await running.read() is grpc.aio.EOF:
                break
        else:
            running.cancel()
        if await running.details() == _BROKEN_WRITE:
            return "(ended before its last frame)"
        return (await running.code()).name
    except grpc.aio.AioRpcError as error:
        return "(ended before its last frame)" if error.details() == _BROKEN_WRITE else error.code().name
    except asyncio.CancelledError:
        if running.cancelled():
            return "CANCELLED"
        raise


async def _still_answers(world: World) -> None:
    """Rightly, and with a draft."""
    await world.whole(60.0)
    async with world.client() as client:
        for prompt, token_ids in enumerate(world.taught.prompts):
            sampling = SamplingParams(max_tokens=40, ignore_eos=True)
            result = await client.generate(token_ids=token_ids, sampling=sampling, timeout=60).result()
            assert list(result.token_ids) == world.taught.answer("greedy", prompt, 40)
    for log in ("target.log", "draft.log"):
        written = (world.folder / log).read_text()
        assert "Traceback" not in written and "bug " not in written, written[-4000:]


async def run(seed: int, frames: int, wire: int, folder: Path) -> dict[str, Any]:
    """Both ways, and what came of them."""
    begun = time.monotonic()
    async with doors() as open_doors:
        straight = await fuzz_doors(open_doors, seed, frames)
    straight["seconds"] = round(time.monotonic() - begun)
    begun = time.monotonic()
    over_wire: dict[str, Any] = {"frames": 0}
    if wire:
        ports = free_ports(2)
        flags = ("--tenant-requests-per-second", "0", "--tenant-burst", "0", "--weights-without-token")
        scraped = [("--metrics-listen", f"127.0.0.1:{port}") for port in ports]
        async with world_of(
            taught(folder), folder / "fuzzed", "trie", target_flags=(*flags, *scraped[0]), draft_flags=scraped[1]
        ) as world:
            over_wire = await fuzz_wire(world, seed + 1, wire, ports)
    over_wire["seconds"] = round(time.monotonic() - begun)
    return {
        "seed": seed,
        "frames": straight["frames"] + over_wire["frames"],
        "straight_to_the_servicers": straight,
        "over_grpc": over_wire,
        "crashes": 0,
        "unknown_or_internal": 0,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m chaos.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--frames", type=int, default=1_000_000, help="read by the servicers")
    parser.add_argument("--wire", type=int, default=100_000, help="sent over gRPC besides")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--folder", type=Path, help="where to keep models and logs; a passing one without it")
    chosen = parser.parse_args(arguments)
    with TemporaryDirectory() as passing:
        folder = chosen.folder or Path(passing)
        told = asyncio.run(run(chosen.seed, chosen.frames, chosen.wire, folder))
    write(chosen.json, "chaos.fuzz", told)
    say(json.dumps(told, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
