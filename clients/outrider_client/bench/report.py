"""From blocks to figures: one cell per mode, task and concurrency, as JSON types."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import product, zip_longest
from typing import Any

from outrider_client.bench.samples import PLAIN, TRANSFORMERS, Block, Mode, Sample

SCHEMA = "outrider.bench.v1"
ALL_TASKS = "all"
Cell = dict[str, Any]
# (repeat, concurrency, prompt id, turn) of an answer.
_Place = tuple[int, int, str, int]


def cells(blocks: Sequence[Block], modes: Sequence[Mode]) -> list[Cell]:
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


def _cell(mode: Mode, task: str, concurrency: int, blocks: Sequence[Block], plain: dict[_Place, Sample]) -> Cell:
    samples = [request.sample for block in blocks for request in block.requests if request.sample]
    rates = [_rate(group) for group in _by_repeat(blocks)]
    drafted, accepted = (
        _sum_by_depth(s.drafted_by_depth for s in samples),
        _sum_by_depth(s.accepted_by_depth for s in samples),
    )
    tokens, steps = sum(len(s.token_ids) for s in samples), sum(s.steps for s in samples)
    return {
        "mode": mode.name,
        "draft_placement": mode.placement or None,
        "task": task,
        "concurrency": concurrency,
        "n": len(samples),
        "refused": _refusals(blocks),
        "tokens": tokens,
        "tokens_per_second": statistics.median(rates),
        "tokens_per_second_spread": {
            "min": min(rates),
            "max": max(rates),
            "by_repeat": rates,
            "by_block": _quartiles([block.tokens / block.seconds for block in blocks]),
        },
        "mean_accepted_length": _ratio(tokens, steps),
        "acceptance_by_depth": [_ratio(a, d) for a, d in zip(accepted, drafted, strict=False)],
        "drafted_tokens": sum(s.drafted_tokens for s in samples),
        "accepted_tokens": sum(s.accepted_tokens for s in samples),
        "fallback_steps": sum(s.fallback_steps for s in samples),
        "draft_wait_ms_per_step": _ratio(1e3 * sum(s.draft_wait for s in samples), steps),
        "ttft_ms": _p50_p95([1e3 * s.ttft for s in samples]),
        "tpot_ms": _p50_p95([1e3 * s.tpot for s in samples if s.tpot is not None]),
        **_identity(mode, blocks, plain),
    }


def differing(found: Iterable[Cell]) -> int:
    """The number of outputs that differ from plain ones; without transformers, whose arithmetic differs."""
    return sum(
        cell["differing_outputs"] or 0 for cell in found if cell["task"] == ALL_TASKS and cell["mode"] != TRANSFORMERS
    )


def undrafted(found: Sequence[Cell]) -> list[Mode]:
    """Modes with a drafter in whose answers nothing was drafted at all."""
    drafted: dict[Mode, int] = {}
    for cell in found:
        mode = Mode(cell["mode"], cell["draft_placement"] or "")
        if mode.drafts and cell["task"] == ALL_TASKS and cell["n"]:
            drafted[mode] = drafted.get(mode, 0) + cell["drafted_tokens"]
    return [mode for mode, tokens in drafted.items() if not tokens]


def _answers(blocks: Iterable[Block]) -> dict[_Place, Sample]:
    return {
        (block.repeat, block.concurrency, request.prompt_id, request.turn): request.sample
        for block in blocks
        for request in block.requests
        if request.sample is not None
    }


def _identity(mode: Mode, blocks: Sequence[Block], plain: dict[_Place, Sample]) -> Cell:
    """Outputs compared with plain ones of the same repeat and concurrency; plain ones with the first plain one."""
    first: dict[tuple[str, int], Sample] = {}
    for (_, _, prompt_id, turn), sample in plain.items():
        first.setdefault((prompt_id, turn), sample)
    compared = different = 0
    for (repeat, concurrency, prompt_id, turn), sample in _answers(blocks).items():
        if mode.name == PLAIN:
            reference = first.get((prompt_id, turn))
        else:
            reference = plain.get((repeat, concurrency, prompt_id, turn))
        if reference is not None:
            compared += 1
            different += reference.token_ids != sample.token_ids
    return {
        "identical_to_plain": different == 0 if compared else None,
        "differing_outputs": different if compared else None,
        "compared_outputs": compared,
    }


def _by_repeat(blocks: Sequence[Block]) -> list[list[Block]]:
    repeats = sorted({block.repeat for block in blocks})
    return [[block for block in blocks if block.repeat == repeat] for repeat in repeats]


def _rate(blocks: Sequence[Block]) -> float:
    return _ratio(sum(block.tokens for block in blocks), sum(block.seconds for block in blocks)) or 0.0


def _refusals(blocks: Sequence[Block]) -> dict[str, int]:
    requests = (request for block in blocks for request in block.requests)
    return dict(Counter(request.refusal for request in requests if request.sample is None))


def _sum_by_depth(columns: Iterable[Sequence[int]]) -> list[int]:
    return [sum(counts) for counts in zip_longest(*columns, fillvalue=0)]


def _ratio(over: float, under: float) -> float | None:
    return over / under if under else None


def percentile(values: Sequence[float], share: float) -> float | None:
    """Nearest-rank percentile; None of nothing."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def _p50_p95(values: Sequence[float]) -> dict[str, float | None]:
    return {"p50": percentile(values, 0.5), "p95": percentile(values, 0.95)}


def _quartiles(values: Sequence[float]) -> dict[str, float | None]:
    return {"p25": percentile(values, 0.25), "p50": percentile(values, 0.5), "p75": percentile(values, 0.75)}
