"""vLLM with Outrider's draft service beside vLLM's own n-gram speculation and plain decoding, on one GPU.

    PYTHONPATH=protos:clients:. python -m benchmarks.serving.vllm_draft --model FOLDER [--concurrency 1,8,32]
        [--modes plain,ngram,outrider] [--draft ADDRESS | --draft-python PYTHON] [--json FILE]
    ... --shape CONFIG_FOLDER --prompt-tokens 256      random weights of a config.json's shape

Traffic repeats itself: every prompt is asked `--rounds` times, `--concurrency` at once, each concurrency with prompts
of its own. The first round says what a draft that knows nothing brings, the others what one that has heard the answers
does. Decoding is greedy, and answers are held to those of plain decoding in its first round. Greedy decoding of vLLM
is not the same for batches of other shapes: plain decoding's other rounds say how much of a difference that makes.

Each mode has vLLM in a process of its own, because vLLM does not give a GPU back. Without `--draft` a draft service
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

from benchmarks.serving.services import wait_for
from benchmarks.serving.vllm_peer import ENVIRONMENT, describe_peer
from benchmarks.serving.vllm_peer import engine_options as peer_options
from benchmarks.shared.report import parser_of, write_json
from benchmarks.shared.workload import Prompt, random_prompts, read_prompts, wave

MODES = ("plain", "ngram", "outrider")
# Fewer answers say nothing of a mode.
_LEAST_PROMPTS = 8
_COUNTERS = {
    "vllm:spec_decode_num_drafts": "drafts",
    "vllm:spec_decode_num_draft_tokens": "drafted",
    "vllm:spec_decode_num_accepted_tokens": "accepted",
}


@dataclass(frozen=True)
class Round:
    """One round of one concurrency: its seconds, its answers in the order of the prompts, and what vLLM counted."""

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
    return settings | options.engine


def counted(llm: Any) -> dict[str, float]:
    """vLLM's counters of speculation so far, 0 where it does not speculate."""
    totals = dict.fromkeys(_COUNTERS.values(), 0.0)
    for metric in llm.get_metrics():
        if metric.name in _COUNTERS:
            totals[_COUNTERS[metric.name]] += metric.value
    return totals


def measure(llm: Any, params: Any, prompts: Sequence[Prompt], options: argparse.Namespace) -> Iterator[Round]:
    """Every round at every concurrency. `params` are greedy, and end at a number of tokens."""
    begin = 0
    for concurrency in options.concurrency:
        # The last prompts, which nobody else has: caches of this size are warm then.
        ask(llm, params, wave(prompts, -1, concurrency))
        waves = max(options.waves, math.ceil(_LEAST_PROMPTS / concurrency))
        asked = [prompts[place % len(prompts)] for place in range(begin, begin + waves * concurrency)]
        begin += len(asked)
        for number in range(options.rounds):
            before, started = counted(llm), time.perf_counter()
            answers = [
                answer
                for place in range(0, len(asked), concurrency)
                for answer in ask(llm, params, asked[place : place + concurrency])
            ]
            seconds, after = time.perf_counter() - started, counted(llm)
            change = {name: after[name] - before[name] for name in after}
            yield Round(options.mode, concurrency, number, seconds, answers, change)


def ask(llm: Any, params: Any, prompts: Sequence[Prompt]) -> list[list[int]]:
    """The answers to all, asked at once."""
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
        # Of steps that had a draft, the target's own token included.
        "tokens_per_drafted_step": 1 + one.counted["accepted"] / drafts if drafts else None,
        "drafted": one.counted["drafted"],
        "accepted": one.counted["accepted"],
    }
    if reference is not None:
        pairs = list(zip(one.answers, reference.answers, strict=True))
        row["x_plain"] = row["tokens_per_second"] * reference.seconds / sum(map(len, reference.answers))
        row["equal_answers"] = sum(answer == wanted for answer, wanted in pairs) / len(pairs)
        row["equal_tokens"] = sum(_common(*pair) for pair in pairs) / sum(len(wanted) for _, wanted in pairs)
    return row


