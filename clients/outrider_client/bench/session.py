"""One benchmark from options to document: start what is needed, run the plan, gather the figures."""

from __future__ import annotations

import datetime
import secrets
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from outrider.addresses import address_problem
from outrider.machine import describe_commit, describe_machine, describe_versions
from outrider.ports import free_port
from outrider.settings import SettingsError, comma_words
from outrider_client.bench.backends import Backend, TargetBackend, TransformersBackend
from outrider_client.bench.profile import StepProfile
from outrider_client.bench.prompts import load_prompts
from outrider_client.bench.report import SCHEMA, cells
from outrider_client.bench.runner import Plan, Runner
from outrider_client.bench.samples import PLAIN, TRANSFORMERS, BenchMode
from outrider_client.client import Client
from outrider_client.local.stack import Stack, private_stack, wait_for_drafter
from outrider_client.results import TargetInfo
from outrider_client.terminal.options import BenchOptions, ClientOptions, flag_words, request_counts

PLACEMENTS = ("remote", "inprocess")
Note = Callable[[str], None]


def make_plan(options: BenchOptions) -> Plan:
    """Check the options and read the prompts. Raises `SettingsError`."""
    if not options.prompts:
        raise SettingsError("--prompts is needed: a JSONL file with id, task and turns")
    if options.profile and options.target:
        raise SettingsError("--profile reads the metrics of targets that are started for it: leave --target out")
    if options.target and (problem := address_problem(options.target)):
        raise SettingsError(f"--target: {problem}")
    prompts = load_prompts(Path(options.prompts), limit=options.limit, tasks=comma_words(options.tasks))
    return Plan(
        prompts=prompts,
        modes=_modes(options),
        concurrency=request_counts(options.concurrency),
        repeats=options.repeats,
        max_tokens=options.max_tokens,
        second_turns=options.second_turns,
        isolate=options.isolate,
        run_id=secrets.token_hex(4),
    )


def _is_drafter_of(mode: BenchMode, drafter: str) -> bool:
    """Whether a target's drafter is the mode's. One given as MODULE:CLASS chooses its own name."""
    return drafter == mode.name or (bool(drafter) and ":" in mode.name)


def _modes(options: BenchOptions) -> list[BenchMode]:
    names = comma_words(options.modes)
    placements = comma_words(options.draft_placement)
    if not names:
        raise SettingsError("--modes names no mode")
    for placement in placements:
        if placement not in PLACEMENTS:
            raise SettingsError(f"--draft-placement: {placement!r} is not one of {', '.join(PLACEMENTS)}")
    if options.target and sum(BenchMode(name).drafts for name in names) > 1:
        raise SettingsError("--target has one drafter; leave --target out to have a target started for every drafter")
    if set(names) == {TRANSFORMERS}:
        raise SettingsError("--modes: transformers is for comparison, with plain or a drafter beside it")
    modes: list[BenchMode] = []
    # Plain first: the others are compared with it, and second turns build on its answers.
    for name in sorted(dict.fromkeys(names), key=lambda name: name != PLAIN):
        placed = BenchMode(name).drafts and not options.target
        modes.extend(BenchMode(name, placement) for placement in (placements if placed else [""]))
    return modes


