"""`outrider bench`: throughput, latency and acceptance, with the proof that outputs are the same."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from rich.progress import MofNCompleteColumn, TimeRemainingColumn

from outrider.consoles import error_console
from outrider.roles import missing_for
from outrider.runtime import run
from outrider_client.bench.plot import require_matplotlib, save_plot
from outrider_client.bench.profile import profile_table
from outrider_client.bench.report import differing, undrafted
from outrider_client.bench.samples import TRANSFORMERS
from outrider_client.bench.session import make_plan, measure
from outrider_client.bench.table import figures_table
from outrider_client.cli.base import EXIT_DIFFERENT, Command, CommandFailed, make_folders_of, options, table_console
from outrider_client.terminal.options import AccessOptions, BenchOptions, ClientOptions, flag_words
from outrider_client.terminal.waiting import ProgressBar

_DESCRIPTION = """\
Measures modes against each other on the prompts of a file. Modes take turns within every block of prompts, so that
noise of the machine hits all of them. Outputs are held against plain decoding, token by token; the exit status is
3 when greedy outputs differ in fp32, where they must not.

examples:
  outrider bench --prompts prompts.jsonl --limit 14 --modes plain,trie --json figures.json --plot figures.png
  outrider bench --prompts prompts.jsonl --modes plain,trie,prompt_lookup --draft-placement remote,inprocess
  outrider bench --prompts prompts.jsonl --modes plain,transformers --concurrency 1
  outrider bench --prompts prompts.jsonl --target 127.0.0.1:50051 --modes plain,trie --concurrency 1,4,16"""


def _run(arguments: argparse.Namespace) -> int:
    bench = options(BenchOptions, "bench", arguments)
    # Against a running target a client is enough.
    if (not bench.target or TRANSFORMERS in bench.modes) and (missing := missing_for("target")):
        raise CommandFailed(missing)
    reach = options(ClientOptions, "client", arguments)
    for flags in (bench.target_flags, bench.draft_flags):
        flag_words(flags)
    make_folders_of(bench.json, bench.plot)
    if bench.plot:
        require_matplotlib()
    document = run(_bench(bench, reach))
    console = table_console()
    console.print(figures_table(document, console.width))
    if bench.profile:
        console.print(profile_table(document["ms_per_step"]))
    if bench.json:
        Path(bench.json).write_text(json.dumps(document, indent=2) + "\n")
    if bench.plot:
        save_plot(document, Path(bench.plot))
    return _verdict(document)


async def _bench(bench: BenchOptions, reach: ClientOptions) -> dict[str, Any]:
    plan = make_plan(bench)
    total, answers, line_at = plan.requests(), 0, time.monotonic()
    with ProgressBar(error_console(), total, MofNCompleteColumn(), TimeRemainingColumn()) as bar:

        def log(line: str) -> None:
            nonlocal line_at
            line_at = time.monotonic()
            bar.line(line)

        def waits_for(what: str) -> None:
            bar.show(what)
            log(f"{what} ...")

        def answered(where: str) -> None:
            nonlocal answers
            answers += 1
            bar.show(where, completed=answers)
            # Between lines, where there is no bar.
            if time.monotonic() - line_at > 30.0:
                log(f"{answers} of {total} answers: {where}")

        return await measure(bench, reach, plan, waits_for, answered)


def _verdict(document: dict[str, Any]) -> int:
    """Report whether outputs were the same, and which drafter drafted nothing. Returns the exit status."""
    different = differing(document["results"])
    console = error_console()
    for mode in undrafted(document["results"]):
        console.print(
            f"{mode.label} drafted no token in any answer: its figures are those of plain decoding, and the logs of "
            "draft and target have the reason",
            soft_wrap=True,
        )
    if different and document["target"]["dtype"] == "float32":
        console.print(f"[bold red]{different} outputs differ from plain decoding, in fp32[/]")
        return EXIT_DIFFERENT
    if different:
        console.print(
            f"{different} outputs differ from plain decoding: in {document['target']['dtype']} a batch of another "
            "shape rounds differently, and near-ties fall the other way. In float32 they may not."
        )
    return 0


BENCH = Command(
    "bench",
    "measure throughput, latency and acceptance by task and concurrency",
    _DESCRIPTION,
    _run,
    settings=(BenchOptions, AccessOptions),
)
