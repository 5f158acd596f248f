"""How long launches take on a GPU, without the host's time to launch them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from benchmarks.shared.report import median_and_spread

# One H200, measured: a device copy counting reads and writes, and a large bf16 matrix product.
BYTES_PER_US = 4.3e6
FLOP_PER_US = 790e6
# Far more than an L2 cache.
_COPIED_BYTES = 1 << 30
# Replays that are not counted: clocks rise, and memory is touched for the first time.
_WARM = 3
# Copies that are timed together, so that their launches do not count.
_COPIES = 10


def captured_us(launches: Sequence[Callable[[], object]], replays: int = 11) -> tuple[float, float]:
    """Microseconds of one of these launches: median and distance of the quartiles over replays of a CUDA graph that has
    each of them once."""
    launches[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    times = []
    for _ in range(_WARM + replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(launches))
    return median_and_spread(times[_WARM:])


def copied_bytes_per_us() -> float:
    """Bytes that the memory of this GPU reads and writes in a microsecond while it copies a large tensor."""
    # Not as a graph: a node that copies takes another engine, which is slower (2.4 TB/s instead of 3.0 on an H100).
    source = torch.empty(_COPIED_BYTES, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(_WARM + 11):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(_COPIES):
            target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / _COPIES)
    return 2 * _COPIED_BYTES / median_and_spread(times[_WARM:])[0]
