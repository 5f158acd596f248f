"""Cost and gain of drafting with an EAGLE-3 head at the size of an 8B model, with SIMULATED acceptance.

    python -m benchmarks.shared.random_model FOLDER --shape llama-8b --head HEAD
    PYTHONPATH=kernels:protos:benchmarks:. python -m benchmarks.engine.simulated_acceptance --model FOLDER --head HEAD
        [--device cuda] [--draft-device cuda:1] [--concurrency 1,4,16,64] [--rates 0.775] [--json FILE]

The figures do not show how good a drafter is. Target and head have random weights of the real shapes, so that forward
passes, hidden states on the wire, drafting and verification have their real cost. The draft is a real draft service in
a process of its own, on the same GPU or another, or runs in the engine's process (`--placement`); `--delay-ms` adds a
delay to its answers. After the head has drafted, the tokens of its tree are overwritten, so that the right continuation
(from a plain run of the same prompts just before) is in the tree down to depth d with the probability rates[0] * .. *
rates[d - 1]. The engine runs in this process, without gRPC to clients. Greedy, answers of exactly `--max-tokens`
tokens. Where the target's output departs from the plain run, its sequence gets wrong drafts from there on.

The default rate, 0.775 at every depth, is that of SpecForge's EAGLE-3 head for Llama-3.1-8B-Instruct: its dashboard
gives 3.86 tokens a step on MT-Bench with chains of 7 at batch 1 (4.91 on HumanEval and 5.40 on MATH-500, which would be
0.855 and 0.886), and 1 + r + .. + r^7 = 3.86 at r = 0.775. Lengths are published and rates by depth are not; that one
rate holds at all depths follows the EAGLE-3 paper (arXiv 2503.01840), where it hardly falls with depth.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.engine.simulated_drafter import SimulatedDrafter, write_answers
from benchmarks.engine.simulated_run import Connect, SimulatedRun
from benchmarks.serving.services import visible_device
from benchmarks.shared.machine import describe
from benchmarks.shared.processes import process, wait_for
from benchmarks.shared.report import comma_separated, parser_of, settings_of, show, write_json
from benchmarks.shared.step_recorder import line
from benchmarks.shared.workload import Prompt, random_prompts
from draft_service.eagle.config import EagleConfig
from draft_service.in_process import InprocessLink
from outrider.drafting.events import DraftEvents
from outrider.drafting.link import LinkOptions, connect_draft
from outrider.runtime import settled, switch_threads_often
from outrider.wire.frames import StoppableLink
from target_service.assembly import load_model
from target_service.config import TargetConfig
from target_service.model.runner import ModelRunner

LABEL = "acceptance SIMULATED, weights random"
# Kernels are compiled and passes captured when a size first occurs, in which time the draft must not be taken for dead.
_TIMEOUT_SECONDS = 60.0
# Tokens of cache that a sequence needs beyond its text, for whole pages and its tree.
_SLACK = 320
# Tokens of the head's cache that a sequence needs beyond its text, for whole pages and the nodes that a tree expands.
_HEAD_SLACK = 256


def target_config(options: argparse.Namespace) -> TargetConfig:
    most = max(options.concurrency)
    settings: dict[str, Any] = {
        "model": options.model,
        "device": options.device,
        "dtype": options.dtype,
        "draft": "unix:simulated",
        "draft_head": options.head,
        "row_budget": options.row_budget,
        "speculative_disable_queue_size": most,
        "draft_wait_ms": options.draft_wait_ms,
        "max_running": most,
        "kv_tokens": most * (options.prompt_tokens + options.max_tokens + _SLACK),
    }
    return TargetConfig(**(settings | options.target))


def eagle_settings(options: argparse.Namespace) -> dict[str, Any]:
    steps, topk, nodes = options.tree
    room = options.prompt_tokens + options.max_tokens + _HEAD_SLACK
    return {
        "head": options.head,
        "embeddings": options.model,
        "device": options.draft_device,
        "dtype": options.dtype,
        "num_steps": steps,
        "topk": topk,
        "num_draft_tokens": nodes,
        "min_score": 0.0,
        "kv_tokens": max(4096, max(options.concurrency) * room),
        **options.eagle,
    }


def draft_arguments(options: argparse.Namespace, address: str, answers: Path) -> list[str]:
    rates = ",".join(map(str, options.rates))
    eagle = eagle_settings(options) | {"device": options.draft_device.partition(":")[0]}
    arguments = ["-m", "benchmarks.engine.simulated_drafter", "--answers", str(answers), "--rates", rates]
    return [*arguments, "--delay-ms", str(options.delay_ms), "--listen", address, "--eagle", json.dumps(eagle)]


@contextmanager
def draft_beside(options: argparse.Namespace, answers: Path) -> Iterator[Connect]:
    """A draft in its placement, which loads its head while the target is loaded. Yields what links an engine to it."""
    if options.placement == "inprocess":
        drafter = SimulatedDrafter(
            EagleConfig(**eagle_settings(options)), answers, options.rates, options.delay_ms / 1e3
        )

        def link(events: DraftEvents, _: int) -> StoppableLink:
            drafter.start()
            return InprocessLink(drafter, events)

        yield link
        return
    address = f"unix:{answers.parent}/draft"
    environment = {"CUDA_VISIBLE_DEVICES": visible_device(options.draft_device)}
    with process(*draft_arguments(options, address, answers), environment=environment) as draft:

        def connect(events: DraftEvents, vocabulary_size: int) -> StoppableLink:
            wait_for(address, draft)
            timeouts = LinkOptions(answer_timeout=_TIMEOUT_SECONDS, ping_timeout=_TIMEOUT_SECONDS)
            # No fingerprint: a random head belongs to no tokenizer.
            return connect_draft(address, events, vocabulary_size, "", timeouts)

        yield connect


def measure(options: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Measure every load plain, then every load drafted. Appends figures to `rows`."""
    with tempfile.TemporaryDirectory() as folder:
        answers = Path(folder) / "answers.json"
        with draft_beside(options, answers) as connect:
            runner = load_model(target_config(options))
            with settled():
                compare(options, rows, runner, connect, answers)


