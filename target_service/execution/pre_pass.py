"""What a pass begins with whose rows the device chooses: the newest drafts are taken, and rows are chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from torch import Tensor

from target_service.model.cuda_graphs.pass_graphs import PassGraphs
from target_service.model.forward import ForwardPass
from target_service.model.runner import ModelRunner
from tree_kernels.node_table import Mailboxes, NodeTable, StepIntegers


class PrePass:
    """Launches what comes before a pass, for one engine: graphs read its mailboxes.

    As single launches they took 0.31 to 0.41 ms of the host for each pass, of the 1.0 to 1.4 ms that it took to launch
    one (H100, `benchmarks/results/2026-11-25-h100-host-time.md`).
    """

    def __init__(self, runner: ModelRunner, table: NodeTable, mail: Mailboxes) -> None:
        self._runner, self._table, self._mail = runner, table, mail
        self._graphs = PassGraphs(runner.device)

    def launch(
        self, step: StepIntegers, graph_buffers: object | None, moves: Tensor | None = None, laid_out: int = 0
    ) -> None:
        """Take the newest tables, move the step on and choose its rows; see `NodeTable.choose_rows`. `graph_buffers`
        owns the step's tensors; None where they are allocated for this step."""
        # Not a part of the graph: it depends on what was sent.
        self._mail.await_sent()
        # Behind steps of other kinds, and where the host laid rows out, single launches do: they are few.
        usual = moves is None and not laid_out
        launch = partial(self._launch, step, moves, laid_out)
        self._graphs.replay_or_capture(graph_buffers if usual else None, None, launch)

    def launches(self) -> Iterator[Callable[[], object]]:
        """What comes before each captured pass, to be launched."""
        for empty in self._runner.empty_passes():
            if empty.step is not None and len(empty.token_ids) > 1:
                yield partial(self._launch, empty.step, None, 0)

    def _launch(self, step: StepIntegers, moves: Tensor | None, laid_out: int) -> None:
        self._table.copy_sent_tables(self._mail)
        self._table.choose_rows(step, self._runner.pending, moves, laid_out)

    def capture_ahead(self) -> None:
        """Capture what comes before each captured pass. Before the first request."""
        for empty in self._runner.empty_passes():
            self.capture_before(empty)

    def capture_before(self, empty: ForwardPass) -> None:
        """Capture what comes before this pass, which has no sequences."""
        if empty.step is not None and len(empty.token_ids) > 1:
            self.launch(empty.step, empty.graph_buffers)
