"""Tokens per second of a served model under load: the engine alone, and through gRPC, plain and with drafts.

    python -m benchmarks.serving.serving --model MODEL [--device cuda] [--concurrency 1,8,32,64]
        [--loops waves,closed,steps] [--arrangements engine,own,shared]
        [--modes plain,trie,eagle,merged --head FOLDER --draft-device cuda:1]
        [--draft-flags '{"eagle": {"cuda_graphs": true}}'] [--together] [--json FILE]

`engine` is the engine in this process without gRPC, with the times of its steps; `own` and `shared` are whole target
services, by the engine's process. Every mode has its own target service, the drafted ones with a draft service.
With `--together` the services of all modes are up at once, and modes take turns wave by wave; otherwise one follows the
other.

Loops: in `waves`, `concurrency` requests are sent at once, and the next wave begins when all answers have ended; wave
i has prompts i * c .. i * c + c of the shared file, after one wave of other prompts, and a wave's time includes reading
its prompts. In `closed`, `concurrency` requests are in flight all the time, and the part of the run in which all of
them are is measured. Every answer has exactly `--max-tokens` tokens, except the first ones of a closed loop. In
`steps`, waves of 8 and of 136 tokens are timed: their difference is the time of steps without reading prompts. Every
wave and every closed loop has its own tenant, so that drafts remember nothing. Clients run in their own processes.

With `--address` a target that runs already is measured, and the requests of the plain mode turn drafts off.

With `--random-weights` the model of the arrangement `engine` has random weights of its config.json's shape, drawn where
they are needed; `shared/random_model.py --without-weights` writes its folder. With `--few-sizes` that engine captures
only the sizes of steps in which these loads decode, and so starts sooner: for `steps`, in which reading prompts cancels
out. Those also need `--target '{"prefix_cache": false}'`, since both waves have the same prompts.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from benchmarks.serving.clients import Clients
from benchmarks.serving.figures import LONG, SHORT, closed_figures, line, step_figures, wave_figures
from benchmarks.serving.services import DraftSettings, TargetSettings, service
from benchmarks.shared.processes import await_turn
from benchmarks.shared.report import comma_separated, parser_of, settings_of, show, write_json
from benchmarks.shared.workload import Prompt, closed_requests, folder_of, random_prompts, read_prompts, wave

# Share of the GPU's memory for all services that are up at once.
_SHARED_MEMORY = 0.8


@dataclass
class ServingRun:
    """The options and prompts of a run, and its figures so far."""

    options: argparse.Namespace
    prompts: Sequence[Prompt]
    rows: list[dict[str, Any]] = field(default_factory=list)
    started: float | None = None  # seconds in which the engine alone was loaded

    def measure(self, subjects: dict[str, Any], arrangement: str) -> None:
        """Every loop at every concurrency; the subjects, by mode, take turns."""
        for concurrency in self.options.concurrency:
            for loop in self.options.loops:
                measured = {"waves": self._waves, "closed": self._closed, "steps": self._step_times}[loop]
                figures = measured(subjects, concurrency)
                for mode, row in figures.items():
                    self.rows.append({"arrangement": arrangement, "mode": mode, "concurrency": concurrency, **row})
                    show(line(self.rows[-1]))
                    steps = getattr(subjects[mode], "steps", None)
                    if steps is not None:
                        self._note_steps(steps)
                self.keep()

    def keep(self) -> None:
        """Write what is measured so far."""
        if self.options.json is not None:
            from benchmarks.shared.machine import describe

            own = {"settings": settings_of(self.options), "cores": os.cpu_count(), "started_s": self.started}
            write_json(self.options.json, {"machine": describe(), **own, "results": self.rows})

    def _waves(self, subjects: dict[str, Any], concurrency: int) -> dict[str, dict[str, Any]]:
        count = self.options.max_tokens
        measured: dict[str, list[Any]] = {mode: [] for mode in subjects}
        for number in range(-1, self.options.waves):
            prompts = wave(self.prompts, number, concurrency)
            for mode in subjects if number % 2 else reversed(subjects):
                how = {"speculate": mode != "plain", "tenant": f"wave-{concurrency}-{number}"}
                done = subjects[mode].wave(prompts, count, **how)
                # The first wave of each size has cold caches.
                if number >= 0:
                    measured[mode].append(done)
                elif hasattr(subjects[mode], "steps"):
                    subjects[mode].steps.pop_steps()
        return {mode: wave_figures(waves) for mode, waves in measured.items()}

    def _step_times(self, subjects: dict[str, Any], concurrency: int) -> dict[str, dict[str, Any]]:
        seconds: dict[str, list[tuple[float, float]]] = {mode: [] for mode in subjects}
        for number in range(-1, self.options.waves):
            prompts = wave(self.prompts, number, concurrency)
            for mode, subject in subjects.items():
                how = {"speculate": mode != "plain", "tenant": f"steps-{concurrency}-{number}"}
                shorter, longer = (subject.wave(prompts, count, **how)[0] for count in (SHORT, LONG))
                if number >= 0:
                    seconds[mode].append((shorter, longer))
                elif hasattr(subject, "steps"):
                    subject.steps.pop_steps()
        figures = {mode: step_figures(concurrency, pairs) for mode, pairs in seconds.items()}
        for mode, subject in subjects.items():
            if hasattr(subject, "last_tokens"):
                figures[mode]["distinct_last_tokens"] = len(set(subject.last_tokens))
        return figures

    def _closed(self, subjects: dict[str, Any], concurrency: int) -> dict[str, dict[str, Any]]:
        requests = closed_requests(self.prompts, concurrency, self.options.max_tokens)
        figures = {}
        for mode, subject in subjects.items():
            how = {"speculate": mode != "plain", "tenant": f"closed-{concurrency}"}
            figures[mode] = closed_figures(subject.closed(requests, concurrency, **how))
        return figures

    def _note_steps(self, recorder: Any) -> None:
        # Imports torch, which only an engine in this process needs.
        from benchmarks.shared import step_recorder

        summary = step_recorder.summarise(recorder.pop_steps())
        self.rows[-1]["steps"] = summary
        show("         " + step_recorder.line(summary))


def draft_settings(options: argparse.Namespace, mode: str) -> DraftSettings | None:
    """The draft service of a mode; None for the plain one."""
    if mode == "plain":
        return None
    if mode not in ("eagle", "merged"):
        return DraftSettings(mode, device=options.draft_device, flags=options.draft_flags)
    return DraftSettings(mode, options.head, folder_of(options.model), options.draft_device, options.draft_flags)


@contextmanager
def served(options: argparse.Namespace, modes: Sequence[str], arrangement: str) -> Iterator[dict[str, Clients]]:
    """Clients of a service for each mode; all services are up."""
    more = dict(options.target)
    if len(modes) > 1 and options.device != "cpu" and not {"kv_tokens", "memory_share"} & more.keys():
        more["memory_share"] = round(_SHARED_MEMORY / len(modes), 3)
    settings = TargetSettings(options.model, options.device, options.dtype, more)
    with ExitStack() as stack:
        # One after another: a target measures the times of its steps when it starts.
        addresses = {
            mode: stack.enter_context(service(settings, arrangement, draft_settings(options, mode))) for mode in modes
        }
        yield {mode: stack.enter_context(Clients(address, options.clients)) for mode, address in addresses.items()}


def run(session: ServingRun) -> None:
    """Measure every arrangement."""
    options = session.options
    if options.address:
        with Clients(options.address, options.clients) as clients:
            session.measure({mode: clients for mode in options.modes}, options.arrangements[0])
        return
    for arrangement in options.arrangements:
        if arrangement == "engine":
            from benchmarks.serving.engine import EngineAlone
            from target_service.config import TargetConfig

            config = TargetConfig(model=options.model, device=options.device, dtype=options.dtype, **options.target)
            begin = time.perf_counter()
            loads = options.concurrency if options.few_sizes else ()
            alone = EngineAlone(config, random=options.random_weights, loads=loads)
            session.started = time.perf_counter() - begin
            await_turn(options.turn)
            session.measure({"plain": alone}, arrangement)
            alone.close()
            continue
        for modes in [options.modes] if options.together else [[mode] for mode in options.modes]:
            with served(options, modes, arrangement) as clients:
                session.measure(dict(clients), arrangement)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--concurrency", default="1,8,32,64", type=comma_separated(int))
    parser.add_argument("--modes", default="plain", type=comma_separated(str), help="plain and drafters' names")
    parser.add_argument("--loops", default="waves", type=comma_separated(str), help="waves, closed, steps")
    parser.add_argument("--arrangements", default="engine,own", type=comma_separated(str))
    parser.add_argument("--together", action="store_true", help="services of all modes up at once, taking turns")
    parser.add_argument("--address", default="", help="a running target, of the first arrangement, to measure")
    parser.add_argument("--waves", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--prompts", type=int, default=0, help="use only the first N of the shared prompts")
    parser.add_argument("--prompt-tokens", type=int, default=0, help="use random prompts of N tokens instead")
    parser.add_argument("--clients", type=int, default=8, help="client processes")
    parser.add_argument("--head", default="", help="folder of an EAGLE head, for the modes eagle and merged")
    parser.add_argument("--draft-device", default="cpu", help="of eagle, merged and model: cpu, cuda:0, cuda:1")
    parser.add_argument("--draft-flags", default="{}", type=json.loads, help="drafters' settings by section, as JSON")
    parser.add_argument("--random-weights", action="store_true", help="of the engine alone: its folder needs none")
    parser.add_argument("--few-sizes", action="store_true", help="the engine alone captures what these loads decode in")
    parser.add_argument("--turn", default="", help="load the engine alone, write TURN.ready, and wait for TURN.go")
    parser.add_argument("--target", default="{}", type=json.loads, help="more settings of the target, as JSON")
    options = parser.parse_args(arguments)
    if {"eagle", "merged"} & set(options.modes) and not (options.head or options.address):
        parser.error("the modes eagle and merged need --head")
    if set(options.loops) - {"waves", "closed", "steps"}:
        parser.error("loops are waves, closed and steps")
    return options


def prompts_of(options: argparse.Namespace) -> list[Prompt]:
    """The shared prompts, or enough random ones for the waves of the largest load and its warm-up."""
    if not options.prompt_tokens:
        return read_prompts(options.model, options.prompts)
    from transformers import AutoConfig

    vocabulary_size = AutoConfig.from_pretrained(folder_of(options.model)).get_text_config().vocab_size
    count = options.prompts or (options.waves + 1) * max(options.concurrency)
    return random_prompts(count, options.prompt_tokens, vocabulary_size)


def main() -> None:
    options = parse()
    session = ServingRun(options, prompts_of(options))
    run(session)


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    main()
