"""FlashInfer's kernels on the inputs of `tree_attention.py`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import flashinfer
import torch
from flashinfer.xqa import xqa
from torch import Tensor

from benchmarks.kernels.attention_inputs import DEVICE, DTYPE, Inputs, measure
from tree_kernels.attention import ancestor_mask, sequence_mask


def flashinfer_runs(inputs: Inputs) -> Iterator[tuple[str, dict[str, float]]]:
    case, batch = inputs.case, inputs.batch
    per_sequence = len(batch.pages[0])
    starts = torch.tensor(batch.query_starts, dtype=torch.int32)
    page_starts = torch.arange(0, case.batch * per_sequence + 1, per_sequence, dtype=torch.int32)
    table = torch.tensor(batch.pages, dtype=torch.int32, device=DEVICE).flatten()
    last = torch.full((case.batch,), (case.context - 1) % case.page_size + 1, dtype=torch.int32)
    workspace = torch.empty(512 << 20, dtype=torch.uint8, device=DEVICE)
    kinds: dict[str, dict[str, Any]] = {"fa2_causal": {"causal": True}}
    if case.chain:
        kinds["fa3_causal"] = {"causal": True}
    else:
        masks = [sequence_mask(batch, b).flatten() for b in range(case.batch)]
        kinds["fa2_mask"] = {"custom_mask": torch.cat(masks).to(DEVICE)}
    for name, kind in kinds.items():
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=name[:3])
        for _ in range(2):
            started = time.perf_counter()
            wrapper.plan(
                starts, page_starts, table, last, case.query_heads, case.kv_heads, case.width, case.page_size,
                q_data_type=DTYPE, sm_scale=inputs.scale, **kind,
            )  # fmt: skip
            torch.cuda.synchronize()
            plan_us = (time.perf_counter() - started) * 1e6

        def run(keys: Tensor, values: Tensor, wrapper: Any = wrapper) -> Tensor:
            output: Tensor = wrapper.run(inputs.query, (keys, values))
            return output

        result = measure(inputs, run, causal="causal" in kind)
        yield name, {**result, "plan_host_us": plan_us}


def xqa_run(inputs: Inputs, workspace: Tensor, semaphores: Tensor) -> dict[str, float]:
    """FlashInfer's XQA with a tree mask: pages of 16 or 64, one build per number of rows."""
    case, batch = inputs.case, inputs.batch
    words = (case.rows + 31) // 32 * 2
    packed = torch.zeros(case.batch, case.rows, words, dtype=torch.int32)
    for b in range(case.batch):
        row, column = ancestor_mask(batch.parents[b], case.rows).nonzero(as_tuple=True)
        packed[b].index_put_((row, column // 16), (1 << column % 16).to(torch.int32), accumulate=True)
    mask = packed.to(torch.uint16).to(DEVICE)
    table = torch.tensor(batch.pages, dtype=torch.int32, device=DEVICE)
    lengths = torch.full((case.batch, 1), case.context, dtype=torch.uint32, device=DEVICE)
    shape = (case.batch, 1, case.rows, case.query_heads, case.width)

    def run(keys: Tensor, values: Tensor) -> Tensor:
        output = torch.empty(shape, device=DEVICE, dtype=DTYPE)
        xqa(
            inputs.query.view(shape), keys, values, table, lengths, output, workspace, semaphores, case.kv_heads,
            case.page_size, q_scale=1.0, kv_scale=1.0, q_seq_len=case.rows, mask=mask,
        )  # fmt: skip
        return output.view(inputs.query.shape)

    return measure(inputs, run)
