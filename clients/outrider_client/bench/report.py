"""From blocks to figures: one cell per mode, task and concurrency, as JSON types."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import product, zip_longest
from typing import Any

from outrider_client.bench.samples import PLAIN, TRANSFORMERS, BenchMode, Block
from outrider_client.results import Result

SCHEMA = "outrider.bench.v1"
ALL_TASKS = "all"
Cell = dict[str, Any]
# (repeat, concurrency, prompt id, turn) of an answer.
_Place = tuple[int, int, str, int]


def cells(blocks: Sequence[Block], modes: Sequence[BenchMode]) -> list[Cell]:
    """The figures of every task (and all tasks together), concurrency and mode; modes in the order given."""
    plain = _answers(block for block in blocks if block.mode.name == PLAIN)
    tasks = [*dict.fromkeys(block.task for block in blocks), ALL_TASKS]
    levels = list(dict.fromkeys(block.concurrency for block in blocks))
    found = []
    for task, level, mode in product(tasks, levels, modes):
        group = [b for b in blocks if (b.mode, b.concurrency) == (mode, level) and task in (b.task, ALL_TASKS)]
        if group:
            found.append(_cell(mode, task, level, group, plain))
    baseline = {(c["task"], c["concurrency"]): c["tokens_per_second"] for c in found if c["mode"] == PLAIN}
    for cell in found:
        base = baseline.get((cell["task"], cell["concurrency"]))
        cell["speedup_over_plain"] = _ratio(cell["tokens_per_second"], base) if base else None
    return found


def _cell(mode: BenchMode, task: str, concurrency: int, blocks: Sequence[Block], plain: dict[_Place, Result]) -> Cell:
    requests = [request for block in blocks for request in block.requests]
    results = [request.result for request in requests if request.result]
    totals = [result.speculation for result in results]
    repeats = [[b for b in blocks if b.repeat == repeat] for repeat in sorted({b.repeat for b in blocks})]
    rates = [_ratio(sum(b.tokens for b in group), sum(b.seconds for b in group)) or 0.0 for group in repeats]
    drafted = map(sum, zip_longest(*(t.drafted_by_depth for t in totals), fillvalue=0))
    accepted = map(sum, zip_longest(*(t.accepted_by_depth for t in totals), fillvalue=0))
    tokens, steps = sum(len(result.token_ids) for result in results), sum(t.steps for t in totals)
    return {
        "mode": mode.name,
        "draft_placement": mode.placement or None,
        "task": task,
        "concurrency": concurrency,
        "n": len(results),
        "refused": dict(Counter(request.refusal for request in requests if request.result is None)),
        "tokens": tokens,
        "tokens_per_second": statistics.median(rates),
        "tokens_per_second_spread": {
            "min": min(rates),
            "max": max(rates),
            "by_repeat": rates,
            "by_block": _percentiles([block.tokens / block.seconds for block in blocks], 25, 50, 75),
        },
        "mean_accepted_length": _ratio(tokens, steps),
        "acceptance_by_depth": [_ratio(a, d) for a, d in zip(accepted, drafted, strict=False)],
        "drafted_tokens": sum(t.drafted_tokens for t in totals),
        "accepted_tokens": sum(t.accepted_tokens for t in totals),
        "fallback_steps": sum(t.fallback_steps for t in totals),
        "draft_wait_ms_per_step": _ratio(sum(t.draft_wait_ns for t in totals) / 1e6, steps),
        "ttft_ms": _percentiles([1e3 * result.time_to_first_token for result in results], 50, 95),
        "tpot_ms": _percentiles([1e3 * each for r in results if (each := r.time_per_output_token) is not None], 50, 95),
        **_identity(mode, blocks, plain),
    }


def differing(found: Iterable[Cell]) -> int:
    """The number of outputs that differ from plain ones; without transformers, whose arithmetic differs."""
    return sum(c["differing_outputs"] or 0 for c in found if c["task"] == ALL_TASKS and c["mode"] != TRANSFORMERS)


def undrafted(found: Sequence[Cell]) -> list[BenchMode]:
    """Modes with a drafter in whose answers nothing was drafted at all."""
    drafted: dict[BenchMode, int] = {}
    for cell in found:
        mode = BenchMode(cell["mode"], cell["draft_placement"] or "")
        if mode.drafts and cell["task"] == ALL_TASKS and cell["n"]:
            drafted[mode] = drafted.get(mode, 0) + cell["drafted_tokens"]
    return [mode for mode, tokens in drafted.items() if not tokens]


def _answers(blocks: Iterable[Block]) -> dict[_Place, Result]:
    return {
        (block.repeat, block.concurrency, request.prompt_id, request.turn): request.result
        for block in blocks
        for request in block.requests
        if request.result is not None
    }


def _identity(mode: BenchMode, blocks: Sequence[Block], plain: dict[_Place, Result]) -> Cell:
    """Outputs compared with plain ones of the same repeat and concurrency; plain ones with the first plain one."""
    first: dict[tuple[str, int], Result] = {}
    for (*_, prompt_id, turn), result in plain.items():
        first.setdefault((prompt_id, turn), result)
    compared = different = 0
    for place, result in _answers(blocks).items():
        reference = first.get(place[2:]) if mode.name == PLAIN else plain.get(place)
        if reference is not None:
            compared += 1
            different += reference.token_ids != result.token_ids
    return {
        "identical_to_plain": different == 0 if compared else None,
        "differing_outputs": different if compared else None,
        "compared_outputs": compared,
    }


def _ratio(over: float, under: float) -> float | None:
    return over / under if under else None


def percentile(values: Sequence[float], share: float) -> float | None:
    """Nearest-rank percentile; None of nothing."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else None


def _percentiles(values: Sequence[float], *ranks: int) -> dict[str, float | None]:
    return {f"p{rank}": percentile(values, rank / 100) for rank in ranks}
