"""Requests that begin with the same text are read in passes that take their common pages once, and say the same as
without (fp32)."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from conftest import make_tiny
from engine_harness import engine_config, knowing_tree, make_runner, request, run
from rerun_graphs import CPU, ReadBack, RerunRunner, without_gpu
from torch import Tensor

from outrider.sampling import SamplingParams
from target_service.core.sequence import SequenceRequest
from target_service.engine import common_pages
from target_service.execution.device_executor import DeviceSteps
from target_service.model.cuda_graphs import sizes
from target_service.model.cuda_graphs.capturing import capture_steps
from target_service.model.cuda_graphs.runner import CaptureOptions
from target_service.model.runner import runner_over
from target_service.model.support import description_of
from tree_models.building import build
from tree_models.fused.preparing import LayerOptions
from tree_models.layers.placing import Placement
from tree_models.reference import published_tensors

__all__ = ["without_gpu"]

ROWS, SEQUENCES, PAGE_SIZE = 64, 12, 16
SHARED = [(7 * i) % 190 + 5 for i in range(150)]
CONFIG = engine_config(max_step_rows=ROWS, max_running=SEQUENCES, prefill_chunk=ROWS // 2)


class CommonReadBack(ReadBack):
    """Looks at what every pass is told to read once for each group."""

    def __init__(self) -> None:
        super().__init__()
        self.reads_common_pages = True
        # Of every pass the groups in their order: how many sequences each has, and pages in common.
        self.seen = set[tuple[tuple[int, int], ...]]()

    def run(self, plan: Any, query: Tensor, *others: Any) -> Tensor:
        if plan.common is not None:
            table, rows = plan.page_table.tolist(), plan.query_starts.tolist()
            held = zip(plan.common.tolist(), plan.page_starts.tolist(), plan.prefix_lengths.tolist(), strict=True)
            members = [
                (tuple(table[start : start + count]), prefix)
                for (count, start, prefix), (first, end) in zip(held, itertools.pairwise(rows), strict=True)
                if count and end > first
            ]
            assert all(len(pages) * PAGE_SIZE <= prefix for pages, prefix in members)
            groups = [(pages, len(list(group))) for pages, group in itertools.groupby(members, key=lambda one: one[0])]
            # The last page says which group it is.
            assert len({pages[-1] for pages, _ in groups}) == len({pages for pages, _ in groups})
            self.seen.add(tuple((count, len(pages)) for pages, count in groups))
        return super().run(plan, query, *others)


def wanted(texts: int) -> list[SequenceRequest]:
    """Requests behind so many shared texts, in turns, and two others."""
    sampling = SamplingParams(temperature=0.8, top_p=0.9, seed=5, ignore_eos=True)
    # They begin alike.
    beginnings = [[*SHARED[:20], *[(token + 31 * text) % 190 + 5 for token in SHARED[20:]]] for text in range(texts)]
    shared = [request([*beginnings[i % texts], 30 + i, 5 + 3 * i], 24, sampling=sampling) for i in range(8 + texts)]
    others = [request([9 + i, *SHARED[: 20 * i]], 15, sampling=sampling) for i in range(2)]
    return [shared[0], *others, *shared[1:]]


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize("draft", ["none", "knowing"])
@pytest.mark.parametrize("selects", [False, True], ids=["host rows", "device rows"])
@pytest.mark.parametrize(("shared", "fewest"), [(1, 8), (2, 3)], ids=["one text", "two texts"])
def test_common_pages_are_read_once(
    monkeypatch: pytest.MonkeyPatch, draft: str, selects: bool, shared: int, fewest: int
) -> None:
    monkeypatch.setattr(common_pages, "_WORTH_KEYS", shared * fewest * 128)
    monkeypatch.setattr(sizes, "FEWEST_IN_COMMON", fewest)
    model, requests = make_tiny(), wanted(shared)
    said = run(make_runner(model, kv_tokens=8192), requests, config=CONFIG)
    description = description_of(model.config)
    assert description is not None
    decoder = build(description, published_tensors(model), Placement(CPU, torch.float32))
    runner = runner_over(decoder, None, num_pages=512, page_size=PAGE_SIZE, end_token_ids=())
    runner.attention = attention = CommonReadBack()
    if selects:
        runner.enable_device_row_selection(SEQUENCES, 7)
    layers = LayerOptions(compiled=False)
    captured = RerunRunner(runner, CaptureOptions(ROWS, SEQUENCES, layers, few_outputs=6, common_pages=True))
    capture_steps(captured, seconds=60.0, memory_share=0.0)
    steps = DeviceSteps(captured, backend="torch", max_sequences=SEQUENCES, max_rows=ROWS)
    texts = [(*one.token_ids, *outcome.token_ids) for one, outcome in zip(requests, said, strict=True)]
    propose = knowing_tree(texts, 211, 20, right=0.8) if draft == "knowing" else None
    attention.seen.clear()  # of the rehearsals
    outcomes = run(captured, requests, config=CONFIG, propose=propose, stagger=1, launch=steps)
    assert [one.token_ids for one in outcomes] == [one.token_ids for one in said]
    # 128 of the 150 tokens.
    assert {count for groups in attention.seen for _, count in groups} == {8}
    # Side by side.
    assert any(len(groups) == shared and min(groups)[0] >= fewest for groups in attention.seen)