def _common(answer: Sequence[int], wanted: Sequence[int]) -> int:
    """Tokens before the first that differs."""
    return next(
        (place for place, (one, other) in enumerate(zip(answer, wanted, strict=False)) if one != other),
        min(len(answer), len(wanted)),
    )


def line(row: dict[str, Any]) -> str:
    """A row as it is shown."""
    shown = [f"{row['mode']:<8} c={row['concurrency']:<3} round {row['round']}  {row['tokens_per_second']:9.1f} tok/s"]
    if "x_plain" in row:
        shown.append(f"{row['x_plain']:5.2f} x plain  equal answers {row['equal_answers']:4.0%}")
        shown.append(f"tokens {row['equal_tokens']:4.0%}")
    if row["tokens_per_drafted_step"]:
        shown.append(f"{row['tokens_per_drafted_step']:.2f} tokens a drafted step, {row['drafted']:.0f} drafted")
    return "  ".join(shown)


@contextlib.contextmanager
def draft_service(options: argparse.Namespace) -> Iterator[str]:
    """The address of the draft: the one that was named, or one that is started with an empty trie."""
    if options.draft:
        yield options.draft
        return
    with tempfile.TemporaryDirectory() as folder:
        address = f"unix:{folder}/draft.sock"
        command = [options.draft_python, "-m", "draft_service", "--listen", address, "--drafter", "trie"]
        running = subprocess.Popen(command, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
        try:
            wait_for(address, running)
            yield address
        finally:
            running.terminate()
            running.wait(30)


def run_mode(options: argparse.Namespace) -> None:
    """In a process of its own: vLLM in one mode. Rounds are written as they are done."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if options.shape:
        config = json.loads((Path(options.shape) / "config.json").read_text())
        count = sum(max(options.waves * c, _LEAST_PROMPTS + c) for c in options.concurrency) + max(options.concurrency)
        prompts = random_prompts(count, options.prompt_tokens, config["vocab_size"])
    else:
        prompts = read_prompts(options.model, 0)
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
    """Every mode, one after the other; a mode that fails costs its own rows."""
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
            sys.stdout.write(line(rows[-1]) + "\n")
            sys.stdout.flush()
    return {"machine": machine | {"command": " ".join(sys.argv)}, "cores": os.cpu_count(), "results": rows}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="", help="folder of a model with its tokenizer")
    parser.add_argument("--shape", default="", help="folder with a config.json, for random weights")
    parser.add_argument("--prompt-tokens", type=int, default=0, help="random prompts of so many tokens")
    parser.add_argument("--modes", default=",".join(MODES), type=lambda text: text.split(","))
    parser.add_argument("--concurrency", default="1,8,32", type=lambda text: [int(c) for c in text.split(",")])
    parser.add_argument("--rounds", type=int, default=3, help="times that each prompt is asked")
    parser.add_argument("--waves", type=int, default=2, help="waves of new prompts a round; eight prompts at least")
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--ngram-tokens", type=int, default=5, help="tokens that vLLM's own n-gram proposes")
    parser.add_argument("--draft-tokens", type=int, default=8, help="tokens of Outrider's chains")
    parser.add_argument("--wait-ms", type=float, default=5.0, help="bound of a wait for the draft")
    parser.add_argument("--draft", default="", help="address of a draft service that runs")
    parser.add_argument("--draft-python", default=sys.executable, help="interpreter that has outrider[draft]")
    parser.add_argument("--engine", default="{}", type=json.loads, help="more arguments of vllm.LLM, as JSON")
    # What the process of one mode is told.
    parser.add_argument("--mode", default="", choices=("", *MODES), help=argparse.SUPPRESS)
    parser.add_argument("--rounds-file", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if bool(options.model) == bool(options.shape) or (options.shape and not options.prompt_tokens):
        parser.error("name a --model, or a --shape with --prompt-tokens")
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
