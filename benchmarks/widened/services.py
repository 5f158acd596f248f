"""The services of one mode: a target, and a draft on its GPU, on a second one, or in its process."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

from benchmarks.drafters.random_trees import RANDOM
from benchmarks.serving.services import DraftSettings, flags_of, visible_device
from benchmarks.shared.processes import wait_for
from benchmarks.shared.report import show
from benchmarks.widened.metrics import CONNECTED, fetch, value
from benchmarks.widened.proxy import DelayProxy
from outrider.ports import free_port

PLAIN, LOOKUP = "plain", "lookup"
# Drafters by mode.
DRAFTERS = {"trie": "trie", "head": "eagle", "medusa": "medusa", "merged": "merged", "random": RANDOM}
MODES = (PLAIN, LOOKUP, *DRAFTERS)
# Drafters that need no GPU: their service is the same in each placement beside the target.
_WITHOUT_GPU = ("trie", "random")
# Modes whose drafts remember earlier prompts and answers.
REMEMBER = ("trie", "merged")
SECOND, SAME, IN_PROCESS, OWN_PROCESS = "second GPU", "same GPU", "in process", "own process"
PLACEMENTS = {"second": SECOND, "same": SAME, "inprocess": IN_PROCESS}

# Chosen: half of the service's default, since a sweep starts many services.
_CAPTURE_SECONDS = 60
# The largest that a target accepts.
_LOOKED_UP = 15
# Sequences that a head's graphs are captured for at the start, at most. Chosen: capturing takes time for each.
_MOST_CAPTURED = 32
# Of a head's cache: tokens at least, and tokens of a sequence for trees, beyond prompt and answer. Chosen, ample.
_HEAD_TOKENS = 65536
_HEAD_SLACK = 256
# Longer than any start measured.
_CONNECT_SECONDS = 60.0
_STOP_SECONDS = 30.0
_TAIL_LINES = 30
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class SweepPlan:
    """Settings of all services of a sweep.

    Attributes:
        head, medusa: folders of the EAGLE head and of the Medusa heads; empty where no mode needs them.
        most: sequences that run at once.
        room: tokens of the longest prompt and its answer.
        target: more settings of the target by name.
        drafters: settings by section of the drafters, such as {"eagle": {"topk": 4}}.
        logs: the folder of the services' logs.
    """

    model: str
    head: str
    device: str
    dtype: str
    most: int
    room: int
    delay_ms: float
    logs: Path
    target: Mapping[str, Any] = field(default_factory=dict)
    drafters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    medusa: str = ""

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"


class Subject(NamedTuple):
    """A mode in one of its placements."""

    mode: str
    placement: str

    @property
    def name(self) -> str:
        return "-".join(filter(None, (self.mode, self.placement.replace(" ", "-").lower())))


class RunningTarget(NamedTuple):
    """A target that takes calls: its address, and the URL of its metrics."""

    address: str
    page: str


def subjects_of(modes: list[str], placements: list[str]) -> list[Subject]:
    """Every mode in each of its placements, plain first."""
    found: list[Subject] = []
    for mode in sorted(dict.fromkeys(modes), key=lambda mode: mode != PLAIN):
        if mode not in DRAFTERS:
            found.append(Subject(mode, ""))
            continue
        for placement in (PLACEMENTS[flag] for flag in placements):
            apart = placement != IN_PROCESS and mode in _WITHOUT_GPU
            found.append(Subject(mode, OWN_PROCESS if apart else placement))
    return list(dict.fromkeys(found))


def draft_settings(plan: SweepPlan, subject: Subject) -> DraftSettings:
    """The draft service of a mode. Raises `KeyError` for a mode without a draft."""
    drafter = DRAFTERS[subject.mode]
    device = "cpu"
    if plan.on_gpu and subject.mode not in _WITHOUT_GPU:
        device = "cuda:1" if subject.placement == SECOND else "cuda:0"
    eagle: dict[str, Any] = {"dtype": plan.dtype, "kv_tokens": max(_HEAD_TOKENS, plan.most * (plan.room + _HEAD_SLACK))}
    if plan.on_gpu:
        eagle |= {"cuda_graphs": True, "captured_sequences": min(_MOST_CAPTURED, plan.most)}
    flags = {section: dict(settings) for section, settings in plan.drafters.items()}
    flags["eagle"] = eagle | flags.get("eagle", {})
    flags["medusa"] = {"dtype": plan.dtype} | flags.get("medusa", {})
    head = plan.medusa if drafter == "medusa" else plan.head
    return DraftSettings(drafter, head, plan.model, device, flags)


def target_settings(plan: SweepPlan, subject: Subject) -> dict[str, Any]:
    """The target's settings by name, without addresses. The mode's own override those of the plan."""
    settings: dict[str, Any] = {
        "model": plan.model,
        "dtype": plan.dtype,
        "device": plan.device.partition(":")[0],
        "max_running": max(plan.most, 1),
        # Prompts come again at every load.
        "prefix_cache": False,
    }
    if plan.on_gpu:
        settings["capture_seconds"] = _CAPTURE_SECONDS
    settings |= plan.target
    if subject.mode == PLAIN:
        settings |= {"speculation": False, "lookup_tokens": 0}
    elif subject.mode == LOOKUP and int(settings.get("lookup_tokens", -1)) <= 0:
        # A target without lookup refuses this; it must not be measured as if it had it.
        settings["lookup_tokens"] = _LOOKED_UP
    elif subject.mode in DRAFTERS and (draft := draft_settings(plan, subject)).reads_features:
        settings.setdefault("draft_head", draft.head)
    return settings


@contextmanager
def started(plan: SweepPlan, subject: Subject) -> Iterator[RunningTarget]:
    """The services of a subject, once the target is connected to its draft. Both are loaded at the same time.

    Raises `RuntimeError` if one does not start.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="widened-")))
        draft = draft_settings(plan, subject) if subject.mode in DRAFTERS else None
        addresses: dict[str, Any] = {"listen": f"unix:{folder}/target", "metrics_listen": f"127.0.0.1:{free_port()}"}
        environment = {"CUDA_VISIBLE_DEVICES": _visible_devices(plan)}
        running = {}
        if draft is not None and subject.placement == IN_PROCESS:
            addresses["draft"] = f"inprocess:{draft.drafter}"
            environment = draft.environment() | environment
        elif draft is not None:
            addresses["draft"] = _draft_address(plan, folder, stack)
            flags = ["-m", "draft_service", "--listen", f"unix:{folder}/draft", "--drafter", draft.drafter]
            log = plan.logs / f"{subject.name}.draft.log"
            running["draft"] = stack.enter_context(_process(flags, draft.environment(), log))
        flags = ["-m", "target_service", *flags_of(target_settings(plan, subject) | addresses)]
        log = plan.logs / f"{subject.name}.target.log"
        running["target"] = stack.enter_context(_process(flags, environment, log))
        begin = time.monotonic()
        for name, one in running.items():
            wait_for(f"unix:{folder}/{name}", one)
        service = RunningTarget(addresses["listen"], f"http://{addresses['metrics_listen']}/metrics")
        if draft is not None:
            _wait_for_draft(service.page)
        show(f"{subject.name}: up after {time.monotonic() - begin:.1f} s")
        # A target that ran out of time for capturing is slow at the sizes that it did not capture.
        for message in (one for one in log.read_text(errors="replace").splitlines() if "captur" in one):
            show(f"    {message}")
        yield service


