"""What may befall the services while they answer, and how each fault is done to them."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import psutil
from chaos.world import World, spread


@dataclass(frozen=True)
class Fault:
    """One fault: `kind` of `FAULTS`, `after` so many seconds of the run, for `seconds`."""

    kind: str
    after: float
    seconds: float
    # What the kind makes of it: a delay, a rate, a jump.
    amount: float


async def _kill(world: World, child_index: int, number: signal.Signals, fault: Fault) -> None:
    supervisor = world.supervisors[child_index]
    supervisor.pause = fault.seconds
    supervisor.child.send(number)
    # Until somebody has noticed: a second kill of the same process would do nothing.
    await asyncio.sleep(fault.seconds + 0.1)


async def _freeze(world: World, child_index: int, fault: Fault) -> None:
    child = (world.target, world.draft)[child_index]
    child.send(signal.SIGSTOP)
    try:
        await asyncio.sleep(fault.seconds)
    finally:
        child.send(signal.SIGCONT)


async def _slow(world: World, fault: Fault) -> None:
    """The draft computes for a millisecond in every few."""
    end = asyncio.get_running_loop().time() + fault.seconds
    try:
        while asyncio.get_running_loop().time() < end:
            world.draft.send(signal.SIGSTOP)
            await asyncio.sleep(0.02)
            world.draft.send(signal.SIGCONT)
            await asyncio.sleep(0.002)
    finally:
        world.draft.send(signal.SIGCONT)


async def _kill_engine(world: World, fault: Fault) -> None:
    """The engine's process where it has one; the target and its engine in one blow elsewhere."""
    engines = world.target.children() if world.target.alive else []
    world.supervisors[0].pause = fault.seconds
    for engine in engines:
        with contextlib.suppress(psutil.NoSuchProcess):
            engine.kill()
    if not engines:
        world.target.send(signal.SIGABRT)
    await asyncio.sleep(fault.seconds + 0.1)


async def _lie(world: World, manner: str, fault: Fault) -> None:
    world.lie(manner)
    await asyncio.sleep(fault.seconds)
    world.tell_the_truth()


async def _network(world: World, where: str, what: str, fault: Fault) -> None:
    proxy = world.draft_proxy if where == "draft" else world.target_proxy
    if what in proxy.every():
        proxy.every()[what]()
        return
    if what == "stall":
        proxy.stall()
    elif what == "delay":
        proxy.delay = fault.amount
    else:
        proxy.rate = 20_000.0
    await asyncio.sleep(fault.seconds)
    proxy.heal()


async def _disk_full(world: World, fault: Fault) -> None:
    """For longer than it takes until the next snapshot."""
    world.draft.fill_disk(True)
    await asyncio.sleep(1.0 + fault.seconds)
    world.draft.fill_disk(False)


async def _clock(world: World, fault: Fault) -> None:
    """Of either service: the wall clock to and fro by up to days, the monotonic one ahead by minutes."""
    coins = random.Random(fault.amount)
    clocks = coins.choice([world.target, world.draft]).clocks
    clocks.jump(coins.choice([-1, 1]) * spread(coins, 1.0, 1e6))
    if coins.random() < 0.5:
        clocks.leap(spread(coins, 0.1, 100.0))
    await asyncio.sleep(0)


Doing = Callable[[World, Fault], Awaitable[None]]
NETWORK = ("cut", "reset", "half-open", "stall", "delay", "throttle")


def _on_network(where: str, what: str) -> Doing:
    return lambda world, fault: _network(world, where, what, fault)


FAULTS: dict[str, Doing] = {
    "draft killed": lambda world, fault: _kill(world, 1, signal.SIGKILL, fault),
    "draft restarted": lambda world, fault: _kill(world, 1, signal.SIGTERM, fault),
    "draft stopped": lambda world, fault: _freeze(world, 1, fault),
    "draft slow": _slow,
    "draft flooding": lambda world, fault: _lie(world, "flooding", fault),
    "draft lying": lambda world, fault: _lie(world, "lying", fault),
    "draft garbled": lambda world, fault: _lie(world, "garbled", fault),
    **{f"network to draft: {what}": _on_network("draft", what) for what in NETWORK},
    **{f"network to target: {what}": _on_network("target", what) for what in NETWORK},
    "target killed": lambda world, fault: _kill(world, 0, signal.SIGKILL, fault),
    "target restarted": lambda world, fault: _kill(world, 0, signal.SIGTERM, fault),
    "target stopped": lambda world, fault: _freeze(world, 0, fault),
    "engine killed": _kill_engine,
    "disk full": _disk_full,
    "clock jump": _clock,
}
# Those that end a service, the target and the draft; whatever else ends one is a defect of ours.
ENDING = (
    frozenset(("target killed", "target restarted", "engine killed")),
    frozenset(("draft killed", "draft restarted")),
)
# These need a trie that is kept.
OF_TRIES = ("disk full",)


def draw(coins: random.Random, drafter: str) -> Fault:
    """A fault of any kind that this drafter can have, early in a run of about a second."""
    kinds = [kind for kind in FAULTS if drafter != "head" or kind not in OF_TRIES]
    kind = coins.choice(kinds)
    return Fault(kind, round(coins.uniform(0.0, 0.5), 3), round(spread(coins, 0.02, 0.6), 3), spread(coins, 0.002, 0.1))
