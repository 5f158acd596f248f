"""Captured drafting without a GPU: plans as the Triton backend lays them out, PyTorch's attention, no capture."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from draft_service.neural.config import NeuralConfig
from draft_service.neural.cuda_graphs.drafting import CapturedDrafting
from draft_service.neural.network import Network
from draft_service.neural.tree_config import TreeShape
from tree_kernels.attention import AttentionBatch, AttentionPlan, AttentionVariant, TreeAttention
from tree_kernels.attention.triton_backend import TritonAttention, TritonPlan, TritonSettings
from tree_kernels.attention.variant import PLAIN
from tree_kernels.linear import layers as linear
from tree_models.layers import paged

Output = TypeVar("Output")


class StaticTorch(TritonAttention):
    """Reads the step from the plan's integers, once per schedule; rows of no sequence come out as NaN."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), TritonSettings(processors=4))
        self._torch = TreeAttention("torch")

    def run(
        self,
        plan: AttentionPlan,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        scale: float,
        variant: AttentionVariant = PLAIN,
    ) -> Tensor:
        assert isinstance(plan, TritonPlan) and len(query) == plan.batch.rows
        live: AttentionPlan | None = plan.schedules.get("live")  # type: ignore[call-overload]
        if live is None:
            live = plan.schedules["live"] = self._torch.plan(_read(plan))  # type: ignore[index,assignment]
        rows = live.batch.rows
        output = query.new_full((*query.shape[:2], value_cache.shape[-1]), float("nan"))
        output[:rows] = self._torch.run(live, query[:rows], key_cache, value_cache, scale, variant)
        return output


def _read(plan: TritonPlan) -> AttentionBatch:
    """The step that lies in a plan."""
    starts, first_pages = plan.query_starts.tolist(), plan.page_starts.tolist()
    prefixes, table = plan.prefix_lengths.tolist(), plan.page_table.tolist()
    pages, parents = [], []
    for b, (start, end) in enumerate(pairwise(starts)):
        keys = prefixes[b] + end - start
        pages.append(tuple(table[first_pages[b] : first_pages[b] + -(-keys // plan.batch.page_size)]))
        parents.append(None if plan.causal[b] else tuple(plan.parents[start:end].tolist()))
    return AttentionBatch(tuple(starts), tuple(prefixes), tuple(pages), plan.batch.page_size, tuple(parents))


def settings_of(shape: TreeShape, kv_tokens: int, page_size: int, max_rows: int) -> Any:
    """The settings of `TreeDrafting` for trees of this shape."""
    return SimpleNamespace(tree=shape, cached_tokens=lambda _: kv_tokens, page_size=page_size, max_rows=max_rows)


class StaticDrafting(CapturedDrafting):
    """Runs what a graph would replay, every time from what was loaded alone."""

    def __init__(self, network: Network, config: NeuralConfig) -> None:
        super().__init__(network, config)
        # As on a GPU, where masked slots are read.
        for pool in (*self.cache.keys, *self.cache.values):
            pool.zero_()

    def _capturable(self) -> TritonAttention:
        return StaticTorch()

    def _capture(self, run: Callable[[], Output], plan: TritonPlan) -> Callable[[], Output]:
        def replay() -> Output:
            plan.clear_schedules()
            return run()

        return replay


def write_taken(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """`write_kv` as a GPU has it: rows without a slot are left out."""
    taken = slots >= 0
    keys.view(-1, *keys.shape[2:]).index_copy_(0, slots[taken].long(), key[taken])
    values.view(-1, *values.shape[2:]).index_copy_(0, slots[taken].long(), value[taken])


@pytest.fixture
def static_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    """Free rows have no slot, which PyTorch's way of writing keys does not know."""
    monkeypatch.setattr(paged, "write_kv", write_taken)
    monkeypatch.setattr(linear, "write_kv", write_taken)
