"""Starts target and draft services, as `python -m target_service` and `python -m draft_service`."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from benchmarks.shared.processes import process, wait_for

# Drafters that run a network, and so have a device.
_NEURAL = ("eagle", "medusa", "model")


@dataclass(frozen=True)
class TargetSettings:
    """Settings that all target services of a run share; `more` has further ones by name."""

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
        embeddings: folder of the target, for weights that the head does not have.
        device: cpu, or cuda:N for the N-th GPU that this process sees. The service sees only that one.
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
        """Variables of the process: flags do not reach the drafters inside a merged one."""
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
    """Settings as flags of a service: a boolean becomes `--name` or `--no-name`."""
    flags: list[str] = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", str(value)]
    return flags


def visible_device(device: str) -> str:
    """The value of CUDA_VISIBLE_DEVICES with which `device` is the only GPU."""
    kind, _, index = device.partition(":")
    if kind == "cpu":
        return ""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return seen.split(",")[int(index or 0)] if seen else index or "0"


@contextmanager
def service(settings: TargetSettings, arrangement: str, draft: DraftSettings | None) -> Iterator[str]:
    """The address of a target service that takes calls, beside a draft service if there is one.

    Both are loaded at the same time.
    """
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        address, drafting = f"unix:{folder}/target", f"unix:{folder}/draft"
        flags = {
            "model": settings.model,
            "device": settings.device,
            "dtype": settings.dtype,
            "listen": address,
            "engine_process": arrangement,
            # Prompts come again with every setting.
            "prefix_cache": False,
        }
        started = {}
        if draft is not None:
            flags |= {"draft": drafting} | ({"draft_head": draft.head} if draft.reads_features else {})
            arguments = ["-m", "draft_service", "--listen", drafting, "--drafter", draft.drafter]
            started[drafting] = stack.enter_context(process(*arguments, environment=draft.environment()))
        started[address] = stack.enter_context(process("-m", "target_service", *flags_of({**flags, **settings.more})))
        for each, running in started.items():
            wait_for(each, running)
        yield address
