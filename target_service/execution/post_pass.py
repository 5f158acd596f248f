"""What follows a pass on the device: verification, accepted keys into place, and the tokens for the next pass.

Where a pass's tensors keep their addresses, what follows it is a CUDA graph, since single launches cost the host more
than the kernels cost the device.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from target_service.execution.pass_drafting import PassDrafting
from target_service.model.cuda_graphs.pass_graphs import PassGraphs
from target_service.model.forward import ForwardPass
from target_service.model.runner import ModelRunner
from tree_kernels.logit_shaping import DeviceShaper
from tree_kernels.logprobs import DeviceLogprobs
from tree_kernels.verification import TOKEN_BITS, DeviceVerifier, keep_accepted
from tree_models.in_pass import DraftingKind

log = logging.getLogger(__name__)
# For capturing in a pause what only some requests need, and rows of the largest pass behind which that is captured
# then: larger ones are of many sizes, and few. Chosen: a request that comes waits no longer.
_PAUSE_SECONDS, _MOST_REST_ROWS = 0.01, 192
# Behind larger passes it is captured once it was launched so often. Chosen, not measured: a capture takes several times
# as long as single launches, so what comes so often again has paid for it, and what does not has lost little.
_LAUNCHES_BEFORE_CAPTURE = 8


class TableWork(Enum):
    """What is done with the node table after a pass: nothing, where the host chose the rows; the pass is reported; or
    the next one is laid out too, and the device goes on without the host."""

    NONE = auto()
    REPORT = auto()
    REPORT_AND_CHOOSE_ROWS = auto()


class PostPassWork(NamedTuple):
    """What is done after a pass: whether accepted rows are moved (any tree was `drafted`), how trees are verified, and
    what is done with the node table."""

    drafted: bool
    greedy: bool = False
    filtered: bool = True
    table: TableWork = TableWork.NONE
    typical: bool = False
    shaped: bool = False  # logits of some sequences are shaped first
    logprobs: bool = False  # log-probabilities are gathered


@dataclass(eq=False)
class PostPass:
    """Runs what follows a pass, for one engine: graphs write to the verdicts of its verifier, so another engine that
    runs the same model cannot use them."""

    _runner: ModelRunner
    _verifier: DeviceVerifier
    _shaper: DeviceShaper
    _logprobs: DeviceLogprobs
    _backend: Literal["triton", "torch"] | None  # that of the verifier
    _typical: bool  # capture ahead what typical acceptance needs too
    _drafting: PassDrafting | None = None  # drafts behind passes

    def __post_init__(self) -> None:
        self._graphs = PassGraphs(self._runner.device)
        self._rest: Iterator[bool] = iter(())
        # Of large passes, by the owner of their buffers, how often what only some requests need was launched behind it.
        self._launches: WeakKeyDictionary[object, Counter[PostPassWork]] = WeakKeyDictionary()

    def launch(self, work: PostPassWork, done: ForwardPass, distributions: Tensor | None = None) -> None:
        """Run what follows this pass, captured now if it was not yet. Never captured with `distributions`, which are
        those of `DeviceVerifier.sampled`. Drafting is left to `draft`, so that results that are copied in between do
        not wait for it, except where the next rows are chosen here, from what was drafted."""
        graph_buffers = done.graph_buffers if distributions is None else None
        if self._drafting is None:
            if work.drafted:
                self._runner.prepare_moves(done, self._verifier.verdicts)
            self._replay(graph_buffers, work, done, partial(self._launch, work, done, distributions))
            return
        self._drafting.prepare_moves(done, self._verifier.verdicts, greedy=work.greedy)
        # Apart from each other: else each kind of verification were captured with each kind of what follows it.
        verified = work._replace(drafted=False, table=TableWork.NONE)
        self._replay(graph_buffers, verified, done, partial(self._verify, work, done, distributions))
        if _chooses_rows(work):
            self._launch_drafting(graph_buffers, work, done)
        conclude = partial(self._conclude, work, done)
        self._graphs.replay_or_capture(graph_buffers, (work.drafted, work.table), conclude)

    def draft(self, work: PostPassWork, done: ForwardPass, distributions: Tensor | None = None) -> None:
        """Draft behind this pass if `launch` did not. Called after `launch` with the same arguments, and before any
        other pass."""
        if self._drafting is not None and not _chooses_rows(work):
            self._launch_drafting(done.graph_buffers if distributions is None else None, work, done)

    def _launch_drafting(self, graph_buffers: object | None, work: PostPassWork, done: ForwardPass) -> None:
        assert self._drafting is not None
        kind, move = self._drafting.kind(greedy=work.greedy), partial(self._move, done)
        draft = partial(self._drafting.draft_behind, kind, done, self._verifier.verdicts, move)
        self._graphs.replay_or_capture(graph_buffers, kind, draft)

    def _replay(
        self, graph_buffers: object | None, work: PostPassWork, done: ForwardPass, launch: Callable[[], object]
    ) -> None:
        """Replay what `launch` launches, captured now if it was not yet, or behind large passes once it is usual."""
        if graph_buffers is not None and (work.shaped or work.logprobs) and len(done.token_ids) > _MOST_REST_ROWS:
            self._launch_or_replay(graph_buffers, work, launch)
        else:
            self._graphs.replay_or_capture(graph_buffers, work, launch)

    def _launch_or_replay(self, graph_buffers: object, work: PostPassWork, launch: Callable[[], object]) -> None:
        """Launch what follows a large pass, which is captured once it was launched often."""
        if self._graphs.has(graph_buffers, work):
            self._graphs.replay_or_capture(graph_buffers, work, launch)
            return
        launch()
        launches = self._launches.setdefault(graph_buffers, Counter())
        launches[work] += 1
        if launches[work] == _LAUNCHES_BEFORE_CAPTURE:
            try:
                self._graphs.capture(graph_buffers, work, launch)
            except torch.OutOfMemoryError:
                # Single launches go on.
                log.warning("no memory to capture what follows a pass with %s", work)

    def launches(self) -> Iterator[Callable[[], object]]:
        """What follows each captured pass, to be launched; and what only some requests need behind the smallest of one
        row, and the smallest of more: those are captured before the first request, or soon after."""
        tables = self._runner.node_table is not None
        rows = [(len(done.token_ids), number) for number, done in enumerate(self._runner.empty_passes())]
        smallest = {
            min(kind)[1]
            for kind in ([one for one in rows if (one[0] > 1) is drafts] for drafts in (False, True))
            if kind
        }
        for number, done in enumerate(self._runner.empty_passes()):
            if self._drafting is not None:
                self._drafting.sequences = len(done.texts.prefix_lengths)
            works = list(_all_work(drafts=len(done.token_ids) > 1, tables=tables, typical=self._typical))
            if number in smallest:
                works += _work_of_some(drafts=len(done.token_ids) > 1, tables=tables)
            drafted = set[DraftingKind | None]()
            for work in works:
                kind = None if self._drafting is None else self._drafting.kind(greedy=work.greedy)
                yield partial(self._launch, work, done, None, drafts=kind not in drafted)
                drafted.add(kind)

    def capture_ahead(self) -> None:
        """Capture what follows captured passes, size by size for as long as there is time, so that no request waits
        for it. Before the first request."""
        start, sizes = time.monotonic(), 0
        for done in self._runner.empty_passes():
            # The rest is captured when first used.
            if time.monotonic() - start > 30.0:
                break
            self.capture_behind(done)
            sizes += 1
        if sizes:
            log.info("captured what follows steps of %d sizes in %.1f s", sizes, time.monotonic() - start)
        self._rest = self._capture_rest()
        # Of the smallest size at least, which compiles the kernels that were not compiled ahead.
        start = time.monotonic()
        next(self._rest, None)
        log.info("captured what some requests need in %.1f s", time.monotonic() - start)

    def capture_behind(self, done: ForwardPass) -> None:
        """Capture what follows this pass, which has no sequences."""
        tables, drafting = self._runner.node_table is not None, self._drafting
        for room in [0] if drafting is None else drafting.rooms(len(done.texts.prefix_lengths)):
            if drafting is not None:
                drafting.sequences = room
            for work in _all_work(drafts=len(done.token_ids) > 1, tables=tables, typical=self._typical):
                self.launch(work, done)
                self.draft(work, done)

    def capture_more(self) -> bool:
        """Capture more of what some requests need, for some milliseconds, while no step runs. False where there is
        nothing more."""
        begin = time.monotonic()
        while time.monotonic() - begin < _PAUSE_SECONDS:
            if not next(self._rest, False):
                return False
        return True

    def _capture_rest(self) -> Iterator[bool]:
        """Capture what only some requests need, step by step, small passes first: all of the smallest, then one piece
        of work at a time. Empty where there is nothing more, or no memory for it."""
        tables, count = self._runner.node_table is not None, 0
        for first in (True, False):
            # The others once pauses begin, since more sizes may have been captured until then.
            passes = sorted((len(done.token_ids), number) for number, done in enumerate(self._runner.empty_passes()))
            kept = [each for each in passes if each[0] <= _MOST_REST_ROWS]
            for rows, number in kept[:1] if first else kept[1:]:
                for work in _work_of_some(drafts=rows > 1, tables=tables):
                    done = next(itertools.islice(self._runner.empty_passes(), number, None))
                    try:
                        self.launch(work, done)
                        self.draft(work, done)
                    except torch.OutOfMemoryError:
                        log.warning("no memory to capture more of what follows passes")
                        return
                    count += 1
                    if not first:
                        yield True
            if first:
                yield True
        if count:
            log.info("captured %d more kinds of what follows passes", count)

    def _launch(
        self, work: PostPassWork, done: ForwardPass, distributions: Tensor | None, *, drafts: bool = True
    ) -> None:
        """Launch all of it, of a drafter only if `drafts`."""
        self._verify(work, done, distributions)
        if drafts and self._drafting is not None:
            self._launch_drafting(None, work, done)
        elif work.drafted:
            self._runner.share_verdicts(self._verifier.verdicts)
            self._move(done)
        self._conclude(work, done)

    def _verify(self, work: PostPassWork, done: ForwardPass, distributions: Tensor | None) -> None:
        rows = done.token_ids, done.parents, done.parameters
        logits = self._shaper.shape(done.logits, *rows, done.texts) if work.shaped else done.logits
        step = (logits, *rows)
        if work.greedy:
            self._verifier.greedy(*step)
        else:
            self._verifier.sampled(*step, distributions, filtered=work.filtered, typical=work.typical)
        if work.logprobs:
            self._logprobs.gather(done.logits, done.token_ids, done.parameters, self._verifier.verdicts)

    def _move(self, done: ForwardPass) -> None:
        """Move what the pass wrote of accepted rows."""
        self._runner.move_accepted(done.written, self._verifier.verdicts, self._backend)

    def _conclude(self, work: PostPassWork, done: ForwardPass) -> None:
        cache, verdicts, table = self._runner.cache, self._verifier.verdicts, self._runner.node_table
        if work.drafted:
            keep_accepted(cache.tokens, done.token_ids, done.slots, done.parameters, verdicts, self._backend)
        torch.bitwise_and(verdicts.next_tokens, TOKEN_BITS, out=self._runner.pending[: len(verdicts.next_tokens)])
        if work.table is not TableWork.NONE:
            assert table is not None and done.step is not None
            table.recycle(done.step, done.logits, self._runner.vocabulary_size, verdicts)
            conclude = table.report_and_choose_rows if work.table is TableWork.REPORT_AND_CHOOSE_ROWS else table.report
            conclude(done.step, verdicts)


def _chooses_rows(work: PostPassWork) -> bool:
    """Whether the next rows are chosen behind the pass: also of the trees that are drafted behind it."""
    return work.table is TableWork.REPORT_AND_CHOOSE_ROWS


def _all_work(*, drafts: bool, tables: bool, typical: bool) -> Iterator[PostPassWork]:
    """Everything that may follow a pass without draft distributions; what follows drafted rows only where a pass has
    room for `drafts`, and `typical` acceptance only where requests may ask for it."""
    rules = [(True, False, False), (False, False, False), (False, True, False)]
    if typical:
        rules += [(False, False, True), (False, True, True)]
    for greedy, filtered, is_typical in rules:
        yield PostPassWork(False, greedy, filtered, typical=is_typical)
        if drafts:
            yield PostPassWork(True, greedy, filtered, typical=is_typical)
        if drafts and tables:
            yield PostPassWork(True, greedy, filtered, TableWork.REPORT, is_typical)
            yield PostPassWork(True, greedy, filtered, TableWork.REPORT_AND_CHOOSE_ROWS, is_typical)


def _work_of_some(*, drafts: bool, tables: bool) -> Iterator[PostPassWork]:
    """What may follow a pass in which logits of some sequences are shaped, or log-probabilities returned; of launches
    of one pass, which those of forms are."""
    for shaped, logprobs in ((True, False), (False, True), (True, True)):
        # Shaped logits are always sampled with filters.
        for greedy, filtered in [(True, False), (False, True), *([] if shaped else [(False, False)])]:
            yield PostPassWork(False, greedy, filtered, shaped=shaped, logprobs=logprobs)
            if drafts and tables:
                yield PostPassWork(True, greedy, filtered, TableWork.REPORT, shaped=shaped, logprobs=logprobs)
            elif drafts:
                yield PostPassWork(True, greedy, filtered, shaped=shaped, logprobs=logprobs)
