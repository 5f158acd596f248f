"""vLLM with Outrider's draft service beside vLLM's own n-gram speculation and plain decoding, on one GPU.

    PYTHONPATH=protos:clients:. python -m benchmarks.serving.vllm_draft --model FOLDER [--concurrency 1,8,32]
        [--modes plain,ngram,outrider] [--draft ADDRESS | --draft-python PYTHON] [--json FILE]
    ... --shape CONFIG_FOLDER --prompt-tokens 256      random weights of a config.json's shape

Traffic repeats itself: every prompt is sent `--rounds` times, `--concurrency` at once, each concurrency with its own
prompts. The first round measures a draft that has not seen the text, the others one that has seen the answers. Decoding
is greedy, and answers are compared with those of plain decoding in its first round. vLLM's greedy decoding differs
between batches of different shapes; plain decoding's other rounds show by how much.

Each mode runs vLLM in a separate process, because vLLM does not release a GPU. Without `--draft` a draft service
with a trie is started for it, by `--draft-python` where vLLM's own environment has no `outrider[draft]`. Written for
vLLM 0.24.0, without prefix caching, as `vllm_peer.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.serving.vllm_peer import ENVIRONMENT, checked, describe_peer, engine_parser, prompts_of
from benchmarks.serving.vllm_peer import engine_options as peer_options
from benchmarks.shared.processes import process, wait_for
from benchmarks.shared.report import comma_separated, show, write_json
from benchmarks.shared.workload import Prompt, wave

MODES = ("plain", "ngram", "outrider")
# Of a round; fewer are too few to compare modes.
_LEAST_PROMPTS = 8
_COUNTERS = {
    "vllm:spec_decode_num_drafts": "drafts",
    "vllm:spec_decode_num_draft_tokens": "drafted",
    "vllm:spec_decode_num_accepted_tokens": "accepted",
}


@dataclass(frozen=True)
class Round:
    """One round of one concurrency: seconds, answers in the order of the prompts, and what vLLM's counters added."""

    mode: str
    concurrency: int
    number: int
    seconds: float
    answers: list[list[int]]
    counted: dict[str, float]


def engine_options(options: argparse.Namespace) -> dict[str, Any]:
    """Arguments of `vllm.LLM` in one mode."""
    settings = peer_options(options) | {"disable_log_stats": False}
    if options.mode == "outrider":
        settings["speculative_config"] = {
            "method": "custom_class",
            "model": "outrider_vllm.Proposer",
            "num_speculative_tokens": options.draft_tokens,
        }
        settings["additional_config"] = {
            "outrider": {"draft": options.draft, "wait_ms": options.wait_ms, "log_seconds": 10}
        }
    return {**settings, **options.engine}


def counted(llm: Any) -> dict[str, float]:
    """vLLM's counters of speculation, 0 where it does not speculate."""
    totals = dict.fromkeys(_COUNTERS.values(), 0.0)
    for metric in llm.get_metrics():
        if metric.name in _COUNTERS:
            totals[_COUNTERS[metric.name]] += metric.value
    return totals


def measure(llm: Any, params: Any, prompts: Sequence[Prompt], options: argparse.Namespace) -> Iterator[Round]:
    """Every round at every concurrency. `params` are greedy, and end at a number of tokens."""
    begin = 0
    for concurrency in options.concurrency:
        # Warms up this size, with prompts that are not measured.
        generate(llm, params, wave(prompts, -1, concurrency))
        waves = max(options.waves, math.ceil(_LEAST_PROMPTS / concurrency))
        own = [prompts[place % len(prompts)] for place in range(begin, begin + waves * concurrency)]
        begin += len(own)
        for number in range(options.rounds):
            before, started = counted(llm), time.perf_counter()
            answers = [
                answer
                for place in range(0, len(own), concurrency)
                for answer in generate(llm, params, own[place : place + concurrency])
            ]
            seconds, after = time.perf_counter() - started, counted(llm)
            change = {name: after[name] - before[name] for name in after}
            yield Round(options.mode, concurrency, number, seconds, answers, change)


def generate(llm: Any, params: Any, prompts: Sequence[Prompt]) -> list[list[int]]:
    """The answers to prompts that are sent at once."""
    outputs = llm.generate([{"prompt_token_ids": list(ids)} for ids in prompts], params, use_tqdm=False)
    return [list(one.outputs[0].token_ids) for one in outputs]


def figures(one: Round, reference: Round | None) -> dict[str, Any]:
    """A row of the table; `reference` is plain decoding's first round."""
    tokens = sum(map(len, one.answers))
    drafts = one.counted["drafts"]
    row: dict[str, Any] = {
        "mode": one.mode,
        "concurrency": one.concurrency,
        "round": one.number,
        "tokens": tokens,
        "seconds": one.seconds,
        "tokens_per_second": tokens / one.seconds,
        # Of steps with a draft, the target's own token included.
        "tokens_per_drafted_step": 1 + one.counted["accepted"] / drafts if drafts else None,
        "drafted": one.counted["drafted"],
        "accepted": one.counted["accepted"],
    }
    if reference is not None:
        pairs = list(zip(one.answers, reference.answers, strict=True))
        row["x_plain"] = row["tokens_per_second"] * reference.seconds / sum(map(len, reference.answers))
        row["equal_answers"] = sum(answer == plain for answer, plain in pairs) / len(pairs)
        row["equal_tokens"] = sum(_common(*pair) for pair in pairs) / sum(len(plain) for _, plain in pairs)
    return row


