"""The yardstick: services with a model of real text at the cost of a large shape, plain and with every kind of draft.

    python -m benchmarks.widened.model smollm2-135m-instruct smollm2-135m-instruct MODEL HEAD --shape 8b
    python -m benchmarks.widened.run --model MODEL --head HEAD --json OUT.json [--concurrency 1,8,32]
        [--temperature 0,0.8] [--modes plain,lookup,trie,head,medusa,merged,random] [--placements second,same,inprocess]
        [--delay-ms 2] [--medusa HEADS] [--verification default,typical]

Each mode in each placement has its own target service, with the draft in a service on the second GPU (`second`) or the
target's (`same`), or in the target's process (`inprocess`). Tries and random drafts need no GPU: their service is the
same for `second` and `same`, and is measured once. `plain` has neither drafts nor lookup; `lookup` is the device's
prompt lookup, which the others have beside their drafts (unless `--target '{"lookup_tokens": 0}'`). `--delay-ms` is
added to the round trip to the draft.

A service is warmed up and, before every load, settles under it, with prompts that are not measured. Then it gets
prompts that it has never seen, in the same order for every mode: in closed loops, where each stream sends its next
request when its answer has ended, or with `--loop waves` in all streams at once. All answers have `--tokens` tokens.
Where drafts remember, the first repeat's prompts are sent once more (`prompts`: repeated). `tokens_per_second` is of
decoding alone: the tokens that arrived while all streams were between their first and last message
(`runs.decoding_rate`); with one stream that is each answer's time after its first message. `measured` has the tokens
and seconds of that part.

`--verification` has the modes of verification that requests choose: `default` leaves it to the target, which is
lossless, and `typical` is typical acceptance at the target's epsilon and delta (the target is started so that it allows
it). Each mode sends the same prompts to the same services, for its own tenants. Typical acceptance differs only above
temperature 0 and with drafts, so only there it is measured. Every row has its mode (`verification`) and the share of
its tokens that the model would not have drawn (`lossy_share`).

The JSON is written after every row. Services log to a folder beside it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.serving.clients import Clients
from benchmarks.shared.report import comma_separated, parser_of, show, write_json
from benchmarks.shared.workload import TASK_FILE, Prompt, folder_of
from benchmarks.widened.runs import NEW, REPEATED, Measuring, answers_of, read_tasks, run_figures, with_ratios
from benchmarks.widened.services import (
    IN_PROCESS,
    MODES,
    PLACEMENTS,
    PLAIN,
    REMEMBER,
    Subject,
    SweepPlan,
    started,
    subjects_of,
    tails,
)
from outrider.heads import head_source
from outrider.machine import describe_commit, describe_machine, describe_versions
from outrider.sampling import VerificationMode

# Verification by the target's choice, and the other mode that is measured.
DEFAULT, TYPICAL = "default", str(VerificationMode.TYPICAL.value)
Tasks = dict[str, list[Prompt]]
# A service that takes longer for a request hangs. Chosen: many times the time of any.
REQUEST_SECONDS = 300.0


class Record:
    """The rows so far, written to disk after each."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._file: Path = options.json
        self._head = {
            "machine": {**describe_machine(), "gpus": _gpus()},
            "versions": describe_versions(["triton"]),
            "commit": options.commit or describe_commit(),
            "command": shlex.join(sys.argv),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "settings": vars(options),
        }
        self._begin = time.monotonic()
        self.rows: list[dict[str, Any]] = []

    def add(self, row: dict[str, Any]) -> None:
        self.rows = with_ratios([*self.rows, row])
        show(line(self.rows[-1]))
        self.write()

    def write(self) -> None:
        seconds = round(time.monotonic() - self._begin, 1)
        write_json(self._file, {**self._head, "seconds": seconds, "results": self.rows})