@dataclass
class Session:
    """The backends of a plan. `note` is called with what is being waited for; what is started ends with `leave`."""

    _options: BenchOptions
    _reach: ClientOptions
    _note: Note
    _leave: AsyncExitStack
    _drafts: dict[str, str] = field(default_factory=dict)
    _stack: Stack | None = None
    backends: dict[BenchMode, Backend] = field(default_factory=dict)
    info: TargetInfo | None = None
    # URLs of the metrics of the modes' targets, when profiling.
    pages: dict[BenchMode, str] = field(default_factory=dict)

    async def start(self, modes: Sequence[BenchMode]) -> None:
        """Start or find a backend for every mode; plain answers come from the first drafter's own target. One after
        another, since a target times its own steps when it starts. Raises `SettingsError`, or as calls do."""
        running, targets = self._options.target, dict[BenchMode, str]()
        for mode in modes:
            if mode.drafts:
                address = targets[mode] = running or await self._start_target(mode)
                info = await self._add_backend(mode, address)
                if running and not _is_drafter_of(mode, info.drafter):
                    raise SettingsError(f"the target's drafter is {info.drafter or 'none'}, not {mode.name}")
        for mode in modes:
            if mode.name == PLAIN:
                first = next(iter(targets), mode)
                await self._add_backend(mode, targets.get(first) or running or await self._start_target(mode))
                self.pages |= {mode: self.pages[first]} if first in self.pages else {}
            elif mode.name == TRANSFORMERS:
                self._note("loading the model for transformers")
                loop = self.backends[mode] = TransformersBackend(self._options)
                self._leave.push_async_callback(loop.close)
                await loop.load()

    async def _add_backend(self, mode: BenchMode, address: str) -> TargetInfo:
        """A backend for the mode. Returns the description of the first target."""
        backend = self.backends[mode] = TargetBackend(self._reach, address, mode.drafts)
        self._leave.push_async_callback(backend.close)
        self.info = self.info or await backend.client().info()
        return self.info

    async def _start_target(self, mode: BenchMode) -> str:
        if self._stack is None:
            self._stack = await self._leave.enter_async_context(private_stack())
        stack, options = self._stack, self._options
        # The modes answer the same prompts: whoever comes later would find them read.
        flags = ["--model", options.model, "--dtype", options.dtype, "--device", options.device, "--no-prefix-cache"]
        if mode.placement == "inprocess":
            flags += ["--draft", f"inprocess:{mode.name}"]
        elif mode.drafts:
            if mode.name not in self._drafts:
                self._note(f"starting a draft service with {mode.name}")
                words = ("--drafter", mode.name, *flag_words(options.draft_flags))
                self._drafts[mode.name] = await stack.start(f"draft-{mode.name}", "draft_service", *words)
            flags += ["--draft", self._drafts[mode.name]]
        self._note(f"starting a target for {mode.label}")
        if options.profile:
            listen = f"127.0.0.1:{free_port()}"
            flags += ["--metrics-listen", listen]
            self.pages[mode] = f"http://{listen}/metrics"
        name = f"target-{mode.name}-{mode.placement or 'alone'}"
        address = await stack.start(name, "target_service", *flags, *flag_words(options.target_flags))
        if mode.drafts:
            async with Client.connect(address) as client:
                if not _is_drafter_of(mode, await wait_for_drafter(client)):
                    raise SettingsError(f"the target did not reach its draft service with {mode.name}")
        return address


async def measure(bench: BenchOptions, reach: ClientOptions, plan: Plan, note: Note, on_answer: Note) -> dict[str, Any]:
    """Start what the plan needs, run it, and return the figures. `on_answer` is called with what is measured."""
    async with AsyncExitStack() as leave:
        session = Session(bench, reach, note, leave)
        await session.start(plan.modes)
        profile = StepProfile(session.pages)
        runner = Runner(plan, session.backends, on_answer, profile)
        note("warming up")
        await runner.warm_up()
        begun = datetime.datetime.now(datetime.UTC)
        blocks = await runner.measure_all()
        seconds = (datetime.datetime.now(datetime.UTC) - begun).total_seconds()
    info = session.info
    return {
        "schema": SCHEMA,
        "started_at": begun.isoformat(timespec="seconds"),
        "seconds": seconds,
        "machine": describe_machine(),
        "versions": describe_versions(),
        "commit": describe_commit(),
        "command": shlex.join(["outrider", *sys.argv[1:]]),
        "arguments": asdict(bench),
        "target": {name: getattr(info, name) for name in ("model", "dtype", "page_size", "max_rows", "version")},
        "prompts": len(plan.prompts),
        "results": cells(blocks, plan.modes),
        **({"ms_per_step": profile.per_step()} if bench.profile else {}),
    }
