"""`outrider head`: which EAGLE heads come with Outrider, and where they are."""

from __future__ import annotations

import argparse

from outrider.consoles import output_console
from outrider.heads import shipped_heads
from outrider_client.cli.base import Command, CommandFailed


def _add_flags(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", metavar="ACTION", dest="action", required=True)
    actions.add_parser("list", help="heads that come with Outrider, and for which models", allow_abbrev=False)
    actions.add_parser("path", help="print the folder of one", allow_abbrev=False).add_argument("name")


def _run(arguments: argparse.Namespace) -> int:
    out = output_console(soft_wrap=True)
    heads = shipped_heads()
    if arguments.action == "path":
        folder = next((head.folder for head in heads if head.name == arguments.name), None)
        if folder is None:
            names = ", ".join(head.name for head in heads) or "none in this installation"
            raise CommandFailed(f"no head called {arguments.name} comes with Outrider (there: {names})")
        out.print(str(folder), markup=False)
        return 0
    for head in heads:
        length, target = head.accepted_length, head.target or "a model that it does not name"
        recorded = f", {length:.2f} tokens a step on its target's own text" if length is not None else ""
        out.print(f"{head.name}  for {target}, {head.megabytes:.0f} MB{recorded}", markup=False)
    if not heads:
        out.print("no head in this installation; `outrider train-head` makes one")
    return 0


HEAD = Command(
    "head",
    "list or locate the EAGLE heads that come with Outrider",
    "A head drafts for one model: `outrider draft --drafter eagle --head NAME`.",
    _run,
    add_flags=_add_flags,
)