def _gpus() -> list[str]:
    """Name and driver of every GPU, found without creating a context on one."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip().splitlines()


def sweep(options: argparse.Namespace, plan: SweepPlan, tasks: Tasks, record: Record) -> None:
    """Measure every mode in every placement. One that fails has a row with its error."""
    groups = [[one] for one in options.temperature] if options.apart else [options.temperature]
    for temperatures in groups:
        for subject in subjects_of(options.modes, options.placements):
            show(f"{subject.name}: starting")
            try:
                with (
                    started(plan, subject) as service,
                    Clients(service.address, options.clients, REQUEST_SECONDS) as clients,
                ):
                    for verification in verifications_of(options, subject, temperatures):
                        requested = "" if verification == DEFAULT else verification
                        measuring = Measuring(clients, service.page, tasks, options.tokens, requested)
                        differing = [one for one in temperatures if one > 0 or verification == DEFAULT]
                        for figures in measure(options, measuring, subject, differing, verification):
                            record.add(figures)
            except Exception as error:
                # Whatever failed, the other modes can still be measured.
                show(f"{subject.name} FAILED: {type(error).__name__}: {error}\n{tails(plan, subject)}")
                temperature = temperatures[0] if len(temperatures) == 1 else None
                row = {"temperature": temperature, "concurrency": None, "prompts": NEW}
                record.add({**named(subject, plan.delay_ms), **row, "error": f"{type(error).__name__}: {error}"})


def named(subject: Subject, delay_ms: float) -> dict[str, Any]:
    """The fields that identify a subject's rows. Only drafts in a separate service are delayed by the proxy."""
    apart = bool(subject.placement) and subject.placement != IN_PROCESS
    return {**subject._asdict(), "delay_ms": delay_ms if apart else 0.0}


def verifications_of(options: argparse.Namespace, subject: Subject, temperatures: Sequence[float]) -> list[str]:
    """The modes of verification of a subject; typical acceptance only with drafts and where not all is greedy."""
    differs = subject.mode != PLAIN and any(temperatures)
    return [one for one in options.verification if one == DEFAULT or differs]


def mode_of(verification: str, temperature: float) -> str:
    """The name of the mode that verifies drafts; the target's choice depends on the temperature."""
    if verification != DEFAULT:
        return verification
    chosen = VerificationMode.COUPLED if temperature else VerificationMode.GREEDY
    return str(chosen.value)


def measure(
    options: argparse.Namespace,
    measuring: Measuring,
    subject: Subject,
    temperatures: Sequence[float],
    verification: str = DEFAULT,
) -> Iterator[dict[str, Any]]:
    """A row for every load and temperature, and one more for repeated prompts where drafts remember."""
    measuring.warm_up(options.concurrency, temperatures)
    waves = options.loop == "waves"
    for temperature in temperatures:
        for concurrency in options.concurrency:
            measuring.settle(concurrency, temperature, options.settle_seconds)
            count = answers_of(concurrency, options.answers, options.least_answers)
            done = [measuring.repeat(concurrency, temperature, count, waves) for _ in range(options.repeats)]
            figures = {NEW: run_figures([run for run, _ in done], concurrency)}
            state = measuring.state()
            if options.repeated and subject.mode in REMEMBER:
                once_more = measuring.run(done[0][1], concurrency, waves)
                figures[REPEATED] = run_figures([once_more], concurrency)
            for prompts, found in figures.items():
                where = {"concurrency": concurrency, "temperature": temperature, "prompts": prompts}
                where |= {**named(subject, options.delay_ms), "loop": options.loop}
                where["verification"] = mode_of(verification, temperature)
                yield {**where, **found, **state, "laps_of_prompts": measuring.laps}


def _cell(number: float | None, form: str, width: int) -> str:
    return (format(number, form) if number is not None else "-").rjust(width)


COLUMNS = (
    "mode        placement    verified  prompts     c    T     tok/s  ratio  tok/step  lossy   hits  wait p50/p99 ms"
    "   idle"
)


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    name = f"{row['mode']:<11s} {row['placement']:<12s} {row.get('verification', ''):<9s} {row['prompts']:<9s}"
    if "error" in row:
        return f"{name} FAILED: {row['error']}"
    waits = row["wait_ms"]
    wait = f"{_cell(waits['p50'], '.2f', 7)} /{_cell(waits['p99'], '.2f', 7)}"
    return (
        f"{name} {row['concurrency']:>3d} {row['temperature']:>4g} {_cell(row['tokens_per_second'], '.1f', 9)}"
        f" {_cell(row['ratio_to_plain'], '.3f', 6)} {_cell(row['tokens_per_step'], '.2f', 9)}"
        f" {_cell(row['lossy_share'], '.3f', 6)}"
        f" {_cell(row['hit_share'], '.2f', 6)} {wait} {_cell(row['device_idle_share'], '.3f', 6)}"
        + (" (not drafting)" if row["placement"] and not row["speculation_active"] else "")
    )


