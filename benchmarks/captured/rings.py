"""Captured steps on one GPU of Hopper with rings of weights and without them; and with one kind of product in other
rings, the rest as chosen.

    python -m benchmarks.captured.rings [--shapes llama-8b qwen3-8b] [--json FILE]
    python -m benchmarks.captured.rings --shapes llama-8b --trees 8 16 32 64 --sequences --sweep --json FILE

Weights, keys and values are random. A step is that of one sequence with a tree of so many rows behind 200 tokens, or of
so many sequences of one row behind 512. Times are medians of replays, one after the other, and how far logits are from
those without rings stands beside them: `tests/kernels/test_linear.py` compares the kernels with their definition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.engine.steps import StepLoad, error, fill_caches, replay_ms, runner_of, step
from benchmarks.random_models.shapes import SHAPES, config_of
from benchmarks.shared.machine import describe
from benchmarks.shared.report import parser_of, show, write_json
from target_service.model.cuda_graphs.runner import CapturedRunner, CaptureOptions
from tree_kernels.hopper.ring_tiling import PART, RingKind, RingTiling, choose_ring_tiling
from tree_kernels.linear import ring_backend

# Numbers at a time and stages that a sweep tries, where a processor's memory holds them.
_INNER, _STAGES = (64, 128), (2, 3, 4, 5, 6, 8, 10, 12)
_SHARED_BYTES = 227 << 10
_CONTEXT_OF_TREES, _CONTEXT_OF_SEQUENCES = 200, 512
_ROUNDS, _REPLAYS = 5, 40

# As `choose_ring_tiling`.
Choose = Callable[..., RingTiling | None]


@contextmanager
def chosen_by(choose: Choose) -> Iterator[None]:
    """Have rings tiled so within."""
    with patch.object(ring_backend, "choose_ring_tiling", choose):
        yield


def no_rings(*_: Any, **__: Any) -> None:
    """For `chosen_by`: Triton multiplies."""


def one_kind(kind: RingKind, block_inner: int, stages: int) -> Choose:
    """For `chosen_by`: rings of a kind, wherever there are some of any size, so; others as they are chosen."""

    def choose(of: RingKind, rows: int, outputs: int, inner: int, *, processors: int) -> RingTiling | None:
        chosen = choose_ring_tiling(of, rows, outputs, inner, processors=processors)
        if of is not kind:
            return chosen
        # Sizes that are tried for other rows: the splits are those of the shape.
        splits = next((one.splits for one in _of_any_rows(of, outputs, inner, processors)), None)
        block_rows = max(8, 1 << (rows - 1).bit_length())
        if splits is None or block_rows > 64 or inner % (splits * block_inner):
            return chosen
        return RingTiling(block_rows, block_inner, splits, min(stages, inner // splits // block_inner))

    return choose


def _of_any_rows(kind: RingKind, outputs: int, inner: int, processors: int) -> Iterator[RingTiling]:
    for rows in (8, 16, 32, 64):
        found = choose_ring_tiling(kind, rows, outputs, inner, processors=processors)
        if found is not None:
            yield found


def rings(kind: RingKind, rows: int) -> Iterator[tuple[int, int]]:
    """Numbers at a time and stages whose ring fits a processor, beside what sums are stored through."""
    for block_inner, stages in product(_INNER, _STAGES):
        ring = (kind.parts * PART + max(8, rows)) * block_inner * 2 * stages
        if ring + 4 * PART * max(8, rows) < _SHARED_BYTES:
            yield block_inner, stages


class RandomSteps:
    """Captured steps of a model with random weights."""

    def __init__(self, shape: str, loads: list[StepLoad]) -> None:
        runner = runner_of(config_of(shape, None), torch.bfloat16, "triton", max(load.pages for load in loads))
        fill_caches(runner)
        self._runner = CapturedRunner(runner, CaptureOptions(max_rows=64, max_sequences=64))

    def timed(self, load: StepLoad, choose: Choose) -> tuple[float, Tensor]:
        """Milliseconds of a replay, and the step's logits."""
        self._runner.drop_captures()
        with chosen_by(choose):
            logits = self._runner.forward(step(load, self._runner.vocabulary_size, 1)).clone()
            return median(replay_ms(self._runner, load, _REPLAYS) for _ in range(_ROUNDS)), logits


@torch.inference_mode()
def measured(steps: RandomSteps, load: StepLoad, *, sweep: bool) -> dict[str, Any]:
    """Times of one step."""
    without, expected = steps.timed(load, no_rings)
    with_rings, logits = steps.timed(load, choose_ring_tiling)
    found: dict[str, Any] = {
        "load": str(load),
        "without_ms": without,
        "with_ms": with_rings,
        "error": error(logits, expected.float()),
        "other_argmax": int((logits.argmax(-1) != expected.argmax(-1)).sum()),
    }
    show(f"{load}: {without:.4f} to {with_rings:.4f} ms, {with_rings / without:.3f} x, error {found['error']:.4f}")
    if sweep:
        found["sweep"] = {}
        for kind in RingKind:
            for block_inner, stages in rings(kind, sum(load.rows)):
                took, _ = steps.timed(load, one_kind(kind, block_inner, stages))
                found["sweep"][f"{kind} {block_inner} {stages}"] = took
                show(f"  {kind} {block_inner} {stages}: {(took - with_rings) * 1e3:+.0f} us")
    return found


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--shapes", nargs="+", default=["llama-8b", "qwen3-8b"], choices=list(SHAPES))
    parser.add_argument("--trees", nargs="*", type=int, default=[4, 8, 16, 32, 64], help="rows of one sequence")
    parser.add_argument("--sequences", nargs="*", type=int, default=[8, 32, 64], help="sequences of one row")
    parser.add_argument("--sweep", action="store_true", help="also in other rings")
    options = parser.parse_args()
    loads = [StepLoad((rows,), context=_CONTEXT_OF_TREES) for rows in options.trees]
    loads += [StepLoad((1,) * count, context=_CONTEXT_OF_SEQUENCES) for count in options.sequences]
    found: dict[str, list[dict[str, Any]]] = {}
    for shape in options.shapes:
        show(shape)
        steps, found[shape] = RandomSteps(shape, loads), []
        for load in loads:
            found[shape].append(measured(steps, load, sweep=options.sweep))
            write_json(options.json, {"machine": describe(), "steps": found})
        del steps
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
