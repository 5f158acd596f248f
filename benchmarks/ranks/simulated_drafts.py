"""What a head brings behind the passes of a model that several ranks share: SIMULATED acceptance and random weights.

    python -m benchmarks.shared.random_model FOLDER --shape llama-2-70b --without-weights
    python -m benchmarks.ranks.simulated_drafts --model FOLDER --head HEAD --ranks 2 [--rate 0.7] [--json FILE]
        [--concurrency 64,128] [--prompt-tokens 1280] [--max-tokens 512] [--target '{"kv_tokens": 0}']

The figures do not show how good a head is. Target and head have random weights of real shapes, drawn where they are
needed, so that passes, sums over ranks, the head's levels, verification and the host have their real cost. Behind the
head's own computation its tokens are overwritten: each node's first child is the token that this target says next with
probability `--rate`, which a hash of the node's token decides, and all others are wrong. Scores say so too, so the
engine chooses rows as behind a head that is right so often and knows it. Lookup and recycled tokens are off, which
would find every token of such a target.

Drafted and plain engines run the same loaded model, one after the other. Tokens a second are of the time in which all
sequences of a wave generate, with its mean context: prompts of 1,280 and answers of 512 tokens have that of 1,024 and
1,024. `whole_tokens_per_second` projects that rate, and the time in which the wave's prompts were read, to `--whole`:
so many per cent of these prompts, and answers of so many tokens. `as_the_model` is the share of answers that end as
this model's own do, by the rule of its weights.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.random_models.checkpoint import RandomCheckpoint, random_weights
from benchmarks.random_models.weights import SHIFT
from benchmarks.serving.engine import EngineLoads, capturing_for
from benchmarks.serving.figures import TimedAnswer
from benchmarks.shared.machine import describe
from benchmarks.shared.random_model import read_shape, write_head
from benchmarks.shared.report import comma_separated, parser_of, settings_of, show, write_json
from benchmarks.shared.step_recorder import StepRecorder, line, summarise
from benchmarks.shared.workload import Prompt, random_prompts
from draft_service import in_pass
from draft_service.neural.cuda_graphs.level_passes import LevelPasses, RootRows
from draft_service.neural.cuda_graphs.pass_trees import PassTrees
from draft_service.neural.network import RowOutput
from outrider.processes.python import module_command
from outrider.runtime import configure_logging, in_passing_thread, leave, settled
from target_service.assembly import assemble
from target_service.config import TargetConfig
from target_service.engine.engine import Engine
from target_service.model.loading.loader import RankGroupLink, load_runner
from target_service.model.ranks.following import follow
from target_service.model.ranks.leading import LeadingLink, start_ranks
from target_service.model.runner import ModelRunner
from tree_kernels.growth import Children

LABEL = "acceptance SIMULATED, weights random"
_MODULE = "benchmarks.ranks.simulated_drafts"
# Tokens of prompts and answers of the waves by which an engine learns what passes take and bring.
_WARM_UP = 64, 160
# Tokens of cache that a sequence needs beyond its text, for whole pages and its tree.
_SLACK = 96


class SimulatedLevels(LevelPasses):
    """The levels of a head's trees, whose first children are right with the probability `rate`."""

    rate = 0.7
    _parents: Tensor

    def read_roots(self, rows: RootRows, cache: Any) -> RowOutput:
        """See `LevelPasses.read_roots`."""
        self._parents = rows.token_ids
        return super().read_roots(rows, cache)

    def expand(self, level: int, carried: Tensor, cache: Any) -> RowOutput:
        """See `LevelPasses.expand`."""
        self._parents = self.growth.next_tokens.flatten()
        return super().expand(level, carried, cache)

    def _children(self, logits: Tensor, level: int, *, coupled: bool) -> Children:
        children = super()._children(logits, level, coupled=coupled)
        parts = 1 if self._ranks is None else self._ranks.size
        overwrite(children, self._parents, parts * logits.shape[1], self.rate)
        return children


def overwrite(children: Children, parents: Tensor, vocabulary_size: int, rate: float) -> None:
    """Make the first child of each of `parents` [R] the model's own next token, or a wrong one, and all others wrong.
    Waits for nothing."""
    count = children.tokens.shape[1]
    right = parents.long() + SHIFT
    behind = torch.arange(count, device=right.device) + (~is_right(parents, rate)).long()[:, None]
    # Others stand behind the first: siblings differ.
    children.tokens.copy_((right[:, None] + behind) % vocabulary_size)
    children.scores[:, :1] = rate
    if count > 1:
        children.scores[:, 1:] = (1.0 - rate) / (count - 1)


