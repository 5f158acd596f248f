"""What kept prefixes cost where nothing is found, and what they spare a conversation's second turn.

python -m benchmarks.engine.prefixes --model NAME [--repeats 7] [--json FILE]

Processor time of the engine's loop, which other work on the machine hardly changes, with and without the cache in
turns, by one model: the same weights at other addresses differ by more than what is measured.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import count

from benchmarks.shared.report import parser_of, provenance, show, write_json
from outrider.sampling import SamplingParams, VerificationMode
from target_service.config import TargetConfig
from target_service.core.sequence import SequenceFinished, SequenceRequest, StepVerdict
from target_service.engine.loop import EngineLoop
from target_service.execution.host_executor import HostSteps
from target_service.model.loading.loader import load_runner
from target_service.model.runner import ModelRunner

# Tokens of a prompt of which nothing is found, and of its answer; and of a conversation, and a turn of it.
_PROMPT, _ANSWER, _CONVERSATION, _TURN = 192, 24, 1_500, 100


class Conversations:
    """An engine's loop without a draft, stepped by hand, and the processor time that it takes."""

    def __init__(self, runner: ModelRunner, config: TargetConfig, seed: int) -> None:
        self._loop = EngineLoop(runner, config, steps=HostSteps(runner))
        self._ids, self._words, self._vocabulary = count(1), random.Random(seed), runner.vocabulary_size

    def text(self, tokens: int) -> tuple[int, ...]:
        """Random tokens, which nobody else begins with."""
        return tuple(self._words.randrange(self._vocabulary) for _ in range(tokens))

    def seconds(self, token_ids: Sequence[int], max_tokens: int) -> tuple[float, tuple[int, ...]]:
        """Processor seconds to answer a prompt, and the answer."""
        sampling = SamplingParams(ignore_eos=True)
        wanted = SequenceRequest(tuple(token_ids), sampling, VerificationMode.GREEDY, 1, max_tokens)
        begun, answer, ended = time.process_time(), list[int](), False
        self._loop.add(self._loop.make(next(self._ids), wanted))
        while not ended:
            for event in self._loop.step() or ():
                if isinstance(event, StepVerdict):
                    answer += event.token_ids
                ended = ended or isinstance(event, SequenceFinished)
        return time.process_time() - begun, tuple(answer)


def no_hit(kept: Conversations, plain: Conversations, repeats: int) -> dict[str, float]:
    """Processor milliseconds of a request of which nothing is found, with the cache and without: the least of each,
    since what else runs on the machine only adds to it; and the median of what neighbouring turns differ by."""
    taken: dict[Conversations, list[float]] = {kept: [], plain: []}
    for turn in range(8 * repeats):
        for one in (kept, plain) if turn % 2 else (plain, kept):
            taken[one].append(1e3 * one.seconds(one.text(_PROMPT), _ANSWER)[0])
    with_cache, without = (min(taken[one]) for one in (kept, plain))
    apart = statistics.median(one / other - 1 for one, other in zip(taken[kept], taken[plain], strict=True))
    found = {"with": with_cache, "without": without, "more_percent": 100 * (with_cache / without - 1)}
    return found | {"median_more_percent": 100 * apart}


def second_turn(kept: Conversations, plain: Conversations, repeats: int) -> dict[str, float]:
    """Processor milliseconds to the first token of a conversation's next turn."""
    turns: dict[Conversations, list[float]] = {kept: [], plain: []}
    for _ in range(repeats):
        for one in (kept, plain):
            first = one.text(_CONVERSATION)
            _, answer = one.seconds(first, _ANSWER)
            taken, _ = one.seconds((*first, *answer, *one.text(_TURN)), 1)
            turns[one].append(1e3 * taken)
    with_cache, without = (statistics.median(turns[one]) for one in (kept, plain))
    return {"with": with_cache, "without": without, "sooner": without / with_cache}


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    config = TargetConfig(model=options.model, speculation=False, threads=1, kv_tokens=32_768)
    runner = load_runner(config)
    kept, plain = (
        Conversations(runner, replace(config, prefix_cache=shares), seed=number)
        for number, shares in enumerate((True, False))
    )
    for one in (kept, plain):
        one.seconds(one.text(_PROMPT), _ANSWER)
    found: dict[str, dict[str, float]] = {
        "no_hit_ms": no_hit(kept, plain, options.repeats),
        "second_turn_ms": second_turn(kept, plain, options.repeats),
    }
    for name, figures in found.items():
        show(f"{name}: " + ", ".join(f"{key} {value:.2f}" for key, value in figures.items()))
    write_json(options.json, provenance("engine.prefixes", ["torch"]) | found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
