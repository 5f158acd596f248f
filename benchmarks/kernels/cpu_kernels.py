"""Time of the operations of `tree_kernels` on a CPU, at the shape of SmolLM2-135M.

    python -m benchmarks.kernels.cpu_kernels [--threads 2] [--calls 200] [--json FILE]

Microseconds of one call: median over `--calls`, and the distance between the quartiles.
"""

from __future__ import annotations

import platform
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from benchmarks.shared.report import median_and_spread, parser_of, show, write_json
from tree_kernels.attention import AttentionBatch, TreeAttention
from tree_kernels.paging import write_kv
from tree_kernels.verification import Chance, coupled_token, move_kv, rejection_walk

QUERY_HEADS, KV_HEADS, WIDTH, LAYERS, VOCABULARY = 9, 3, 64, 30, 49_152
PAGE_SIZE, PAGES = 16, 256

Measured = tuple[str, float, float]


@dataclass(frozen=True)
class Clock:
    """Times `calls` calls, after ten that are not counted."""

    calls: int

    def us(self, name: str, call: Callable[[], object]) -> Measured:
        times = []
        for i in range(self.calls + 10):
            started = time.perf_counter()
            call()
            if i >= 10:
                times.append((time.perf_counter() - started) * 1e6)
        return name, *median_and_spread(times)


def attention(clock: Clock, dtype: torch.dtype, context: int, rows: int, shuffled: bool) -> Iterator[Measured]:
    rng = random.Random(0)
    count = -(-context // PAGE_SIZE)
    pages = tuple(rng.sample(range(PAGES), count) if shuffled else range(count))
    parents = (0, *(rng.randrange(i) for i in range(1, rows)))
    batch = AttentionBatch((0, rows), (context - rows,), (pages,), PAGE_SIZE, (parents,))
    keys, values = (torch.randn(PAGES, PAGE_SIZE, KV_HEADS, WIDTH).to(dtype) for _ in range(2))
    query = torch.randn(rows, QUERY_HEADS, WIDTH).to(dtype)
    backend = TreeAttention("torch")
    plan = backend.plan(batch)
    name = f"{str(dtype).removeprefix('torch.')}, {context} keys, {rows} rows{', shuffled pages' * shuffled}"
    yield clock.us(f"attention plan: {name}", lambda: backend.plan(batch))
    yield clock.us(f"attention run: {name}", lambda: backend.run(plan, query, keys, values, WIDTH**-0.5))


def others(clock: Clock) -> Iterator[Measured]:
    caches = [torch.randn(PAGES, PAGE_SIZE, KV_HEADS, WIDTH) for _ in range(2 * LAYERS)]
    slots = torch.arange(16)
    rows = torch.randn(16, KV_HEADS, WIDTH)
    yield clock.us("write_kv: 16 rows, one layer", lambda: write_kv(rows, rows, caches[0], caches[1], slots))
    yield clock.us("move_kv: 3 rows, all layers", lambda: move_kv(caches, [5, 9, 12], [1, 2, 3]))
    probs = torch.randn(VOCABULARY).mul(3).softmax(0)
    filtered = torch.where(probs >= probs.topk(1000).values[-1], probs, 0.0)
    yield clock.us("coupled_token: whole vocabulary", lambda: coupled_token(probs, 1, 2))
    yield clock.us("coupled_token: 1000 tokens left", lambda: coupled_token(filtered, 1, 2))
    ids = tuple(range(32))
    distribution = {0: (ids, (1,) * 32)}
    parents, tokens = (0,) * 9, (0, *range(8))
    yield clock.us(
        "rejection_walk: 8 siblings",
        lambda: rejection_walk(parents, tokens, distribution, lambda *_: probs, Chance(lambda: 0.99)),
    )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--calls", type=int, default=200, help="of which each figure is the median")
    options = parser.parse_args()
    clock = Clock(options.calls)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    results: list[Measured] = []
    with torch.inference_mode():
        for dtype in (torch.bfloat16, torch.float32):
            for context in (500, 1500):
                for rows in (1, 16, 64):
                    results += attention(clock, dtype, context, rows, shuffled=False)
                results += attention(clock, dtype, context, 1, shuffled=True)
        results += others(clock)
    for name, median, spread in results:
        show(f"{name:60s} {median:8.1f} +-{spread:.1f} us")
    document = {
        "machine": {"cpu": platform.processor(), "threads": options.threads, "torch": torch.__version__},
        "calls": options.calls,
        "us": {name: {"median": median, "spread": spread} for name, median, spread in results},
    }
    write_json(options.json, document)


if __name__ == "__main__":
    main()
