"""Tokens per second of a served model under load: the engine alone, and through gRPC, plain and with drafts.

    python benchmarks/serving.py --model MODEL [--device cuda] [--concurrency 1,8,32,64] [--modes plain,trie]
        [--arrangements engine,own,shared] [--json FILE]

Requests come in waves of `concurrency` prompts, as many answers of exactly `--max-tokens` tokens, and the next wave
begins when the last answer has ended; a wave's figure includes reading its prompts. Modes take turns wave by wave.
Each wave drafts with a memory of its own. Clients run in processes of their own. `engine` is the engine without gRPC,
`own` and `shared` say where the engine of a whole target service runs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from serving_clients import Clients

from outrider.sampling import SamplingParams

TASK_FILE = Path(__file__).parent / "prompts.jsonl"
LONGEST_PROMPT = 3500
START_SECONDS = 400.0


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def read_prompts(model: str, limit: int) -> list[tuple[int, ...]]:
    """Token ids of the first turns, task by task in the file's order."""
    from transformers import AutoTokenizer

    from target_service.model.store import resolve

    tokenizer = AutoTokenizer.from_pretrained(str(resolve(model)))
    by_task: dict[str, list[tuple[int, ...]]] = {}
    for line in TASK_FILE.read_text().splitlines():
        row = json.loads(line)
        message = [{"role": "user", "content": row["turns"][0]}]
        ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)["input_ids"]
        if len(ids) < LONGEST_PROMPT:
            by_task.setdefault(row["task"], []).append(tuple(ids))
    return [ids for task in by_task.values() for ids in task][: limit or None]


class Waves:
    """Cuts the prompts into waves, going round."""

    def __init__(self, prompts: Sequence[tuple[int, ...]]) -> None:
        self._prompts = itertools.cycle(prompts)

    def next(self, concurrency: int) -> list[tuple[int, ...]]:
        return list(itertools.islice(self._prompts, concurrency))


class EngineAlone:
    """The engine in this process, its events counted and dropped."""

    def __init__(self, options: argparse.Namespace) -> None:
        from target_service.assembly import engine_config, load_model
        from target_service.config import TargetConfig
        from target_service.engine import Engine

        config = TargetConfig(model=options.model, device=options.device, dtype=options.dtype, **options.target)
        self._ended: queue.Queue[int] = queue.Queue()
        self._engine = Engine(load_model(config), engine_config(config))
        self._engine.start(self._count)

    def _count(self, events: list[Any]) -> None:
        from target_service.sequence import SequenceFinished, Verdict

        for event in events:
            if isinstance(event, SequenceFinished):
                self._ended.put(event.totals.completion_tokens)
            elif not isinstance(event, Verdict):
                raise RuntimeError(f"a sequence failed: {event}")

    def wave(self, prompts: Sequence[tuple[int, ...]], max_tokens: int, **_: object) -> tuple[float, int]:
        """Seconds, and tokens said."""
        from outrider.sampling import VerificationMode
        from target_service.sequence import SequenceRequest

        begin = time.perf_counter()
        for ids in prompts:
            sampling = SamplingParams(ignore_eos=True, max_tokens=max_tokens)
            self._engine.submit(SequenceRequest(ids, sampling, VerificationMode.GREEDY, 0, max_tokens))
        tokens = sum(self._ended.get(timeout=600) for _ in prompts)
        return time.perf_counter() - begin, tokens

    def close(self) -> None:
        self._engine.stop(grace=0)


@contextmanager
def process(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    running = subprocess.Popen([sys.executable, "-m", *arguments])
    try:
        yield running
    finally:
        running.terminate()
        running.wait(30)


@contextmanager
def service(options: argparse.Namespace, arrangement: str, drafter: str | None) -> Iterator[str]:
    """The address of a target service, with a draft service in a process of its own if one is wanted."""
    flags = [f for name, value in options.target.items() for f in (f"--{name.replace('_', '-')}", str(value))]
    with tempfile.TemporaryDirectory() as folder:
        address, draft = f"unix:{folder}/target", f"unix:{folder}/draft"
        target = ["target_service", "--model", options.model, "--device", options.device, "--dtype", options.dtype]
        target += ["--listen", address, "--engine-process", arrangement, *flags]
        if drafter is None:
            with process(*target) as running:
                wait_for(address, running)
                yield address
            return
        drafting = process("draft_service", "--listen", draft, "--drafter", drafter)
        with drafting, process(*target, "--draft", draft) as running:
            wait_for(address, running)
            yield address


def wait_for(address: str, running: subprocess.Popen[bytes]) -> None:
    """Until the service takes calls. Raises `RuntimeError` when it ends before."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    deadline = time.monotonic() + START_SECONDS
    with grpc.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        while time.monotonic() < deadline:
            if running.poll() is not None:
                raise RuntimeError(f"the target exited with status {running.returncode}")
            try:
                if health.Check(health_pb2.HealthCheckRequest(), timeout=5).status == 1:
                    return
            except grpc.RpcError:
                pass
            time.sleep(0.2)
    raise RuntimeError("the target did not start in time")


def measure(
    subject: Any, waves: Waves, options: argparse.Namespace, modes: Sequence[str], arrangement: str
) -> list[dict[str, Any]]:
    """Median tokens per second by concurrency and mode."""
    results = []
    for concurrency in options.concurrency:
        rates: dict[str, list[float]] = {mode: [] for mode in modes}
        for repeat in range(-1, options.waves):
            prompts = waves.next(concurrency)
            for mode in modes if repeat % 2 else reversed(modes):
                tenant = f"wave-{concurrency}-{repeat}"
                seconds, tokens = subject.wave(prompts, options.max_tokens, speculate=mode != "plain", tenant=tenant)
                # The first of each size finds caches cold.
                if repeat >= 0:
                    rates[mode].append(tokens / seconds)
        for mode, values in rates.items():
            result = {"arrangement": arrangement, "mode": mode, "concurrency": concurrency, "n": len(values)}
            result |= {"tokens_per_second": statistics.median(values), "least": min(values), "most": max(values)}
            results.append(result)
        line = "  ".join(f"{mode} {statistics.median(values):9.1f}" for mode, values in rates.items())
        say(f"{arrangement:7s} c={concurrency:<4d} {line} tok/s")
    return results


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--concurrency", default="1,8,32,64", type=lambda text: [int(c) for c in text.split(",")])
    parser.add_argument("--modes", default="plain", type=lambda text: text.split(","))
    parser.add_argument("--arrangements", default="engine,own", type=lambda text: text.split(","))
    parser.add_argument("--waves", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--prompts", type=int, default=0, help="use only the first so many")
    parser.add_argument("--clients", type=int, default=8, help="processes that load comes from")
    parser.add_argument("--target", default="{}", type=json.loads, help="more settings of the target, as JSON")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    options = parse()
    waves = Waves(read_prompts(options.model, options.prompts))
    results: list[dict[str, Any]] = []
    drafters = [mode for mode in options.modes if mode != "plain"]
    for arrangement in options.arrangements:
        if arrangement == "engine":
            alone = EngineAlone(options)
            results += measure(alone, waves, options, ["plain"], arrangement)
            alone.close()
            continue
        served = service(options, arrangement, drafters[0] if drafters else None)
        with served as address, Clients(address, options.clients) as clients:
            results += measure(clients, waves, options, options.modes, arrangement)
    if options.json is not None:
        from gpu_machine import describe

        settings = {name: value for name, value in vars(options).items() if name != "json"}
        document = {"machine": describe(), "settings": settings, "cores": os.cpu_count(), "results": results}
        options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    main()