def compare(
    options: argparse.Namespace, rows: list[dict[str, Any]], runner: ModelRunner, connect: Connect, answers: Path
) -> None:
    """`answers` is the file from which the draft reads the answers of the plain run."""
    config = target_config(options)
    prompts = random_prompts(max(options.concurrency), options.prompt_tokens, runner.vocabulary_size)
    plain = SimulatedRun(runner, config, None)
    plain_outputs: dict[Prompt, tuple[int, ...]] = {}
    for concurrency in options.concurrency:
        figures, outputs = plain.measure(prompts[:concurrency], options.max_tokens)
        add_row(rows, concurrency, "plain", figures)
        plain_outputs |= outputs
    plain.close()
    write_answers(answers, plain_outputs.items())
    drafted = SimulatedRun(runner, config, connect, options.settle_seconds)
    for concurrency in options.concurrency:
        figures, outputs = drafted.measure(prompts[:concurrency], options.max_tokens)
        same = sum(plain_outputs[prompt] == output for prompt, output in outputs.items())
        add_row(rows, concurrency, "drafted", figures | {"outputs_as_plain": same})
    drafted.close()


def add_row(rows: list[dict[str, Any]], concurrency: int, mode: str, figures: dict[str, Any]) -> None:
    rows.append({"concurrency": concurrency, "mode": mode, "label": LABEL, **figures})
    show(
        f"{LABEL}: c={concurrency:<3d} {mode:8s} {figures['tokens_per_second']:9.1f} tok/s decoding, "
        f"{figures['tokens_per_second_with_prompts']:9.1f} with prompts, {figures['tokens_per_step']:.2f} tokens/step\n"
        f"    {line(figures['steps'])}"
    )


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--model", required=True, help="folder that benchmarks.shared.random_model wrote")
    parser.add_argument("--head", required=True, help="folder of the head that it wrote")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--draft-device", default="cuda:0", help="cpu, cuda:0, cuda:1")
    parser.add_argument(
        "--placement", default="own", choices=("own", "inprocess"), help="of the draft: own process, or the engine's"
    )
    parser.add_argument("--delay-ms", type=float, default=0.0, help="added to every answer of the draft")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--concurrency", default="1,4,16,64", type=comma_separated(int))
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rates", default="0.775", type=comma_separated(float))
    parser.add_argument("--tree", default="7,1,7", type=comma_separated(int), help="levels, topk, nodes")
    parser.add_argument("--row-budget", default="all", choices=("all", "adaptive"))
    parser.add_argument(
        "--settle-seconds",
        type=float,
        default=0.0,
        help="how long each load runs before it is measured, so that an adaptive engine has adapted",
    )
    parser.add_argument("--draft-wait-ms", type=float, default=2000.0, help="long, so that every step has a draft")
    parser.add_argument("--eagle", default="{}", type=json.loads, help="more settings of the drafter, as JSON")
    parser.add_argument("--target", default="{}", type=json.loads, help="more settings of the target, as JSON")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    # As a service does.
    switch_threads_often()
    rows: list[dict[str, Any]] = []
    begin = time.perf_counter()
    try:
        measure(options, rows)
    finally:
        # Rows measured before a failure are kept.
        settings = settings_of(options)
        document: dict[str, Any] = {"label": LABEL, "machine": describe(), "settings": settings}
        document |= {"seconds": round(time.perf_counter() - begin, 1), "results": rows}
        write_json(options.json, document)


if __name__ == "__main__":
    main()
