"""`outrider up`, and the commands that run a service's own command line."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from functools import partial

from rich.console import Console
from rich.text import Text

from outrider.addresses import address_at
from outrider.consoles import error_console
from outrider.model_store import MODEL_STORE
from outrider.named_heads import named_settings
from outrider.ports import port_refusal
from outrider.processes.python import module_command
from outrider.roles import missing_for
from outrider.runtime import run
from outrider.settings import CONFIG_VARIABLE, SettingsError, settings_file
from outrider_client.cli.base import Command, CommandFailed, options
from outrider_client.local.placement import GpuPlacement, place, visible_gpus
from outrider_client.local.stack import given, private_directory
from outrider_client.local.supervisor import ServiceCommand, Supervisor
from outrider_client.terminal.options import ClientOptions, UpOptions, flag_words

_COLOURS = {"target": "cyan", "draft": "magenta", "gateway": "green", "outrider": "bold"}


def _up(arguments: argparse.Namespace) -> int:
    up = options(UpOptions, "up", arguments)
    # For health checks of a target that requires a token or uses TLS.
    reach = options(ClientOptions, "client", arguments)
    target_words, draft_words = flag_words(up.target_flags), flag_words(up.draft_flags)
    if up.gateway_flags and not up.http:
        raise SettingsError("--gateway-flags are for a gateway, which only --http starts")
    _check_free(up.host, up.port, "--port")
    http = _http_address(up.http)
    with private_directory() as directory:
        path = settings_file(arguments)
        shared = given(config=str(path or ""))
        named = named_settings(os.environ, path)
        gpus = visible_gpus()
        apart = bool(up.draft_listen)
        placed = place(gpus, up.drafter, up.model, target_words, draft_words, named, apart=apart)
        listen = address_at(up.host, up.port)
        # Others may want to reach a draft whose address is named.
        inside = placed.shared and not apart
        draft, source = None, ""
        if inside:
            drafter = up.drafter or named["draft", "drafter"]
            scheme = "inpass:" if placed.in_pass else "inprocess:"
            source = scheme + shlex.join((drafter, *placed.draft, *draft_words))
        elif up.drafter != "none":
            source = up.draft_listen or f"unix:{directory / 'draft.sock'}"
            flags = (*given(listen=source, drafter=up.drafter), *shared, *placed.draft, *draft_words)
            draft = ServiceCommand("draft", module_command("draft_service", *flags), source)
        flags = given(listen=listen, draft=source, model=up.model, dtype=up.dtype)
        argv = module_command("target_service", *flags, *shared, *placed.target, *target_words)
        # A drafter in its process reads the file that the environment names.
        environment = {CONFIG_VARIABLE: str(path)} if path else {}
        target = ServiceCommand("target", argv, listen, environment, reach.secret(), reach.tls_options())
        gateway = None
        if http:
            # It reaches the target by the settings of [client], like every client.
            # While the gateway waits, a target that does not listen yet is being started. Chosen: imports take some ten
            # seconds.
            flags = (*given(listen=http, target=listen), *("--target-start-seconds", "120"), *shared)
            if not gpus and ("gateway", "workers") not in named:
                # A CPU makes fewer tokens than one process writes.
                flags += ("--workers", "1")
            flags = (*flags, *flag_words(up.gateway_flags))
            gateway = ServiceCommand("gateway", module_command("outrider_gateway", *flags), http)
        emit = partial(_emit, error_console())
        return _supervise(Supervisor(target, draft, emit, gateway), placed, inside)


def _http_address(http: str) -> str:
    """HOST:PORT for the gateway to listen on; a port alone is on the loopback address. Empty for no gateway."""
    if not http:
        return ""
    host, _, port = f"127.0.0.1:{http}".rpartition(":") if http.isdecimal() else http.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise SettingsError(f"--http: {http!r} is neither a port nor HOST:PORT")
    if message := missing_for("gateway"):
        raise CommandFailed(f"--http: {message}")
    _check_free(host.strip("[]"), int(port), "--http")
    return f"{host}:{port}"


def _check_free(host: str, port: int, flag: str) -> None:
    """Fail now when the port is taken: the target would load its model first."""
    if refusal := port_refusal(host, port):
        raise CommandFailed(f"cannot listen on {host}:{port}: {refusal.strerror}; {flag} takes another")


def _emit(console: Console, name: str, line: str) -> None:
    console.print(Text.assemble((f"{name:<8} | ", _COLOURS[name]), line), soft_wrap=True)


def _supervise(supervisor: Supervisor, placed: GpuPlacement, inside: bool) -> int:
    """`inside`: the target has the draft in its process."""
    target, say = supervisor.target, partial(supervisor.emit, "outrider")

    def ready() -> None:
        draft = "with the draft in its process" if inside else "without a draft"
        if supervisor.draft:
            draft = f"with a draft on {supervisor.draft.address}"
        say(f"ready on {target.address}, {draft}")
        flag = "" if target.address == "127.0.0.1:50051" else f" --target {target.address}"
        if supervisor.gateway:
            http = f"http://{supervisor.gateway.address}"
            say(f"OpenAI-compatible API at {http}/v1, chat page at {http}")
        say(f"try `outrider chat{flag}` in another terminal; Ctrl-C here stops all")

    if placed.summary:
        say(placed.summary + (", in its process" if inside and not placed.in_pass else ""))
    try:
        return run(supervisor.supervise(ready))
    except OSError as error:
        raise CommandFailed(f"cannot start {sys.executable}: {error.strerror}") from error


UP = Command(
    "up",
    "run a draft and a target on this machine, supervised",
    "Runs both services on this machine, with a private socket between them, and a gateway with --http. A draft or a\n"
    "gateway that dies is started again; when the target dies, the whole ends with its exit status. SIGTERM or Ctrl-C\n"
    "lets running requests finish.",
    _up,
    settings=(UpOptions,),
    needs="target",
)
TARGET = Command(
    "target", "run the target service alone (its own flags; see --help)", module="target_service", needs="target"
)
DRAFT = Command(
    "draft", "run the draft service alone (its own flags; see --help)", module="draft_service", needs="draft"
)
GATEWAY = Command(
    "gateway",
    "an OpenAI-compatible HTTP server in front of targets (its own flags; see --help)",
    module="outrider_gateway",
    needs="gateway",
)
TRAIN_HEAD = Command(
    "train-head",
    "train an EAGLE-3 head for a model, without data (see --help)",
    module="draft_service.training",
    needs="train",
)
MODEL = Command("model", "fetch, list or locate models (see --help)", module=MODEL_STORE, needs="target")
