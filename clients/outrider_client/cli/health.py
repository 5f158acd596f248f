"""`outrider health`: for people, scripts and container health checks."""

from __future__ import annotations

import argparse

from outrider.consoles import output_console
from outrider.errors import OutriderError
from outrider.healthcheck import LIVENESS
from outrider_client.cli.base import Command, options, wrong_service
from outrider_client.client import TARGET_SERVICE, Client
from outrider_client.connection import Connection
from outrider_client.draft import DRAFT_SERVICE, DraftClient
from outrider_client.failures import ServiceUnreachable
from outrider_client.terminal.options import ClientOptions


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--draft", metavar="ADDRESS", default="", help="ask this draft service instead of the target")
    parser.add_argument("--live", action="store_true", help="ask whether its process lives, ready for calls or not")


async def _run(arguments: argparse.Namespace) -> int:
    client = options(ClientOptions, "client", arguments)
    kind = "draft" if arguments.draft else "target"
    address = arguments.draft or client.target
    service, describe = (LIVENESS, _describe_process) if arguments.live else _SERVICES[kind]
    console = output_console()
    try:
        async with client.connection(address) as connection:
            # Without --timeout.
            healthy = await connection.serving(service, client.deadline or 5.0)
            state = "SERVING" if healthy else "NOT_SERVING"
            console.print(f"{address} {state}" + (f"  {await describe(connection)}" if healthy else ""), soft_wrap=True)
    except ServiceUnreachable as error:
        console.print(f"{address} UNREACHABLE  {error.cause}", soft_wrap=True, markup=False)
        return 1
    except OutriderError as error:
        # A status without a reason, as of a server of another kind, has only its code.
        reason, message = error.metadata.get("code", error.reason), error.message
        # gRPC's statuses of a health check that does not know the service, and of a server without health checks.
        if reason in ("NOT_FOUND", "UNIMPLEMENTED"):
            message = wrong_service(kind, message)
        console.print(f"{address} {reason}  {message}", soft_wrap=True, markup=False)
        return 1
    return 0 if healthy else 1


async def _describe_process(connection: Connection) -> str:
    return "alive" if await connection.serving() else "alive, not ready"


async def _describe_target(connection: Connection) -> str:
    info = await Client(connection).info()
    return f"model {info.model}, {info.dtype}, context {info.max_context}, drafter {info.drafter or 'none'}"


async def _describe_draft(connection: Connection) -> str:
    info = await DraftClient(connection).info()
    return f"drafter {info.drafter}, trees of at most {info.limits.max_nodes} nodes, context {info.max_context}"


# For each kind of service, its name in health checks, and what describes one that serves.
_SERVICES = {"target": (TARGET_SERVICE, _describe_target), "draft": (DRAFT_SERVICE, _describe_draft)}
HEALTH = Command(
    "health",
    "check whether a service is healthy (exit status 0 if so)",
    "Asks the target, or a draft service with --draft, whether it is ready for calls, or, with --live, whether its "
    "process lives: one that loads a model or drains does, and is not ready. The exit status is 0 when it is.",
    _run,
    settings=(ClientOptions,),
    add_flags=_add_flags,
)
