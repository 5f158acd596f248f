"""Captured steps without a GPU: a graph is a launch that is run again.

What a GPU would do by itself is done here by the plain forms of its kernels, over the very buffers of a captured step.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from target_service.model.cuda_graphs.pass_graphs import PassGraphs
from target_service.model.cuda_graphs.runner import CapturedRunner
from target_service.model.cuda_graphs.sizes import buckets_up_to
from tree_kernels import paging
from tree_kernels.attention import AttentionBatch, TreeAttention
from tree_kernels.latent_attention import LatentAttention, norm_rope
from tree_kernels.linear import layers as linear_layers
from tree_kernels.recurrence import RecurrencePlan, RecurrentStates, TreeRecurrence
from tree_models.layers import paged

triton_attention = pytest.importorskip("tree_kernels.attention.triton_backend")
triton_latents = pytest.importorskip("tree_kernels.latent_attention.triton_backend")

CPU = torch.device("cpu")
SEQUENCES, ROWS = 4, 48


class ReadBack(TreeAttention):
    """Attention of a captured step: reads what the plan's tensors describe, by the rules of the kernels."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.backend = "triton"
        self._plain = TreeAttention("torch")
        self._implementation = triton_attention.TritonAttention(CPU, triton_attention.TritonSettings(processors=4))

    def run(self, plan: Any, query: Tensor, *others: Any) -> Tensor:
        return attended(self._plain, plan, query, others[1].shape[-1], *others)


class ReadBackLatents(LatentAttention):
    """The same of latents."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.backend = "triton"
        self._plain = LatentAttention("torch")
        self._implementation = triton_latents.TritonLatentAttention(CPU, triton_attention.TritonSettings(processors=4))

    def run(self, plan: Any, query: Tensor, *others: Any) -> Tensor:
        return attended(self._plain, plan, query, others[1], *others)


def attended(plain: Any, plan: Any, query: Tensor, width: int, *others: Any) -> Tensor:
    """[R, H, width] of all rows of a captured step, zeros of those that are of no sequence."""
    output = query.new_zeros(*query.shape[:2], width)
    batch = batch_of(plan)
    rows = batch.query_starts[-1]
    if rows:
        output[:rows] = plain.run(plain.plan(batch), query[:rows], *others)
    return output


class ReadBackRecurrence(TreeRecurrence):
    """The same of layers with states."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.backend = "triton"

    @property
    def capturable(self) -> Any:
        return self

    def plan_on_device(self, batch: AttentionBatch, tensors: Any, states: RecurrentStates) -> RecurrencePlan:
        starts, prefixes = tensors.query_starts.tolist(), tensors.prefix_lengths.tolist()
        trees = trees_of(starts, tensors.causal.tolist(), tensors.parents.tolist())
        laid_out = replace(batch, query_starts=tuple(starts), prefix_lengths=tuple(prefixes), parents=tuple(trees))
        plan = self.form.plan(laid_out, tensors.slots.tolist(), states)
        places = functional.pad(plan.node_slots, (0, batch.rows - laid_out.rows), value=-1)
        return replace(plan, batch=batch, node_slots=places)


def trees_of(starts: list[int], causal: list[int], parents: list[int]) -> list[tuple[int, ...] | None]:
    """As in `AttentionBatch.parents`."""
    spans = zip(causal, itertools.pairwise(starts), strict=True)
    return [None if flag or start == end else tuple(parents[start:end]) for flag, (start, end) in spans]


def batch_of(plan: Any) -> AttentionBatch:
    starts, page_starts, table = plan.query_starts.tolist(), plan.page_starts.tolist(), plan.page_table.tolist()
    prefixes = plan.prefix_lengths.tolist()
    spans = list(itertools.pairwise(starts))
    tails = [0 if plan.batch.queries_only else end - start for start, end in spans]
    keys = [prefix + tail for prefix, tail in zip(prefixes, tails, strict=True)]
    size = plan.batch.page_size
    held = [tuple(table[at : at - (-count // size)]) for at, count in zip(page_starts, keys, strict=True)]
    trees = trees_of(starts, plan.causal.tolist(), plan.parents.tolist())
    # Those without rows have no keys either.
    there = [place for place, (start, end) in enumerate(spans) if end > start]
    return AttentionBatch(
        (0, *[spans[place][1] for place in there]),
        tuple([prefixes[place] for place in there]),
        tuple([held[place] for place in there]),
        size,
        tuple([trees[place] for place in there]),
        queries_only=plan.batch.queries_only,
    )


class Rerun:
    """Stands for a graph: a replay runs the launch again, and writes its results where the first one's are."""

    def __init__(self, launch: Callable[[], Any], results: tuple[Tensor | None, ...] = ()) -> None:
        self._launch, self._results = launch, results

    def replay(self) -> None:
        for held, made in zip(self._results, self._launch() or (), strict=True):
            if held is not None and made is not held:
                held.copy_(made)


class RerunRunner(CapturedRunner):
    """Captures by running."""

    def _record(self, launch: Callable[[], tuple[Any, ...]], plan: Any = None) -> Any:
        def again() -> tuple[Any, ...]:
            if plan is not None:
                plan.clear_schedules()
            return launch()

        results = again()
        return Rerun(again, results), results


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What captured steps need of a GPU beside kernels."""
    stand_in_for_gpu(monkeypatch)


def stand_in_for_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """See `without_gpu`."""
    stream = SimpleNamespace(wait_stream=lambda _: None, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    # Beside what graphs may take, some hundred pages.
    free = len(buckets_up_to(ROWS, SEQUENCES)) * (16 << 20) + (256 << 10)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, free))
    monkeypatch.setattr(PassGraphs, "_capture", lambda _, launch: (Rerun(launch), None))

    def write_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
        there = slots >= 0
        paging.write_kv(key[there], value[there], key_cache, value_cache, slots[there].long())

    for module in (paged, linear_layers, norm_rope):
        monkeypatch.setattr(module, "write_kv", write_kv)
