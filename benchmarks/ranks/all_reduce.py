"""Time of summing up rows over two or more GPUs of one host, within a CUDA graph: by NCCL, and by one launch that adds
a residual and norms too (`tree_kernels.rank_sums`).

    python -m benchmarks.ranks.all_reduce --ranks 2 --json FILE

Each graph holds 64 sums one after the other, as a model of 32 layers has them; times are of one.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from benchmarks.shared.report import median_and_spread, parser_of, show, write_json
from target_service.model.ranks.one_shot import one_shot_sums
from tree_kernels.linear import Norm
from tree_kernels.rank_sums import added_parts

ROWS, WIDTH, SUMS, REPLAYS, CHECKED = (1, 8, 32, 64, 256), 4096, 64, 20, 50


def replayed_us(launch: Callable[[], object]) -> float:
    """Microseconds of one of the sums that `launch` launches, in a graph."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(SUMS):
            launch()
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / SUMS)
    return median_and_spread(times)[0]


def by_nccl(rows: Tensor) -> Callable[[], object]:
    return lambda: distributed.all_reduce(rows)


def in_one_shot(rows: Tensor) -> Callable[[], object]:
    """Each rank reads the others' rows, which a product has written to where they can. Sums are compared first."""
    sums = one_shot_sums(rows.dtype, rows.device)
    norm = Norm(torch.ones(WIDTH, dtype=rows.dtype, device=rows.device), 1e-5)
    for count in range(CHECKED):
        residual, own = rows * count, rows + count % 7
        parts = [torch.empty_like(own) for _ in range(distributed.get_world_size())]
        distributed.all_gather(parts, own)
        expected, normed = added_parts(parts, residual, norm)
        found, scaled = sums.add(sums.place(*rows.shape).copy_(own), residual, norm)
        assert scaled is not None and normed is not None
        torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)
        torch.testing.assert_close(scaled.rows, normed.rows)
        torch.testing.assert_close(sums.summed(own), added_parts(parts)[0], rtol=0.0, atol=0.0)
    return lambda: sums.add(sums.place(*rows.shape), rows, norm)


def work(rank: int, ranks: int, port: int, path: Any) -> None:
    # Multicast needs what containers often lack.
    os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    torch.cuda.set_device(rank)
    where = f"tcp://127.0.0.1:{port}"
    device = torch.device("cuda", rank)
    distributed.init_process_group("nccl", where, rank=rank, world_size=ranks, device_id=device)
    results: list[dict[str, Any]] = []
    for name, kind in (("nccl", by_nccl), ("one shot", in_one_shot)):
        for rows in ROWS:
            generator = torch.Generator(device).manual_seed(rank)
            numbers = torch.randn(rows, WIDTH, generator=generator, device=device).bfloat16()
            took = replayed_us(kind(numbers))
            results.append({"by": name, "rows": rows, "us": took})
            if rank == 0:
                show(f"{name}, {rows} rows of {WIDTH}: {took:.1f} us")
                write_json(path, results)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spawn(work, (options.ranks, port, options.json), nprocs=options.ranks)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