def is_right(tokens: Tensor, rate: float) -> Tensor:
    """Of which tokens [..] the next one is guessed: a share of `rate` of all, the same in every run."""
    mixed = tokens.long() * 2654435761 % 2**32
    mixed = (mixed ^ (mixed >> 15)) * 2246822519 % 2**32
    return (mixed ^ (mixed >> 13)) < rate * 2**32


class _RandomTarget:
    """Stands in for `TargetCheckpoint`: what a head takes of a target that has no weights on a disk."""

    def __init__(self, source: str | Path) -> None:
        self._tensors = replace(RandomCheckpoint.of_folder(source), for_gpu=torch.cuda.is_available())

    def check_fits(self, _head: object) -> None:
        """It was made for this shape."""

    def embedding(self) -> Tensor:
        """See `TargetCheckpoint.embedding`."""
        return self._tensors.read(self._tensors.embedding)


@contextmanager
def simulated(rate: float) -> Iterator[None]:
    """Models that are loaded meanwhile have random weights, and heads behind their passes guess at this rate."""
    levels = type("Levels", (SimulatedLevels,), {"rate": rate})
    with random_weights(), patch.object(in_pass, "TargetCheckpoint", _RandomTarget), ExitStack() as stack:
        stack.enter_context(patch.object(PassTrees, "levels", levels))
        yield


def load_rank(
    config: TargetConfig, link: RankGroupLink | None, *, rate: float = 0.7, loads: Sequence[int] = ()
) -> ModelRunner:
    """A rank's part of a random model; the leading one captures sizes for these loads."""
    with simulated(rate), ExitStack() as stack:
        if loads and config.captures:
            stack.enter_context(capturing_for(loads, trees=True))
        return load_runner(config, link)


def target_config(options: Any) -> TargetConfig:
    most, text = max(options.concurrency), options.prompt_tokens + options.max_tokens
    settings: dict[str, Any] = {
        "model": options.model,
        "device": options.device,
        "dtype": options.dtype,
        "tensor_parallel": options.ranks,
        "draft": f"inpass:eagle --head {options.head}" if options.head else "",
        "speculation": bool(options.head),
        "lookup_tokens": 0,
        "prefix_cache": False,
        "max_running": most,
        "max_context": text + _SLACK,
        "kv_tokens": most * (text + _SLACK),
        # Passes whose layers PyTorch need not compile, and prompts that wait for nobody.
        "max_step_rows": 1536,
        "prompt_wait_ms": 1000.0,
    }
    return TargetConfig(**(settings | options.target))


def drafting_engine(config: TargetConfig, runner: ModelRunner, steps: StepRecorder) -> Engine:
    """An engine as a service has it."""
    return assemble(config, runner, steps).engine


def plain_engine(config: TargetConfig, runner: ModelRunner, steps: StepRecorder) -> Engine:
    """An engine over the same captured passes, behind which no rows are chosen and nothing drafts."""
    runner.in_pass = runner.node_table = None
    return Engine(runner, replace(config, speculation=False, draft=""), observer=steps)


def measured(alone: EngineLoads, prompts: Sequence[Prompt], vocabulary_size: int, options: Any) -> dict[str, Any]:
    """A wave of these prompts, behind a short one."""
    short, answered = _WARM_UP
    alone.wave([prompt[:short] for prompt in prompts], min(answered, options.max_tokens))
    alone.steps.pop_steps()
    seconds, answers = alone.wave(prompts, options.max_tokens)
    steps = summarise(alone.steps.pop_steps())
    expected = [(prompt[-1] + options.max_tokens * SHIFT) % vocabulary_size for prompt in prompts]
    same = sum(last == one for last, one in zip(alone.last_tokens, expected, strict=True)) / len(prompts)
    return {"seconds": round(seconds, 3), **wave_rates(answers, options.whole), "as_the_model": same, "steps": steps}


