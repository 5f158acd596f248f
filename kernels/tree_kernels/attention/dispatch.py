"""Tree attention over a paged KV cache: `plan` once per step, `run` once per layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, Literal, Protocol, TypeVar, cast, get_args

import torch
from torch import Tensor

from tree_kernels.attention.batch import AttentionBatch, AttentionPlan
from tree_kernels.attention.variant import PLAIN, AttentionVariant
from tree_kernels.window_frames import WindowFrames

if TYPE_CHECKING:
    from tree_kernels.attention.triton_planning import TritonPlanner

Backend = Literal["reference", "torch", "triton", "flashinfer"]


class Planner(Protocol):
    """The part of a backend that does the index work of a step."""

    def plan(self, batch: AttentionBatch) -> AttentionPlan: ...


class _AttentionBackend(Planner, Protocol):
    def plan_in_frames(self, plan: AttentionPlan, frames: WindowFrames) -> AttentionPlan: ...

    def run(
        self,
        plan: AttentionPlan,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        scale: float,
        variant: AttentionVariant,
    ) -> Tensor: ...


_Backend = TypeVar("_Backend", bound=Planner)


class PlannedAttention(Generic[_Backend]):
    """Planning once per step, the same for every form of attention. `device` is where the caches live."""

    # Whether it reads the keys of `AttentionBatch.common_pages` once for all rows.
    reads_common_pages = False

    def __init__(self, backend: str, device: torch.device, implementation: _Backend) -> None:
        self.backend = backend
        self.device = device
        self._implementation = implementation

    @property
    def capturable(self) -> TritonPlanner:
        """The triton backend, whose plans keep their addresses, for captured steps. `ValueError` for any other."""
        if self.backend != "triton":
            raise ValueError(f"only the triton backend runs in captured steps, this is {self.backend}")
        return cast("TritonPlanner", self._implementation)

    def plan(self, batch: AttentionBatch) -> AttentionPlan:
        """Do the index work of one step. Raises `ValueError` where the batch's lengths disagree, or a sequence has too
        few pages."""
        batch.check()
        return self._implementation.plan(batch)


class TreeAttention(PlannedAttention[_AttentionBackend]):
    """Attention of ragged tree rows over a paged cache.

    Symbols: R rows of all sequences, Hq query heads, Hkv key heads (Hq a multiple of Hkv), D key width, Dv value width.

    Of the backends "reference" is the fp32 definition, and "torch" the fast path on a CPU; "triton" and "flashinfer"
    need a GPU, and those packages or they raise `ImportError`; "flashinfer" takes plain attention alone. With
    `invariant`, which only "triton" can, keys are split the same way in every batch, so that no bit of a row's result
    depends on the other rows: rows of a chain get what they would get one at a time."""

    def __init__(
        self, backend: Backend = "torch", device: torch.device | str = "cpu", *, invariant: bool = False
    ) -> None:
        device = torch.device(device)
        if invariant and backend != "triton":
            raise ValueError(f"only the triton backend is independent of the batch, this is {backend}")
        super().__init__(backend, device, _create(backend, device, invariant))
        # With `invariant` what a row gets may depend on no other sequence.
        self.reads_common_pages = backend == "triton" and not invariant

    def plan_in_frames(self, plan: AttentionPlan, frames: WindowFrames) -> AttentionPlan:
        """The plan of the same step for layers with a window, where those keep pages in frames. In a captured step it
        has to be captured too, since the frames change. Raises `ValueError` for a backend without windows."""
        return self._implementation.plan_in_frames(plan, frames)

    def run(
        self,
        plan: AttentionPlan,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        scale: float,
        variant: AttentionVariant = PLAIN,
    ) -> Tensor:
        """Attend in one layer: [R, Hq, Dv], in query's dtype; not always contiguous. The tail's keys and values must be
        in the cache already (`paging.write_kv`). Raises `ValueError` where a shape does not fit the plan.

        A key that a row does not see gets the weight 0. Where it or its value is NaN or infinite, the result may be NaN
        in every row of its sequence, since 0 * NaN is NaN; other sequences, and what lies behind the last key, never
        matter. A caller with drafted rows has to look at its logits (`target_service.engine.counted`).

        Args:
            plan: what `plan` of this object returned for this step.
            query: [R, Hq, D].
            key_cache: [pages, page_size, Hkv, D], contiguous.
            value_cache: [pages, page_size, Hkv, Dv], contiguous.
            scale: factor of the scores, usually D ** -0.5; positive.
            variant: the layer's kind of attention. Keys before every row's window are not read, whatever they hold.
        """
        batch, (rows, query_heads, query_width) = plan.batch, query.shape
        _, page_size, kv_heads, key_width = key_cache.shape
        if rows != batch.rows or query_width != key_width or query_heads % kv_heads:
            raise ValueError(f"expected query [{batch.rows}, n * {kv_heads}, {key_width}], got {list(query.shape)}")
        if page_size != batch.page_size or value_cache.shape[:3] != key_cache.shape[:3]:
            raise ValueError(
                f"expected caches [pages, {batch.page_size}, heads, width], "
                f"got {list(key_cache.shape)} and {list(value_cache.shape)}"
            )
        for name, one in (("sinks", variant.sinks), ("slopes", variant.slopes)):
            if one is not None and one.shape != (query_heads,):
                raise ValueError(f"expected {name} [{query_heads}], got {list(one.shape)}")
        if batch.queries_only and (variant.slopes is not None or variant.chunked or variant.window == 1):
            raise ValueError("rows without keys take no slopes, no chunks, and a window of two keys at least")
        if rows == 0:
            return query.new_empty(0, query_heads, value_cache.shape[-1])
        return self._implementation.run(plan, query, key_cache, value_cache, scale, variant)


def _create(backend: Backend, device: torch.device, invariant: bool) -> _AttentionBackend:
    """Imports a backend only when it is chosen: triton and flashinfer may be absent."""
    if backend == "reference":
        from tree_kernels.attention.reference import ReferenceAttention

        return ReferenceAttention()
    if backend == "torch":
        from tree_kernels.attention.torch_backend import TorchAttention

        return TorchAttention(device)
    if backend == "triton":
        from tree_kernels.attention.triton_backend import INVARIANT, TritonAttention

        return TritonAttention(device, INVARIANT if invariant else None)
    if backend == "flashinfer":
        from tree_kernels.attention.flashinfer_backend import FlashInferAttention

        return FlashInferAttention(device)
    raise ValueError(f"expected a backend among {get_args(Backend)}, got {backend!r}")
