"""The description of a command, and how its failures become messages and exit statuses."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.markup import escape

from outrider.consoles import error_console, output_console
from outrider.errors import OutriderError
from outrider.roles import missing_for, missing_module
from outrider.runtime import run
from outrider.settings import SettingsError, add_flags, load, settings_file, unreadable
from outrider.unreachable import SPEAKS_HTTP, SPEAKS_NO_HTTP2, TlsProblem
from outrider.visible import one_line
from outrider_client.failures import ServiceUnreachable
from outrider_client.local.stack import ServiceFailed

Options = TypeVar("Options")
# Statuses of a command: after Ctrl-C, and where outputs differ that must not.
INTERRUPTED, EXIT_DIFFERENT = 130, 3
# gRPC's status of a call that the service does not implement.
_NO_METHOD = "UNIMPLEMENTED"
_TLS_ADVICE = {
    TlsProblem.EXPECTED: "If it speaks TLS, give --tls, or --tls-ca FILE where its certificate has an authority of its "
    "own; if it asks for a client's certificate, --tls-certificate and --tls-key.",
    TlsProblem.NOT_SPOKEN: "Leave out --tls, --tls-ca and --tls-certificate, or take the port that speaks TLS.",
    TlsProblem.NOT_TRUSTED: "--tls-ca FILE names who signed it; the address has to be a name in the certificate.",
}


class CommandFailed(Exception):
    """The command cannot go on; the message is for its user."""


def _not_run(_: argparse.Namespace) -> int:
    raise AssertionError("a command with a module is run as that module")


@dataclass(frozen=True)
class Command:
    """One command. `run` is a function or a coroutine's; with a `module`, everything after the name is passed to
    `python -m module`. `needs` is the extra of the package that it requires. `settings` are classes for `options`, each
    setting a flag; `add_flags` adds other flags. `service` is the one that it calls, if any: target or draft."""

    name: str
    summary: str
    description: str = ""
    run: Callable[[argparse.Namespace], int | Coroutine[Any, Any, int]] = _not_run
    settings: tuple[type[Any], ...] = ()
    add_flags: Callable[[argparse.ArgumentParser], None] = lambda _: None
    module: str | None = None
    needs: str | None = None
    service: str = "target"

    def set_up(self, parser: argparse.ArgumentParser) -> None:
        if self.settings:
            add_config_flag(parser)
        self.add_flags(parser)
        for kind in self.settings:
            add_flags(parser, kind)


def add_config_flag(parser: argparse.ArgumentParser) -> None:
    """Add --config, which `settings_file` reads."""
    parser.add_argument("--config", metavar="FILE", help="TOML file with settings (default: OUTRIDER_CONFIG)")


def options(kind: type[Options], section: str, arguments: argparse.Namespace) -> Options:
    """A settings class from flags, environment and file. Raises `SettingsError`."""
    return load(kind, section, arguments, os.environ, settings_file(arguments))


def make_folders_of(*paths: str) -> None:
    """Create the parent folders of output files, before hours of measuring. Raises `SettingsError` where that fails."""
    for path in filter(None, paths):
        try:
            Path(path).absolute().parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SettingsError(f"{path}: {error.strerror}") from None


def table_console() -> Console:
    """The console for tables; a file or a pipe counts as wide."""
    # Columns of a pipe. Chosen.
    return output_console(width=None if sys.stdout.isatty() else 140)


def advice(error: ServiceUnreachable) -> str:
    """What the user of a command can do about an unreachable service."""
    if error.cause in (SPEAKS_HTTP, SPEAKS_NO_HTTP2):
        return "A target listens on a port of its own, 50051 by default."
    if error.tls_problem is None:
        return "Is it running? `outrider up` starts both services on this machine."
    return _TLS_ADVICE[error.tls_problem]


def failure_line(error: OutriderError, service: str = "target") -> str:
    """The message for an error of a service, with the facts that it sent, or for a server that is no such `service`."""
    if error.metadata.get("code") == _NO_METHOD:
        return wrong_service(service, f"it does not have this call ({_NO_METHOD})")
    # The message begins with the field's name already.
    facts = ", ".join(f"{name} {value}" for name, value in sorted(error.metadata.items()) if name != "field")
    # A service of another make may write anything.
    return one_line(f"{error.message} ({error.reason}{f': {facts}' if facts else ''})")


def wrong_service(service: str, why: str) -> str:
    """The message for a server that is not the expected `service`, target or draft."""
    port = {"target": 50051, "draft": 50052}[service]
    return (
        f"what answers at --{service} is no {service} service, or an older one: {why}; a {service} service listens on "
        f"port {port} by default"
    )


def run_command(command: Command, parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    """Run a command; its failures become a message and an exit status."""
    try:
        if command.needs and (message := missing_for(command.needs)):
            raise CommandFailed(message)
        status = command.run(arguments)
        return status if isinstance(status, int) else run(status)
    except SettingsError as error:
        parser.error(str(error))
    except OutriderError as error:
        # The client names its own argument, which a user of the command line has not given.
        if isinstance(error.__context__, UnicodeEncodeError):
            return _fail(_no_utf8(error.__context__))
        return _fail(failure_line(error, command.service))
    except ServiceUnreachable as error:
        return _fail(f"{error}\n{advice(error)}")
    except ServiceFailed as error:
        return _fail("\n".join([str(error), *error.tail]))
    except CommandFailed as error:
        return _fail(str(error))
    except ModuleNotFoundError as error:
        if (missing := missing_module(error)) is None:
            raise
        return _fail(missing)
    except UnicodeEncodeError as error:
        return _fail(_no_utf8(error))
    except OSError as error:
        if error.filename is None:
            # Most likely of the standard output, which `exit_status` reports.
            raise
        return _fail(unreadable(error.filename, error))
    except KeyboardInterrupt:
        return INTERRUPTED


def _no_utf8(error: UnicodeEncodeError) -> str:
    """Arguments that were no UTF-8 have what stands for their bytes; a path may, but nothing that is sent."""
    # Of a text that is wrong.
    return f"this text is no UTF-8: {one_line(error.object[:80])}"


def _fail(message: str) -> int:
    error_console().print(f"[bold red]error:[/] {escape(message)}", soft_wrap=True)
    return 1