def _visible_devices(plan: SweepPlan) -> str:
    """Those of the target: one for each of its ranks, from the plan's on."""
    if not plan.on_gpu:
        return visible_device("cpu")
    kind, _, index = plan.device.partition(":")
    ranks = range(int(plan.target.get("tensor_parallel", 1)))
    return ",".join(visible_device(f"{kind}:{int(index or 0) + rank}") for rank in ranks)


def _draft_address(plan: SweepPlan, folder: Path, stack: ExitStack) -> str:
    """The address that the target connects to: the draft's or the delaying proxy's."""
    if not plan.delay_ms:
        return f"unix:{folder}/draft"
    stack.enter_context(DelayProxy(folder / "proxy", folder / "draft", plan.delay_ms / 1e3))
    return f"unix:{folder}/proxy"


def _wait_for_draft(page: str) -> None:
    deadline = time.monotonic() + _CONNECT_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if value(fetch(page), CONNECTED):
                return
        time.sleep(0.2)
    raise RuntimeError("the target did not connect to its draft")


@contextmanager
def _process(flags: list[str], environment: Mapping[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A Python process that writes to `log`; it and its children are ended with the block."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as file:
        _note(file, flags, environment)
        running = subprocess.Popen(
            [sys.executable, *flags],
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            process_group=0,
            preexec_fn=_end_with_parent,
        )
        try:
            yield running
        finally:
            running.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.wait(_STOP_SECONDS)
            # With any children that it left.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
            running.wait()


def _note(file: IO[bytes], flags: list[str], environment: Mapping[str, str]) -> None:
    """The command, as the log's first line."""
    variables = " ".join(f"{name}={text}" for name, text in environment.items())
    file.write(f"{variables} python {' '.join(flags)}\n".encode())
    file.flush()


def _end_with_parent() -> None:
    """In the child process: have the kernel end it when its parent is killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def tails(plan: SweepPlan, subject: Subject) -> str:
    """The last lines of a subject's logs."""
    found = []
    for log in sorted(plan.logs.glob(f"{subject.name}.*.log")):
        lines = log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        found.append("\n".join([f"--- {log}", *lines]))
    return "\n".join(found)
