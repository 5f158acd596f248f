"""Two targets with a draft each, on this machine: one with the settings in force, one for candidates."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.named_heads import flag_value, merged_drafters, named_settings
from outrider.runtime import end_tasks
from outrider.settings import SettingsError
from outrider_client.bench.backends import TargetBackend
from outrider_client.local.placement import GpuPlacement, place, visible_gpus
from outrider_client.local.settings_file import Document, read_document, to_toml, with_settings
from outrider_client.local.stack import Stack, given, wait_for_drafter
from outrider_client.terminal.options import ClientOptions, TuneOptions, flag_words
from outrider_client.tuning.candidates import Candidate, known_candidates, parse_candidates

# Flags for other clients and operators of a service, and of a target for its draft: they are left empty here.
_PRIVATE = (
    *("metrics-listen", "admin-listen", "otlp-endpoint"),
    *("auth-tokens", "tls-certificate", "tls-key", "tls-client-ca"),
)
# A stored trie may contain the prompts, and would be overwritten by what is learnt here.
_SNAPSHOT = ("trie", "snapshot")


@dataclass(frozen=True)
class Setup:
    """What is tuned, read from options, environment and file before anything is started."""

    options: TuneOptions
    path: Path | None
    document: Document
    placed: GpuPlacement
    target_words: tuple[str, ...]
    draft_words: tuple[str, ...]
    candidates: tuple[Candidate, ...]
    # Whether the targets run on a GPU.
    gpu: bool = False

    @property
    def identity(self) -> list[tuple[str, str, Any]]:
        """Model, dtype and drafter that were given, for the file."""
        options = self.options
        own = (("target", "model", options.model), ("target", "dtype", options.dtype))
        return [one for one in (*own, ("draft", "drafter", options.drafter)) if one[2]]


def read_setup(options: TuneOptions, path: Path | None, environment: Mapping[str, str] = os.environ) -> Setup:
    """Raises `SettingsError` for what cannot be tuned."""
    document = read_document(path)
    named = named_settings(environment, path)
    target_words, draft_words = (tuple(flag_words(flags)) for flags in (options.target_flags, options.draft_flags))
    device = ("--device", options.device) if options.device else ()
    placed = place(visible_gpus(), options.drafter, options.model, (*target_words, *device), draft_words, named)
    captured = "--cuda-graphs" in (*placed.draft, *draft_words)
    parts = merged_drafters(draft_words, named)
    candidates = parse_candidates(options.candidates) or known_candidates(options.drafter, parts, captured)
    if not candidates:
        raise SettingsError(f"nothing is known to try for {options.drafter}: name --candidates")
    _check_effective(candidates, draft_words, environment)
    gpu = any("cuda" in word for word in (*placed.target, *target_words, *device, named.get(("target", "device"), "")))
    if gpu:
        # First, so that a flag of the user overrides it.
        # Share of a GPU's free memory for one target's cache, with room for a second.
        share = () if ("target", "memory_share") in named else ("--memory-share", "0.4")
        target_words = (*share, *target_words)
    return Setup(options, path, document, placed, (*target_words, *device), draft_words, tuple(candidates), gpu)


def _check_effective(candidates: Sequence[Candidate], words: Sequence[str], environment: Mapping[str, str]) -> None:
    """Refuse flags and environment variables that would override the file with a candidate's settings."""
    tried = [(section, name) for candidate in candidates for section, name, _ in candidate.draft]
    for section, name in (*tried, _SNAPSHOT):
        variable = f"OUTRIDER_{section.upper()}_{name.upper()}"
        if variable in environment:
            raise SettingsError(f"{variable} is set, and would be for all that is tried: unset it for tuning")
    for _, name in tried:
        flag = "--" + name.replace("_", "-")
        if flag_value(words, flag) is not None:
            raise SettingsError(f"--draft-flags: {flag} is what is tuned; leave it out")


class Side:
    """A target and its draft, which can be restarted with other settings."""

    def __init__(self, name: str, setup: Setup, stack: Stack, leave: contextlib.AsyncExitStack) -> None:
        """`leave` closes the backends; `stack` stops the services."""
        self._name = name
        self._setup = setup
        self._stack = stack
        self._leave = leave
        self._address = ""
        self._draft: tuple[tuple[str, str, int], ...] | None = None
        # How long the draft last took to start.
        self.draft_seconds = 0.0

    async def start(self) -> None:
        """Start both, with the settings in force. Raises `ServiceFailed` or `SettingsError`."""
        setup, draft = self._setup, self._stack.address(f"draft-{self._name}")
        own = given(model=setup.options.model, dtype=setup.options.dtype, config=str(setup.path or ""))
        private = _emptied(*_PRIVATE, *("draft-token", "draft-tls-ca", "draft-tls-certificate", "draft-tls-key"))
        # Candidates answer the same prompts, which none may find read.
        words = [*own, *setup.placed.target, *setup.target_words, *private, "--no-prefix-cache", "--draft", draft]
        if setup.placed.shared:
            # One after the other: the target takes a share of the memory that the draft leaves free.
            await self._start_draft(Candidate())
        starting = asyncio.create_task(self._stack.start(f"target-{self._name}", "target_service", *words))
        try:
            if self._draft is None:
                await self._start_draft(Candidate())
            self._address = await starting
        finally:
            await end_tasks(starting)
        await self._connected()

    async def apply(self, candidate: Candidate) -> None:
        """Restart the draft with the candidate's settings if they differ. Raises `ServiceFailed` if it refuses."""
        if candidate.draft != self._draft:
            await self._stack.stop(f"draft-{self._name}")
            # None until the new one has started.
            self._draft = None
            await self._start_draft(candidate)
            await self._connected()

    def backend(self, candidate: Candidate, speculate: bool = True) -> TargetBackend:
        """The backend for a candidate that was taken; it decodes plainly with `speculate` off. A candidate's prompts
        are sent for another tenant than those of the settings in force, so that where one target serves both, no draft
        learns from the other's answers."""
        memory = "tried-" if candidate.settings else ""
        backend = TargetBackend(ClientOptions(), self._address, speculate, candidate.max_nodes, memory)
        self._leave.push_async_callback(backend.close)
        return backend

    async def _start_draft(self, candidate: Candidate) -> None:
        setup = self._setup
        document = with_settings(setup.document, candidate.draft)
        document.get(_SNAPSHOT[0], {}).pop(_SNAPSHOT[1], None)
        path = self._stack.directory / f"{self._name}.toml"
        path.write_text(to_toml(document), encoding="utf-8")
        words = ["--config", str(path), "--drafter", setup.options.drafter, *setup.placed.draft, *setup.draft_words]
        begun = asyncio.get_running_loop().time()
        await self._stack.start(f"draft-{self._name}", "draft_service", *words, *_emptied(*_PRIVATE))
        self.draft_seconds = asyncio.get_running_loop().time() - begun
        self._draft = candidate.draft

    async def _connected(self) -> None:
        if await wait_for_drafter(self.backend(Candidate()).client()) != self._setup.options.drafter:
            raise SettingsError(f"the target did not reach its draft service with {self._setup.options.drafter}")


def _emptied(*names: str) -> list[str]:
    return [word for name in names for word in (f"--{name}", "")]