def wave_rates(answers: Sequence[TimedAnswer], whole: tuple[int, int]) -> dict[str, Any]:
    """Tokens a second while all sequences generate, tokens of a message, and what that makes of `whole`: so many per
    cent of the prompts that were read, and tokens of answers."""
    begin, end = max(one.times[0] for one in answers), min(one.end for one in answers)
    within = [
        [count for moment, count in zip(one.times, one.counts, strict=True) if begin < moment <= end] for one in answers
    ]
    tokens, messages = sum(map(sum, within)), sum(map(len, within))
    rate, reading = tokens / (end - begin), begin - min(one.begin for one in answers)
    share, answered = whole
    total = reading * share / 100 + len(answers) * answered / rate
    return {
        "tokens_per_second": round(rate, 1),
        "tokens_per_message": round(tokens / messages, 3),
        "window_s": round(end - begin, 3),
        "reading_s": round(reading, 3),
        "whole_tokens_per_second": round(len(answers) * answered / total, 1),
    }


def run(options: Any, rows: list[dict[str, Any]], started: dict[str, float]) -> None:
    """Measure every load drafted, then plain. Appends to `rows`, and notes in `started` what was loaded when."""
    config, begin = target_config(options), time.perf_counter()
    if options.head and not (Path(options.head) / "config.json").exists():
        write_head(Path(options.head), read_shape(options.model), options.device)
    load = partial(load_rank, rate=options.rate, loads=options.concurrency if options.few_sizes else ())
    link: LeadingLink | None = None
    if options.ranks > 1:
        command = *module_command(_MODULE), str(options.rate)
        runner, link = in_passing_thread(lambda: start_ranks(config, load, command))
    else:
        runner = in_passing_thread(lambda: load(config, None))
    started["loaded_s"] = round(time.perf_counter() - begin, 1)
    show(f"loaded after {started['loaded_s']} s")
    prompts = random_prompts(max(options.concurrency), options.prompt_tokens, runner.vocabulary_size)
    modes = {"drafted": drafting_engine, "plain": plain_engine} if options.head else {"plain": plain_engine}
    # Trees are made when they are first needed.
    with settled(), simulated(options.rate):
        for mode, make in modes.items():
            alone = EngineLoads(partial(make, config, runner))
            started[f"{mode}_s"] = round(time.perf_counter() - begin, 1)
            show(f"{mode}: engine after {started[f'{mode}_s']} s")
            for concurrency in options.concurrency:
                figures = measured(alone, prompts[:concurrency], runner.vocabulary_size, options)
                rows.append({"mode": mode, "concurrency": concurrency, "label": LABEL, **figures})
                show(_line(rows))
                keep(options, rows, started)
            alone.close()
    if link is not None:
        link.close()


def _line(rows: Sequence[dict[str, Any]]) -> str:
    row, names = rows[-1], ("tokens_per_second", "whole_tokens_per_second", "tokens_per_message", "as_the_model")
    drafted = next((one for one in rows[:-1] if one["concurrency"] == row["concurrency"]), None)
    figures = ", ".join(f"{name} {row[name]}" for name in names)
    if drafted is not None:
        figures += ", drafted to plain " + " and ".join(f"{drafted[name] / row[name]:.3f}" for name in names[:2])
    return f"{LABEL}: c={row['concurrency']} {row['mode']} {figures}\n    {line(row['steps'])}"


def keep(options: Any, rows: list[dict[str, Any]], started: dict[str, float]) -> None:
    """Write what is measured so far."""
    document = {"label": LABEL, "machine": describe(), "settings": settings_of(options)}
    write_json(options.json, document | started | {"results": rows})


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", required=True, help="folder that benchmarks.shared.random_model wrote")
    parser.add_argument("--head", default="", help="folder of a head, written if there is none; by default plain alone")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rate", type=float, default=0.7)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--concurrency", default="64,128", type=comma_separated(int))
    parser.add_argument("--prompt-tokens", type=int, default=1280)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument(
        "--whole", default="80,1024", type=comma_separated(int), help="%% of prompts, tokens of answers"
    )
    parser.add_argument("--few-sizes", action="store_true", help="capture only what these loads run in")
    parser.add_argument("--target", default="{}", type=json.loads, help="more settings of the target, as JSON")
    options = parser.parse_args()
    run(options, [], {})


if __name__ == "__main__":
    if len(sys.argv) == 3 and not sys.argv[1].startswith("-"):
        # Another rank, of the rate and the descriptor. It grows the same trees.
        guessed = float(sys.argv[1])
        with simulated(guessed):
            follow(int(sys.argv[2]), partial(load_rank, rate=guessed))
    else:
        configure_logging("info")
        main()
        # At the interpreter's end NCCL waits for graphs that hold its calls.
        leave(0)
