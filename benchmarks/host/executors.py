"""The two executors of steps beside each other on a CPU: processor time a token of the engine's loop.

    python -m benchmarks.host.executors [--model smollm2-135m-instruct] [--repeats 5] [--json FILE]

`HostSteps` verifies row by row in the engine's thread. `DeviceSteps` is what runs on a GPU, here with its kernels'
definitions in torch. Both run the same requests in turn, plain and with the trie drafting in this process, and must
generate the same. Processor time and not wall time is measured, so that what else runs counts for little.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.shared.report import parser_of, provenance, record_table, settings_of, show, write_json
from benchmarks.shared.workload import Prompt, read_prompts
from draft_service import in_process
from outrider.sampling import SamplingParams
from target_service.assembly import load_model
from target_service.config import TargetConfig
from target_service.core.sequence import SequenceRequest, StepVerdict
from target_service.engine.loop import EngineLoop
from target_service.execution.device_executor import DeviceSteps
from target_service.execution.host_executor import HostSteps, Steps
from target_service.model.runner import ModelRunner

MOST_SEQUENCES, LONGEST_PROMPT = 4, 256
SAMPLINGS = {
    "greedy": SamplingParams(ignore_eos=True),
    "T = 0.8, top-p 0.9": SamplingParams(ignore_eos=True, temperature=0.8, top_p=0.9, seed=5),
}


def generate(
    runner: ModelRunner, config: TargetConfig, steps: Steps, requests: Sequence[SequenceRequest]
) -> tuple[list[list[int]], float]:
    """The tokens of every request, and seconds of this process's processor time."""
    loop = EngineLoop(runner, config, steps=steps)
    link = in_process.connect("trie")(loop.drafting, runner.vocabulary_size, "") if config.draft else None
    if link is not None:
        loop.drafting.attach(link)
        loop.drafting.listen()
    said: list[list[int]] = [[] for _ in requests]
    begun = time.process_time()
    for number, request in enumerate(requests):
        loop.add(loop.make(number, request))
    while loop.live:
        for event in loop.step() or ():
            if isinstance(event, StepVerdict):
                said[event.sequence_id] += event.token_ids
    seconds = time.process_time() - begun
    if link is not None:
        link.stop()
    return said, seconds


def measure(
    runner: ModelRunner,
    config: TargetConfig,
    executors: dict[str, Steps],
    requests: list[SequenceRequest],
    repeats: int,
) -> dict[str, float]:
    """Milliseconds of processor time a token by executor, the median of `repeats` in turn."""
    spent: dict[str, list[float]] = {name: [] for name in executors}
    expected: list[list[int]] | None = None
    # The first of each warms up.
    for number in range(repeats + 1):
        for name in sorted(executors, reverse=bool(number % 2)):
            said, seconds = generate(runner, config, executors[name], requests)
            expected = expected or said
            if said != expected and runner.dtype.itemsize == 4:
                raise SystemExit(f"{name} generated other tokens")
            if number:
                spent[name].append(1e3 * seconds / sum(map(len, said)))
    return {name: statistics.median(each) for name, each in spent.items()}


def compare(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row of figures for each sampling, concurrency and draft."""
    common: dict[str, Any] = {"model": options.model, "dtype": options.dtype, "max_running": MOST_SEQUENCES}
    runner = load_model(TargetConfig(**common))
    prompts: list[Prompt] = [ids for ids in read_prompts(options.model, 0) if len(ids) <= LONGEST_PROMPT]
    executors: dict[str, Steps] = {
        "host": HostSteps(runner),
        "device": DeviceSteps(
            runner, max_sequences=MOST_SEQUENCES, max_rows=TargetConfig(**common).step_rows, backend="torch"
        ),
    }
    rows = []
    for sampling, params in SAMPLINGS.items():
        for concurrency in (1, MOST_SEQUENCES):
            requests = [
                SequenceRequest(ids, params, params.mode(None), seed=5, max_tokens=options.tokens)
                for ids in prompts[:: len(prompts) // concurrency][:concurrency]
            ]
            for draft in ("", "inprocess:trie"):
                config = TargetConfig(**common, draft=draft)
                found = measure(runner, config, executors, requests, options.repeats)
                ratio = found["device"] / found["host"]
                row = {"sampling": sampling, "requests": concurrency, "draft": draft or "none"}
                rows.append(
                    row | {f"{name}_ms": round(ms, 2) for name, ms in found.items()} | {"ratio": f"{ratio:.3f}"}
                )
                show(str(rows[-1]))
    return rows


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    rows = compare(options)
    show(record_table(rows))
    write_json(options.json, {**provenance("host.executors"), "settings": settings_of(options), "figures": rows})


if __name__ == "__main__":
    main()
