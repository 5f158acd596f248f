"""`outrider weights`: exchange the weights of a running target."""

from __future__ import annotations

import argparse
from pathlib import Path

from outrider.consoles import output_console
from outrider.settings import SettingsError, add_flags, unreadable
from outrider.weight_updates import RunningRequests
from outrider_client.cli.base import Command, CommandFailed, add_config_flag, options
from outrider_client.client import Client
from outrider_client.failures import ServiceUnreachable
from outrider_client.terminal.options import ClientOptions


def _add_flags(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", metavar="ACTION", dest="action", required=True)
    update = actions.add_parser(
        "update",
        help="exchange the weights for others of the same model",
        description="Has the target read other weights of the same names and shapes, from a folder on its own "
        "machine or from safetensors files that are sent to it, and exchange them between two steps. Needs an "
        "operator's token.",
        allow_abbrev=False,
    )
    update.add_argument("files", nargs="*", type=Path, metavar="FILE", help="safetensors files to send")
    update.add_argument("--folder", default="", help="folder on the target's machine, below its --weights-folder")
    update.add_argument(
        "--running",
        default=RunningRequests.DRAIN.value,
        choices=[one.value for one in RunningRequests],
        help="requests that have begun end with the old weights first, are ended, or go on with the new ones "
        "(default: %(default)s)",
    )
    add_config_flag(update)
    add_flags(update, ClientOptions)


async def _run(arguments: argparse.Namespace) -> int:
    reach = options(ClientOptions, "client", arguments)
    folder, files, running = arguments.folder, arguments.files, RunningRequests(arguments.running)
    if bool(folder) == bool(files):
        raise SettingsError("either --folder or files are needed")
    try:
        async with Client(reach.connection(reach.target)) as target:
            done = await target.update_weights(folder=folder, files=files, running=running, timeout=reach.deadline)
    except ServiceUnreachable:
        # Also an `OSError`, but not of a file.
        raise
    except OSError as error:
        raise CommandFailed(unreadable(error.filename, error) if error.filename else str(error)) from None
    output_console().print(
        f"model version {done.model_version}: {done.tensors} tensors, {done.bytes / 1e6:.1f} MB; read in "
        f"{done.prepare:.3f} s, paused for {done.pause:.3f} s; {done.aborted} requests "
        f"ended, {done.continued} read again",
        soft_wrap=True,
    )
    return 0


WEIGHTS = Command(
    "weights",
    "exchange the weights of a target while it serves",
    "Exchanges the weights of a target between two of its steps, without a restart.",
    _run,
    add_flags=_add_flags,
)
