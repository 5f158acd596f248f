"""What one tenant's attack does to another's requests: `python -m chaos.attacks`.

Quiet times and attacks follow each other, so that whatever else the machine does meets both. Told is the 99th
percentile of the other's requests under attack, against that of its quiet times.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from chaos.actors import ATTACKS, PROMPT, TOKENS, TOKENS_ASKED
from chaos.report import say, write
from chaos.taught import Taught, taught
from chaos.world import World, free_ports, world_of
from conftest import make_tiny
from engine_harness import plain, request

from outrider.drafting.several import weight

HOSTILE_DRAFT = "3 a draft that floods"
# It says that it is the real one, and the victim is at home with it.
BESIDE_ANOTHER = "3 a draft that floods, beside another"
BY_DRAFTS = (HOSTILE_DRAFT, BESIDE_ANOTHER)
# Of one tenant's p99 while another attacks, against its quiet value.
BAR = 2.0


class Actor:
    """One of `chaos.actors` in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    @asynccontextmanager
    async def started(cls, role: str, *addresses: str) -> AsyncIterator[Actor]:
        words = (sys.executable, "-m", "chaos.actors", role, *addresses)
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *words, stdin=pipe, stdout=pipe, limit=1 << 28, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        )
        try:
            yield cls(process)
        finally:
            process.kill()
            await process.wait()

    async def go(self) -> None:
        await self._say("go")

    async def rest(self) -> list[dict[str, Any]]:
        """What it found since it was let go."""
        await self._say("rest")
        assert self._process.stdout is not None
        line = await asyncio.wait_for(self._process.stdout.readline(), 120)
        answer = json.loads(line)
        assert not answer["failed"], answer["failed"]
        found: list[dict[str, Any]] = answer["found"]
        return found

    async def _say(self, command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(command.encode() + b"\n")
        await self._process.stdin.drain()


@dataclass
class Times:
    """Seconds of each request, and what went wrong with some."""

    seconds: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def add(self, found: Sequence[dict[str, Any]], expected: Sequence[int]) -> None:
        for each in found:
            if each["error"]:
                self.errors.append(each["error"])
                continue
            assert each["said"] == list(expected), f"{each['said']}, not {expected}"
            self.seconds.append(each["seconds"])

    def figures(self) -> dict[str, Any]:
        ordered = sorted(self.seconds)
        assert ordered, f"no request was answered: {sorted(set(self.errors))[:3]}"
        return {
            "requests": len(ordered),
            "median_ms": round(1000 * statistics.median(ordered), 2),
            "p99_ms": round(1000 * ordered[int(0.99 * (len(ordered) - 1))], 2),
            "most_ms": round(1000 * ordered[-1], 2),
            "errors": len(self.errors),
        }


async def _one(world: World, name: str, addresses: Sequence[str], rounds: int, seconds: float) -> dict[str, Any]:
    """Quiet, attack, quiet, attack, ... A draft that attacks does not draft: times without one are told beside it,
    where it is the only one."""
    expected = plain(make_tiny(), request(PROMPT, TOKENS_ASKED))
    quiet, attacked, undrafted = Times(), Times(), Times()
    async with AsyncExitStack() as stack:
        victim = await stack.enter_async_context(Actor.started("victim", *addresses))
        attacker = None
        if name not in BY_DRAFTS:
            attacker = await stack.enter_async_context(Actor.started(name, *addresses))
        # The first requests of a caller connect and compile, and the trie learns the answer.
        await victim.go()
        await asyncio.sleep(3.0)
        await victim.rest()
        for _ in range(rounds):
            await world.whole(90.0)
            await victim.go()
            await asyncio.sleep(seconds)
            quiet.add(await victim.rest(), expected)
            await _attack(world, attacker, name)
            await victim.go()
            await asyncio.sleep(seconds)
            attacked.add(await victim.rest(), expected)
            if name == HOSTILE_DRAFT:
                world.lose_draft()
                await victim.go()
                await asyncio.sleep(seconds)
                undrafted.add(await victim.rest(), expected)
            await _relent(world, attacker)
            await asyncio.sleep(1.0)
    figures = {"quiet": quiet.figures(), "attacked": attacked.figures()}
    ratios = {"p99_ratio": _ratio(figures["attacked"], figures["quiet"])}
    if name == HOSTILE_DRAFT:
        figures["without a draft"] = undrafted.figures()
        ratios["p99_ratio_to_no_draft"] = _ratio(figures["attacked"], figures["without a draft"])
    return {**figures, **ratios, "errors": sorted(set(attacked.errors))[:3]}


def judged(figures: dict[str, Any]) -> float:
    """The ratio that the bar is for. Whoever loses its draft decodes plainly, attack or not."""
    return float(figures.get("p99_ratio_to_no_draft", figures["p99_ratio"]))


def _ratio(some: dict[str, Any], others: dict[str, Any]) -> float:
    return round(float(some["p99_ms"] / others["p99_ms"]), 2)


async def _attack(world: World, attacker: Actor | None, name: str) -> None:
    """By a caller, or by the draft where there is none."""
    if attacker is not None:
        await attacker.go()
    elif name == BESIDE_ANOTHER:
        await world.lie_as_the_real_one("flooding", TOKENS["target"])
    else:
        world.lie("flooding")


def _victim_is_at_home(with_one: str, not_with: str) -> bool:
    """Whether a victim is followed by the draft at the first address, of the two."""
    # Of its tenant, with no corpus.
    key = "good\n"
    return weight(with_one, key) > weight(not_with, key)


async def _relent(world: World, attacker: Actor | None) -> None:
    if attacker is None:
        world.tell_the_truth()
    else:
        await attacker.rest()


async def measure(
    found: Taught,
    folder: Path,
    names: Sequence[str],
    *,
    rounds: int,
    seconds: float,
    placement: str = "shared",
    limits: str = "",
) -> dict[str, Any]:
    """All attacks of `names`, one after the other. `limits` is a line of the tokens' file for the attacker."""
    tokens = folder / "tokens"
    lines = [f"{token} {tenant}" for tenant, token in TOKENS.items()]
    tokens.write_text("\n".join([*lines, *([f"tenant evil {limits}"] if limits else [])]) + "\n")
    draft_token = folder / "draft-token"
    draft_token.write_text(TOKENS["target"])
    for file in (tokens, draft_token):
        file.chmod(0o600)
    (port,) = free_ports(1)
    flags = ("--auth-tokens", str(tokens), "--draft-token", str(draft_token), "--metrics-listen", f"127.0.0.1:{port}")
    results = {}
    for name in names:
        place = folder / f"attacked-{names.index(name)}"
        async with world_of(
            found,
            place,
            "trie",
            placement,
            (*flags,),
            ("--auth-tokens", str(tokens)),
            token=TOKENS["good"],
            spare=_victim_is_at_home if name == BESIDE_ANOTHER else None,
        ) as world:
            addresses = (f"unix:{place}/target.sock", f"unix:{place}/draft.sock", f"127.0.0.1:{port}")
            results[name] = await _one(world, name, addresses, rounds, seconds)
            say(f"{name}: {json.dumps(results[name])}")
    return {"bar": BAR, "placement": placement, "limits_of_the_attacker": limits or "default", "attacks": results}


def main(arguments: Sequence[str] | None = None) -> int:
    every = sorted([*ATTACKS, *BY_DRAFTS], key=lambda name: int(name.split()[0]))
    parser = argparse.ArgumentParser(prog="python -m chaos.attacks", description=__doc__)
    parser.add_argument("--only", default="", help="attacks whose name begins so")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each quiet time and each attack")
    parser.add_argument("--engine-process", default="shared", choices=("shared", "own"))
    parser.add_argument("--limits", default="", help="the attacker's, as in the tokens' file: running=4")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--folder", type=Path, help="where to keep models and logs; a passing one without it")
    chosen = parser.parse_args(arguments)
    names = [name for name in every if name.startswith(chosen.only)]
    with TemporaryDirectory() as passing:
        folder = chosen.folder or Path(passing)
        told = asyncio.run(
            measure(
                taught(folder),
                folder,
                names,
                rounds=chosen.rounds,
                seconds=chosen.seconds,
                placement=chosen.engine_process,
                limits=chosen.limits,
            )
        )
    write(chosen.json, "chaos.attacks", told)
    missed = [name for name, figures in told["attacks"].items() if judged(figures) > BAR]
    say(f"above {BAR:g} times the quiet value: {', '.join(missed) or 'none'}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