def parse(arguments: Sequence[str] | None = None, about: str | None = __doc__) -> argparse.Namespace:
    parser = parser_of(about)
    parser.add_argument("--model", required=True, help="folder that benchmarks.widened.model wrote, or any model")
    parser.add_argument("--head", default="", help="folder of the head that it wrote, or a head's name")
    parser.add_argument("--medusa", default="", help="folder of Medusa heads that benchmarks.widened.medusa wrote")
    parser.add_argument("--prompts", type=Path, default=TASK_FILE, help="JSONL of id, task and turns")
    parser.add_argument("--longest-prompt", type=int, default=1500, help="tokens; longer prompts are left out")
    words = comma_separated(str)
    parser.add_argument("--modes", default="plain,lookup,trie,head,merged", type=words, help=", ".join(MODES))
    parser.add_argument("--placements", default="second", type=words, help=", ".join(PLACEMENTS))
    parser.add_argument("--concurrency", default="1,8,32", type=comma_separated(int))
    parser.add_argument("--temperature", default="0", type=comma_separated(float))
    parser.add_argument("--verification", default=DEFAULT, type=words, help=f"{DEFAULT}, {TYPICAL}, or both")
    parser.add_argument("--tokens", type=int, default=128, help="of every answer")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="added to the round trip to the draft")
    parser.add_argument("--repeats", type=int, default=2, help="runs of each load, each with other prompts")
    parser.add_argument("--answers", type=int, default=2, help="of each stream in a run")
    parser.add_argument("--least-answers", type=int, default=7, help="of a run, over all streams")
    parser.add_argument("--settle-seconds", type=float, default=2.0, help="of each load before it is measured")
    parser.add_argument("--loop", default="closed", choices=("closed", "waves"))
    parser.add_argument("--apart", action="store_true", help="fresh services for each temperature")
    parser.add_argument("--no-repeated", dest="repeated", action="store_false", help="repeat no prompts")
    parser.add_argument("--device", default="cuda:0", help="of the target: cpu, cuda:0")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--clients", type=int, default=8, help="client processes")
    parser.add_argument("--target", default="{}", type=json.loads, help="more settings of the target, as JSON")
    parser.add_argument("--eagle", default="{}", type=json.loads, help="more settings of the head, as JSON")
    parser.add_argument("--drafters", default="{}", type=json.loads, help="settings of drafters by section, as JSON")
    parser.add_argument("--commit", default="", help="to record where there is no repository")
    parser.set_defaults(json=Path("widened.json"))
    options = parser.parse_args(arguments)
    unknown = (set(options.modes) - set(MODES)) | (set(options.placements) - set(PLACEMENTS))
    if unknown:
        parser.error(f"not known: {', '.join(sorted(unknown))}")
    if not options.verification or set(options.verification) - {DEFAULT, TYPICAL}:
        parser.error(f"--verification takes {DEFAULT} and {TYPICAL}")
    if {"head", "merged"} & set(options.modes) and not options.head:
        parser.error("the modes head and merged need --head")
    if "medusa" in options.modes and not options.medusa:
        parser.error("the mode medusa needs --medusa")
    return options


def plan_of(options: argparse.Namespace) -> SweepPlan:
    """The plan of the services with these options."""
    return SweepPlan(
        model=str(folder_of(options.model)),
        head=str(head_source(options.head)) if options.head else "",
        medusa=options.medusa,
        device=options.device,
        dtype=options.dtype,
        most=max(options.concurrency),
        room=options.longest_prompt + options.tokens,
        delay_ms=options.delay_ms,
        logs=options.json.with_name(options.json.stem + ".logs"),
        target=({"allow_lossy": True} if TYPICAL in options.verification else {}) | options.target,
        drafters={**options.drafters, "eagle": {**options.drafters.get("eagle", {}), **options.eagle}},
    )


def main() -> None:
    options = parse()
    # So that services are ended on SIGTERM too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    options.json.parent.mkdir(parents=True, exist_ok=True)
    plan, record = plan_of(options), Record(options)
    from transformers import AutoTokenizer

    tasks = read_tasks(AutoTokenizer.from_pretrained(plan.model), options.prompts, options.longest_prompt)
    show(f"{sum(map(len, tasks.values()))} prompts of {len(tasks)} tasks")
    try:
        sweep(options, plan, tasks, record)
    finally:
        record.write()
        show("\n".join(["", COLUMNS, *map(line, record.rows)]))


if __name__ == "__main__":
    main()