def _common(answer: Sequence[int], plain: Sequence[int]) -> int:
    """Tokens before the first that differs."""
    return next(
        (place for place, (one, other) in enumerate(zip(answer, plain, strict=False)) if one != other),
        min(len(answer), len(plain)),
    )


def line(row: dict[str, Any]) -> str:
    """A row as a line of text."""
    shown = [f"{row['mode']:<8} c={row['concurrency']:<3} round {row['round']}  {row['tokens_per_second']:9.1f} tok/s"]
    if "x_plain" in row:
        shown.append(f"{row['x_plain']:5.2f} x plain  equal answers {row['equal_answers']:4.0%}")
        shown.append(f"tokens {row['equal_tokens']:4.0%}")
    if row["tokens_per_drafted_step"]:
        shown.append(f"{row['tokens_per_drafted_step']:.2f} tokens a drafted step, {row['drafted']:.0f} drafted")
    return "  ".join(shown)


@contextlib.contextmanager
def draft_service(options: argparse.Namespace) -> Iterator[str]:
    """The address of `--draft`, or of a draft service that is started with an empty trie."""
    if options.draft:
        yield options.draft
        return
    with tempfile.TemporaryDirectory() as folder:
        address = f"unix:{folder}/draft.sock"
        arguments = ["-m", "draft_service", "--listen", address, "--drafter", "trie"]
        without_gpu = {"CUDA_VISIBLE_DEVICES": ""}
        with process(*arguments, environment=without_gpu, python=options.draft_python) as running:
            wait_for(address, running)
            yield address


def run_mode(options: argparse.Namespace) -> None:
    """Measure vLLM in one mode, in a separate process. Each round is written when it has ended."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    count = sum(max(options.waves * c, _LEAST_PROMPTS + c) for c in options.concurrency) + max(options.concurrency)
    prompts = prompts_of(options, count)
    from vllm import LLM, SamplingParams

    llm = LLM(**engine_options(options))
    params = SamplingParams(
        temperature=0.0, max_tokens=options.max_tokens, ignore_eos=True, detokenize=not options.shape
    )
    with options.rounds_file.open("w") as file:
        file.write(json.dumps(describe_peer()) + "\n")
        for one in measure(llm, params, prompts, options):
            file.write(json.dumps(vars(one)) + "\n")
            file.flush()


def compare(options: argparse.Namespace, arguments: Sequence[str]) -> dict[str, Any]:
    """Measure every mode, one after the other; one that fails has no rows."""
    rows: list[dict[str, Any]] = []
    machine: dict[str, str] = {}
    references: dict[int, Round] = {}
    for mode in options.modes:
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            path = Path(folder) / "rounds.jsonl"
            command = [sys.executable, "-m", "benchmarks.serving.vllm_draft", *arguments]
            command += ["--mode", mode, "--rounds-file", str(path)]
            if mode == "outrider":
                command += ["--draft", stack.enter_context(draft_service(options))]
            status = subprocess.run(command, check=False).returncode
            if status:
                sys.stderr.write(f"vLLM ended with status {status} in mode {mode}\n")
            written = path.read_text().splitlines() if path.exists() else []
        machine = machine or (json.loads(written[0]) if written else {})
        for text in written[1:]:
            one = Round(**json.loads(text))
            if mode == "plain" and not one.number:
                references[one.concurrency] = one
            rows.append(figures(one, references.get(one.concurrency)))
            show(line(rows[-1]))
    return {"machine": machine | {"command": " ".join(sys.argv)}, "cores": os.cpu_count(), "results": rows}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = engine_parser(__doc__)
    parser.add_argument("--modes", default=",".join(MODES), type=comma_separated(str))
    parser.add_argument("--concurrency", default="1,8,32", type=comma_separated(int))
    parser.add_argument("--rounds", type=int, default=3, help="how often each prompt is sent")
    parser.add_argument("--waves", type=int, default=2, help="of new prompts in a round, of eight prompts at least")
    parser.add_argument("--draft-tokens", type=int, default=8, help="tokens of Outrider's chains")
    parser.add_argument("--wait-ms", type=float, default=5.0, help="bound of a wait for the draft")
    parser.add_argument("--draft", default="", help="address of a draft service that runs")
    parser.add_argument("--draft-python", default=sys.executable, help="interpreter that has outrider[draft]")
    # For the process of one mode.
    parser.add_argument("--mode", default="", choices=("", *MODES), help=argparse.SUPPRESS)
    parser.add_argument("--rounds-file", type=Path, help=argparse.SUPPRESS)
    options = checked(parser, arguments)
    if unknown := set(options.modes) - set(MODES):
        parser.error(f"--modes: there is no {sorted(unknown)[0]}")
    return options


def main() -> None:
    options = parse()
    if options.mode:
        run_mode(options)
        return
    document = compare(options, sys.argv[1:])
    write_json(options.json, document)


if __name__ == "__main__":
    main()
