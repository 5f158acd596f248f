"""Captured ranks of a tiny model that are threads of this process; see `rerun_graphs`."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from rerun_graphs import CPU, ROWS, SEQUENCES, ReadBack, RerunRunner
from thread_ranks import Exchange, ThreadRank
from torch import Tensor
from transformers import PreTrainedModel

from target_service.model.cuda_graphs.capturing import capture_steps
from target_service.model.cuda_graphs.runner import CaptureOptions
from target_service.model.rank_link import PassMessage
from target_service.model.ranks.followed_passes import FollowedPasses
from target_service.model.runner import runner_over
from target_service.model.support import description_of
from tree_kernels.ahead import AheadCompiler
from tree_models.building import build
from tree_models.fused.preparing import LayerOptions
from tree_models.in_pass import InPassDrafter
from tree_models.layers.placing import Placement
from tree_models.ranks.decoder import build_rank
from tree_models.reference import published_tensors

PAGE_SIZE = 4
# That a head drafts: ranks can divide them, and not the model's.
DRAFT_TOKENS = 208
# So that both kinds of passes come: with logits of few rows, and of every row.
FEW_OUTPUTS = 6


@dataclass
class ThreadLink(ThreadRank):
    """A `RankLink` of threads."""

    # Of each rank.
    messages: Sequence[queue.SimpleQueue[PassMessage | None]] = ()

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def send(self, message: PassMessage) -> None:
        if self.leads and not self.is_alone:
            for other in self.messages[1:]:
                other.put(message)

    def expect_answers(self) -> None:
        pass

    def share(self, tensor: Tensor) -> None:
        parts = self._parts(tensor.clone())
        tensor.copy_(parts[0])


def captured_rank(
    model: PreTrainedModel,
    link: ThreadLink | None = None,
    ahead: AheadCompiler | None = None,
    drafter: InPassDrafter | None = None,
    *,
    common: bool = False,
) -> RerunRunner:
    """As `loader.load_runner` makes one; with `common`, one that reads pages once which sequences have in common."""
    description = description_of(model.config)
    assert description is not None
    place = Placement(CPU, torch.float32, ranks=link)
    decoder = (build_rank if link else build)(description, published_tensors(model), place)
    pages = {"num_pages": 256 if common else 64, "page_size": PAGE_SIZE}
    runner = runner_over(decoder, None, **pages, end_token_ids=(), in_pass=drafter)
    runner.attention, runner.ahead = ReadBack(), ahead or AheadCompiler((), 0)
    runner.attention.reads_common_pages = common
    if link is None or link.leads:
        runner.enable_device_row_selection(SEQUENCES, 3)
    hooked = () if drafter is None else drafter.layers
    layers = LayerOptions(compiled=False)
    options = CaptureOptions(ROWS, SEQUENCES, layers, hooked, few_outputs=FEW_OUTPUTS, common_pages=common)
    captured = RerunRunner(runner, options)
    assert all(captured.network.forms), "every layer has its fused form, for ranks too"
    captured.attach(link)
    return captured


class Rehearsed(AheadCompiler):
    """Runs what it would compile, for which no other rank is called."""

    def __init__(self, link: ThreadLink) -> None:
        super().__init__((), 0)
        self._link, self.rehearsed = link, dict[str, int]()

    @property
    def compiles_ahead(self) -> bool:
        return True

    def compile(self, what: str, launches: Iterable[Callable[[], object]]) -> int:
        before, count = len(self._link.calls), 0
        with torch.inference_mode():
            for launch in launches:
                assert self._link.is_alone
                launch()
                count += 1
        assert len(self._link.calls) == before
        self.rehearsed[what] = count
        return count


@contextmanager
def leading_rank(
    model: PreTrainedModel,
    size: int,
    drafter_of: Callable[[ThreadLink], InPassDrafter | None],
    *,
    common: bool = False,
    memory_share: float = 0.5,
) -> Iterator[RerunRunner]:
    """The first of so many ranks, each with what drafts behind its passes. It has rehearsed alone what it captured;
    `memory_share` as in `capture_steps`."""
    exchange, messages = Exchange(size), [queue.SimpleQueue[PassMessage | None]() for _ in range(size)]
    leading, *others = [ThreadLink(rank, exchange, messages=messages) for rank in range(size)]
    with ThreadPoolExecutor(size) as threads:
        following = [threads.submit(_follow, model, link, drafter_of(link), common) for link in others]
        for one in following:
            one.add_done_callback(partial(_abort_for_failed, exchange))
        try:
            runner = captured_rank(model, leading, Rehearsed(leading), drafter_of(leading), common=common)
            capture_steps(runner, seconds=60.0, memory_share=memory_share)
            yield runner
        finally:
            for own in messages:
                own.put(None)
            for one in following:
                one.result()
            # One for all threads: where both ranks change it at once, what the first had found is lost.
            torch.compiler.set_stance("default")  # type: ignore[no-untyped-call]


def _abort_for_failed(exchange: Exchange, done: Future[None]) -> None:
    """Let no rank wait for one that failed. One that has ended well leaves the others a barrier that they may still be
    on their way out of."""
    if done.exception() is not None:
        exchange.barrier.abort()


def _follow(model: PreTrainedModel, link: ThreadLink, drafter: InPassDrafter | None, common: bool) -> None:
    passes = FollowedPasses(captured_rank(model, link, drafter=drafter, common=common))
    with torch.inference_mode():
        while message := link.messages[link.rank].get():
            passes.follow(message)
