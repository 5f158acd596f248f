"""The verification kernels against the loop over sequences: interpreted on a CPU, compiled under `make test-gpu`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_worker import INTERPRETED, compiled, work

pytest.importorskip("triton")

from tree_kernels.verification import DeviceVerifier, Mode, RowsToVerify

WORKER = "device_verification_worker.py"


def check(found: dict[str, Any]) -> None:
    assert found["wrong"] == {}
    assert found["wrong_moves"] == []
    assert found["rows_of_nothing"] == []
    # Trees that nobody accepts would test nothing.
    assert found["accepted"] > found["walks"] > 100
    assert found["lossy"] > 10


def test_every_step_is_verified_as_the_loop_does() -> None:
    check(work(WORKER, **INTERPRETED))


def test_the_kernels_compile_for_a_gpu() -> None:
    """With and without filters, typical acceptance and distributions: the interpreter runs what no compiler takes. A
    program has 227 KB of shared memory."""
    needed = compiled("device_verification_compiling_worker.py")
    assert {name.partition(",")[0] for name in needed} >= {"walk_kernel", "gain_kernel"} and len(needed) > 12
    assert max(needed.values()) < 227 << 10


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@needs_gpu
def test_every_step_is_verified_as_the_loop_does_on_a_gpu() -> None:
    check(work(WORKER, TRITON_INTERPRET="0"))


DISTRIBUTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"mode": Mode.GREEDY},
    "coupled": {"mode": Mode.COUPLED},
    "coupled, filtered": {"mode": Mode.COUPLED, "top_p": 0.9, "min_p": 0.001},
    "rejection": {"mode": Mode.REJECTION, "temperature": 0.7},
    "rejection, filtered": {"mode": Mode.REJECTION, "top_k": 30},
    "typical": {"mode": Mode.TYPICAL, "epsilon": 0.09, "delta": 0.3},
    "typical, filtered": {"mode": Mode.TYPICAL, "epsilon": 0.09, "delta": 0.3, "top_p": 0.9},
}


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("distribution", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS)
@pytest.mark.parametrize("vocabulary", [49152, 128256])
def test_a_captured_graph_verifies_whatever_step_is_written_into_its_tensors(
    distribution: dict[str, Any], vocabulary: int
) -> None:
    device, rows, sequences = torch.device("cuda"), 48, 5
    kernels = DeviceVerifier(device, vocabulary, sequences, rows)
    loop = DeviceVerifier(device, vocabulary, sequences, rows, "torch")
    logits = torch.zeros(rows, vocabulary, device=device, dtype=torch.bfloat16)
    integers = torch.zeros(2 * rows + kernels.integers, dtype=torch.int32, device=device)
    token_ids, parents, parameters = integers.split([rows, rows, kernels.integers])
    greedy = distribution["mode"] is Mode.GREEDY
    call = kernels.greedy if greedy else kernels.sampled
    parameters.copy_(torch.from_numpy(kernels.pack([])))
    call(logits, token_ids, parents, parameters)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        verdicts = call(logits, token_ids, parents, parameters)
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        asked, first, tree = [], 0, []
        for b in range(sequences - seed % 2):
            count = int(torch.randint(0, 10, (), generator=generator))
            asked.append(RowsToVerify(first, count, seed=2**63 + seed, position=2**33 + b, **distribution))
            tree += [int(torch.randint(row, (), generator=generator)) if row else 0 for row in range(count)]
            first += count
        logits.copy_(torch.randn(rows, vocabulary, generator=generator) * 6)
        # Likely tokens of the parents, so that some are accepted; siblings differ.
        best = logits.float().topk(16).indices.tolist()
        tokens = torch.zeros(rows, dtype=torch.int32)
        for one in asked:
            for row in range(1, one.rows):
                own = tree[one.first_row : one.first_row + one.rows]
                tokens[one.first_row + row] = best[one.first_row + own[row]][own[1:row].count(own[row])]
        packed = [tokens, torch.tensor(tree + [0] * (rows - len(tree)), dtype=torch.int32)]
        integers.copy_(torch.cat([*packed, torch.from_numpy(kernels.pack(asked))]))
        graph.replay()
        expected = (loop.greedy if greedy else loop.sampled)(logits, token_ids, parents, parameters)
        counts = expected.accepted_counts.tolist()
        assert verdicts.accepted_counts.tolist() == counts
        assert verdicts.next_tokens.tolist() == expected.next_tokens.tolist()
        for one, accepted in zip(asked, counts, strict=False):
            own_rows = slice(one.first_row, one.first_row + accepted)
            assert verdicts.accepted_rows[own_rows].tolist() == expected.accepted_rows[own_rows].tolist()
