"""`outrider demo`: see it work, and see that it is lossless."""

from __future__ import annotations

import argparse

from outrider.consoles import error_console, output_console
from outrider_client.cli.base import EXIT_DIFFERENT, Command, CommandFailed, options
from outrider_client.terminal.options import DemoOptions


async def _run(arguments: argparse.Namespace) -> int:
    # Imported here: services and trace receiver are not part of a client's installation.
    from outrider_client.demo.run import pull_model, run_demo

    demo = options(DemoOptions, "demo", arguments)
    if await pull_model(demo.model) != 0:
        raise CommandFailed(f"cannot get the model {demo.model}")
    if not await run_demo(demo, output_console()):
        error_console().print("[bold red]the outputs differ, in fp32, where they must not[/]")
        return EXIT_DIFFERENT
    return 0


DEMO = Command(
    "demo",
    "run a small model, and check that drafts change none of its output",
    "Fetches a small model, runs both services as two processes, streams an answer with drafted tokens in one\n"
    "colour and the model's own in another, and the same prompt without drafts. Both outputs must be identical:\n"
    "the exit status is 3 if they are not.",
    _run,
    settings=(DemoOptions,),
    needs="all",
)
