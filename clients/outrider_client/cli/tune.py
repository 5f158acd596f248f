"""`outrider tune`: settings of drafts that pay with this model on this machine, as a file for the services."""

from __future__ import annotations

import argparse
import datetime
import shlex
import sys
import time
from pathlib import Path

from rich.progress import TimeElapsedColumn

from outrider.consoles import error_console
from outrider.runtime import run
from outrider.settings import SettingsError, settings_file
from outrider_client.bench.plot import require_matplotlib
from outrider_client.cli.base import Command, make_folders_of, options, table_console
from outrider_client.local.settings_file import to_toml, with_settings
from outrider_client.terminal.options import TuneOptions, request_counts
from outrider_client.terminal.waiting import ProgressBar
from outrider_client.tuning.report import file_comment, save_tuning_plot, sentences, tuning_table
from outrider_client.tuning.services import read_setup
from outrider_client.tuning.session import read_prompts, tune

_DESCRIPTION = """\
Tries shapes of drafted trees, and bounds on the rows that the target verifies, against the settings in force: both
on services of their own on this machine, in turn on the same prompts. The best is measured once more, and chosen
only if it is faster beyond the noise; else the file keeps the settings in force, which are the defaults and what
--config names.

examples:
  outrider tune --drafter trie --out outrider.toml
  outrider tune --drafter merged --minutes 30 --concurrency 1,8 --prompts prompts.jsonl --out outrider.toml --plot t.png
  outrider tune --candidates "trie.num_draft_tokens=12 trie.breadth=2; target.max_draft_nodes=20"
  outrider up --config outrider.toml"""


def _run(arguments: argparse.Namespace) -> int:
    wanted = options(TuneOptions, "tune", arguments)
    setup = read_setup(wanted, settings_file(arguments))
    loads, prompts = list(dict.fromkeys(request_counts(wanted.concurrency))), read_prompts(wanted.prompts)
    make_folders_of(wanted.out, wanted.plot)
    if wanted.out and Path(wanted.out).exists():
        # Settings and comments in it may exist nowhere else.
        raise SettingsError(f"--out: {wanted.out} is there already; name another file")
    if wanted.plot:
        require_matplotlib()
    begun = time.monotonic()
    with ProgressBar(error_console(), 60.0 * wanted.minutes, TimeElapsedColumn()) as bar:

        def note(what: str) -> None:
            elapsed = time.monotonic() - begun
            bar.show(what, completed=elapsed)
            bar.line(f"{elapsed:4.0f} s  {what} ...")

        tuning = run(tune(setup, loads, prompts, note))
    console = table_console()
    console.print(tuning_table(tuning))
    for line in sentences(tuning):
        console.print(line, markup=False)
    if wanted.plot:
        save_tuning_plot(tuning, Path(wanted.plot))
    if wanted.out:
        # What --config named, what was tuned, and what was chosen.
        settings = [*setup.identity, *(tuning.chosen.settings if tuning.chosen else ())]
        when = datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes")
        comment = file_comment(tuning, when, shlex.join(["outrider", *sys.argv[1:]]))
        Path(wanted.out).write_text(to_toml(with_settings(setup.document, settings), comment), encoding="utf-8")
        console.print(f"Written: {wanted.out}. `outrider up --config {wanted.out}` serves with it.", markup=False)
    return 0


TUNE = Command(
    "tune",
    "find the fastest settings of drafts for a model on this machine, and write them to a file",
    _DESCRIPTION,
    _run,
    settings=(TuneOptions,),
    needs="target",
)
