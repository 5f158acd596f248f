"""The passes of the leading rank, run by another one with its own share of weights, keys and values."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from target_service.model.cuda_graphs.pass_graphs import PassGraphs
from target_service.model.cuda_graphs.sizes import Bucket
from target_service.model.drafter_run import DrafterRun
from target_service.model.forward import ForwardPass
from target_service.model.rank_link import (
    CapturePass,
    ChangeStates,
    CountFreeMemory,
    DropCaptures,
    DropWeights,
    EmptyPass,
    MoveAccepted,
    MoveRows,
    PassMessage,
    PrepareDrafting,
    ReplayPass,
    RunPass,
    UseCache,
    WriteWeights,
)
from target_service.model.ranks.messages import WEIGHTS_READ, WEIGHTS_REFUSED
from target_service.model.runner import ModelRunner
from target_service.model.weights.update import WaitingWeights
from tree_kernels.recurrence import RecurrentStates
from tree_kernels.verification import Verdicts
from tree_models.in_pass import DraftingKind

if TYPE_CHECKING:
    from target_service.model.cuda_graphs.runner import CapturedRunner

log = logging.getLogger(__name__)


class FollowedPasses:
    """Does with a runner what the leading rank did with its own."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner, self._graphs = runner, PassGraphs(runner.device)
        # By (sequences, size).
        self._verdicts: dict[tuple[int, int], Verdicts] = {}
        # The last eager pass, its parameters still to come.
        self._eager: ForwardPass | None = None
        # Where each rank has a part of what drafts behind passes.
        self._drafting: DrafterRun | None = None
        self._waiting: WaitingWeights | None = None
        self._reading: threading.Thread | None = None

    def follow(self, message: PassMessage) -> None:
        """Do what a message is of. Waits for the leading rank to do the same."""
        runner = self._runner
        match message:
            case ReplayPass(rows, sequences, common, few_outputs):
                self._captured.replay(Bucket(rows, sequences, common), few_outputs=few_outputs)
            case MoveAccepted():
                self._move(message)
            case PrepareDrafting(max_rows):
                assert runner.in_pass is not None, "the leading rank has a part of it too"
                self._drafting = DrafterRun(runner, runner.in_pass, max_rows)
            case RunPass():
                self._run(message)
            case MoveRows(sources, targets):
                runner.move_rows(sources, targets)
            case ChangeStates(method, arguments):
                getattr(self._states, method)(*arguments)
            case CapturePass(rows, sequences, common):
                self._captured.capture([Bucket(rows, sequences, common)])
            case EmptyPass(rows, sequences, common):
                self._captured.empty_pass_of(Bucket(rows, sequences, common))
            case DropCaptures():
                self._captured.drop_captures()
            case UseCache(num_pages):
                self._captured.use_cache(runner.cache.like(num_pages))
            case CountFreeMemory():
                self._captured.free_memory()
            case WriteWeights():
                assert self._waiting is not None, "all ranks have read theirs by then"
                self._waiting.write(lambda: None)
            case DropWeights():
                self._drop_weights()

    def read_weights(self, folder: Path, answer: Callable[[bytes], object]) -> None:
        """Read weights that wait to be written, in a thread, and `answer` once they are there or cannot be read."""
        waiting = self._waiting = WaitingWeights(self._runner.network)

        def read() -> None:
            try:
                waiting.read(folder)
            # Whatever a file holds, passes go on with the weights that there are.
            except Exception:
                log.exception("weights of a rank cannot be read")
                answer(WEIGHTS_REFUSED)
            else:
                answer(WEIGHTS_READ)

        self._reading = threading.Thread(target=read, name="weights", daemon=True)
        self._reading.start()

    def _drop_weights(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None and self._reading is not None:
            # The leading rank has waited for it.
            self._reading.join()
            waiting.release()

    @property
    def _captured(self) -> CapturedRunner:
        """The runner, whose passes the leading rank captures."""
        return cast("CapturedRunner", self._runner)

    @property
    def _states(self) -> RecurrentStates:
        states = self._runner.cache.recurrent
        assert states is not None, "the leading rank has some too"
        return states

    def _run(self, message: RunPass) -> None:
        runner, batch = self._runner, message.batch
        token_ids = torch.zeros(len(batch.token_ids), dtype=torch.int64, device=runner.device)
        recurrent = runner.recurrent_pass(batch)
        logits = runner.compute_logits(batch, token_ids, message.logit_rows, recurrent)
        slots = torch.tensor(batch.slots, dtype=torch.int32, device=runner.device)
        self._eager = runner.pass_of_batch(batch, logits, token_ids.int(), slots, self._integers(0), recurrent)

    def _move(self, message: MoveAccepted) -> None:
        runner, size, drafting = self._runner, (message.max_sequences, message.verdicts), message.drafting
        if size not in self._verdicts:
            self._verdicts[size] = Verdicts.over(self._integers(message.verdicts), message.max_sequences)
        verdicts = self._verdicts[size]
        if message.rows:
            done = self._captured.pass_of(Bucket(message.rows, message.sequences, message.common))
            launch = partial(self._launch_behind, done, verdicts, drafting)
            self._graphs.replay_or_capture(done.graph_buffers, (size, drafting), launch)
            return
        assert self._eager is not None and runner.link is not None, "rows are moved that a pass wrote"
        parameters = self._integers(message.parameters)
        runner.link.share(parameters)
        self._launch_behind(replace(self._eager, parameters=parameters), verdicts, drafting)

    def _launch_behind(self, done: ForwardPass, verdicts: Verdicts, drafting: DraftingKind | None) -> None:
        """Move accepted rows of a pass, and draft behind it."""
        move = partial(self._runner.move_accepted, done.written, verdicts)
        if drafting is not None:
            assert self._drafting is not None, "it was prepared"
            self._drafting.launch(drafting, done, verdicts, move, None)
            return
        self._runner.share_verdicts(verdicts)
        move()

    def _integers(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int32, device=self._runner.device)
