"""Target and draft services in processes of their own, as `python -m target_service` and `python -m draft_service`."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

START_SECONDS = 400.0
# Of the drafters that run a network.
_NEURAL = ("eagle", "medusa", "model")


@dataclass(frozen=True)
class TargetSettings:
    """What every target service of a run is started with; `more` are further settings by name."""

    model: str
    device: str
    dtype: str
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DraftSettings:
    """A draft service.

    Attributes:
        drafter: registered name.
        head: folder of an EAGLE head, or of Medusa heads for that drafter; empty for drafters without.
        embeddings: folder of the target, for what the head does not carry.
        device: cpu, or cuda:N for the N-th GPU that this process sees. The service sees that one alone.
        flags: settings by section of the drafter, such as {"eagle": {"topk": 4}, "trie": {...}}.
    """

    drafter: str
    head: str = ""
    embeddings: str = ""
    device: str = "cpu"
    flags: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def reads_features(self) -> bool:
        return self.drafter in ("eagle", "medusa", "merged")

    def environment(self) -> dict[str, str]:
        """Variables of the process: drafters inside a merged one are told nothing by flags."""
        kind = self.device.partition(":")[0]
        settings: dict[str, dict[str, Any]] = {section: {"device": kind} for section in _NEURAL}
        if self.drafter == "medusa":
            settings["medusa"] |= {"head": self.head, "base_model": self.embeddings}
        elif self.reads_features:
            settings["eagle"] |= {"head": self.head, "embeddings": self.embeddings}
        for section, values in self.flags.items():
            settings.setdefault(section, {}).update(values)
        variables = {
            f"OUTRIDER_{section.upper()}_{name.upper()}": str(value)
            for section, values in settings.items()
            for name, value in values.items()
        }
        return variables | {"CUDA_VISIBLE_DEVICES": visible_device(self.device)}


def flags_of(settings: Mapping[str, Any]) -> list[str]:
    """Settings as flags; booleans as the services have them."""
    flags: list[str] = []
    for name, chosen in settings.items():
        flag = name.replace("_", "-")
        if isinstance(chosen, bool):
            flags.append(f"--{flag}" if chosen else f"--no-{flag}")
        else:
            flags += [f"--{flag}", str(chosen)]
    return flags


def visible_device(device: str) -> str:
    """What CUDA_VISIBLE_DEVICES must be for `device` to be the only GPU."""
    kind, _, index = device.partition(":")
    if kind == "cpu":
        return ""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return seen.split(",")[int(index or 0)] if seen else index or "0"


@contextmanager
def process(*arguments: str, environment: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """A Python process that is ended in the end."""
    running = subprocess.Popen([sys.executable, *arguments], env={**os.environ, **(environment or {})})
    try:
        yield running
    finally:
        running.terminate()
        running.wait(60)


@contextmanager
def service(settings: TargetSettings, arrangement: str, draft: DraftSettings | None) -> Iterator[str]:
    """The address of a target service that takes calls, with a draft service if one is wanted.

    Both are loaded at the same time; calls are taken once both are there.
    """
    more = dict(settings.more)
    with tempfile.TemporaryDirectory() as folder:
        address, drafting = f"unix:{folder}/target", f"unix:{folder}/draft"
        target = ["-m", "target_service", "--model", settings.model, "--device", settings.device]
        target += ["--dtype", settings.dtype, "--listen", address, "--engine-process", arrangement]
        if draft is not None:
            target += ["--draft", drafting]
            if draft.reads_features:
                more.setdefault("draft_head", draft.head)
        target += [word for name, value in more.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        if draft is None:
            with process(*target) as running:
                wait_for(address, running)
                yield address
            return
        arguments = ["-m", "draft_service", "--listen", drafting, "--drafter", draft.drafter]
        with process(*arguments, environment=draft.environment()) as helper, process(*target) as running:
            wait_for(drafting, helper)
            wait_for(address, running)
            yield address


def wait_for(address: str, running: subprocess.Popen[bytes]) -> None:
    """Until the service takes calls. Raises `RuntimeError` when it ends before."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    deadline = time.monotonic() + START_SECONDS
    with grpc.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        while time.monotonic() < deadline:
            if running.poll() is not None:
                raise RuntimeError(f"the service at {address} exited with status {running.returncode}")
            try:
                if health.Check(health_pb2.HealthCheckRequest(), timeout=5).status == 1:
                    return
            except grpc.RpcError:
                pass
            time.sleep(0.2)
    raise RuntimeError(f"the service at {address} did not start in time")
