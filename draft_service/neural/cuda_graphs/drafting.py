"""A neural drafter's passes as CUDA graphs: a step's committed tokens cost the host one launch, and so do its trees.

A graph reads from tensors with fixed addresses; there is one for each kind of pass and power of two of sequences. Trees
grow on the device as a whole (`tree_pass`), except those of REJECTION requests, which carry distributions and grow a
level at a time in captured passes. A prompt is read in pieces of a captured size, one prompt after another: an eager
pass would block the host, and all other trees, for as many launches as the head has kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from draft_service.drafters.base import DraftSequence
from draft_service.drafters.grown import Pending, in_order
from draft_service.neural.config import NeuralConfig
from draft_service.neural.cuda_graphs.attention import StaticIntegers, capacity
from draft_service.neural.cuda_graphs.tree_pass import TreePass
from draft_service.neural.devices import drafting_stream
from draft_service.neural.network import Network, RowOutput
from draft_service.neural.tail_attention import NewRowsAttention, PassRows, TailPart, fresh_rows, fresh_slots
from draft_service.neural.tree_drafting import TreeDrafting
from outrider.sampling import LOSSLESS_MODES, VerificationMode
from outrider.tree import TokenTree
from tree_kernels.graph_capture import GraphCapture
from tree_models.layers.paged import PagedPass

if TYPE_CHECKING:
    from tree_kernels.attention.triton_backend import TritonAttention
    from tree_kernels.attention.triton_planning import TritonPlan

# Rows for each sequence, on average, of a captured pass over committed tokens.
_COMMITTED = 8
# Rows of the captured passes that read prompts; the last piece of a prompt is padded to one of them. Reasoned, not
# measured: up to the first a pass takes as long as one of a few rows, and up to the second not much longer than reading
# the weights, on a GPU that does some 200 operations for each byte that it reads.
PROMPT_ROWS = (64, 256)

Output = TypeVar("Output")


@dataclass(frozen=True, slots=True)
class PassSize:
    """Capacity of a captured pass: `tail` rows of all tails, of which `new` are computed."""

    sequences: int
    tail: int
    new: int

    @property
    def committed(self) -> bool:
        """Whether it is a pass over committed rows, and not over a level of trees."""
        return self.new == self.tail


class StaticPass:
    """The device tensors of one size, and the pass over them. Free rows have no sequence, no slot and no effect. The
    output of `compute` is overwritten by the next pass of the size."""

    def __init__(self, size: PassSize, drafting: TreeDrafting, attention: TritonAttention) -> None:
        self.size, self._network, self._attention = size, drafting.network, attention
        self._cache, self._states = drafting.cache, drafting.states
        # For committed rows: each sequence's last one and its slot in `RootStates`; for a level: its rows in the tails.
        own = {"ends": size.sequences, "states": size.sequences} if size.committed else {"places": size.new}
        fields: dict[str, tuple[int, type[np.generic]]] = {name: (count, np.int64) for name, count in own.items()}
        fields |= dict.fromkeys(("token_ids", "positions", "slots"), (size.new, np.int32))
        batch = capacity(size.sequences, size.tail // size.sequences, drafting.cache, tree=not size.committed)
        self._integers = StaticIntegers(fields, batch, attention, drafting.network.device)
        self.plan = self._integers.plan
        self._carried: Tensor | None = None

    def load(self, rows: PassRows, carried: Tensor | None) -> None:
        """Copy the inputs of a pass to the device, asynchronously."""
        parts, integers = rows.parts, self._integers
        integers.wait()
        integers.fill("token_ids", rows.token_ids, 0)
        integers.fill("positions", rows.positions, 0)
        integers.fill("slots", fresh_slots(parts, self._cache), -1)
        tails = np.array([part.rows for part in parts], np.int32)
        if self.size.committed:
            integers.fill("ends", tails.cumsum() - 1, 0)
            integers.fill("states", [part.slot for part in parts], self._states.unused)
        else:
            # Free rows write their queries behind the last row, which is not used.
            integers.fill("places", fresh_rows(parts), self.size.tail)
        parents = [parent for part in parts for parent in part.parents or (0,) * part.rows]
        prefixes = np.array([part.prefix for part in parts], np.int32)
        integers.write_plan([part.pages for part in parts], prefixes, tails, parents, causal=self.size.committed)
        integers.send()
        if carried is not None:
            if self._carried is None:
                self._carried = carried.new_zeros(self.size.new, carried.shape[1], device=self._network.device)
            self._carried[: len(carried)].copy_(carried, non_blocking=True)

    def compute(self) -> RowOutput:
        """The pass over all rows of the size: outputs [new, ..]."""
        parts, attention = self._integers.device, self._attention
        # Of committed rows all are new, and free ones are behind them.
        own = attention if self.size.committed else NewRowsAttention(attention, parts["places"], self.size.tail)
        step = PagedPass(own, self.plan, parts["slots"], self._cache)
        output = self._network.forward_rows(parts["token_ids"], self._carried, parts["positions"], step)
        if self.size.committed:
            self._states.write(parts["states"], output, parts["ends"])
        return output


class CapturedDrafting(TreeDrafting):
    """`TreeDrafting` on a GPU. Graphs are captured when their size is first needed."""

    def __init__(self, network: Network, config: NeuralConfig) -> None:
        super().__init__(network, config)
        self._static = self._capturable()
        self._passes: dict[PassSize, tuple[StaticPass, Callable[[], RowOutput]]] = {}
        self._trees: dict[tuple[int, bool], tuple[TreePass, Sequence[Callable[[], None]]]] = {}
        self._graphs: GraphCapture | None = None
        # Passes run and nothing is captured or kept, see `rehearsing`.
        self._rehearses = False

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """While the block runs, passes are launched as they will be in graphs, without any."""
        self._rehearses = True
        try:
            yield
        finally:
            self._rehearses = False

    @torch.inference_mode()
    def trees(self, sequences: Sequence[DraftSequence]) -> list[TokenTree]:
        """The best trees: as a whole for modes without distributions, level by level for the others."""
        return in_order(sequences, lambda own: self.start_trees(own).fetch(), super().trees)

    @torch.inference_mode()
    def start_trees(self, sequences: Sequence[DraftSequence]) -> Pending:
        work, replays = self.tree_pass(sequences)
        work.load(sequences)
        for part, replay in enumerate(replays):
            replay()
            work.send_back(part)
        turn = work.turn
        return Pending(
            lambda early: work.fetch(0 if early else work.parts - 1),
            work.elsewhere,
            early=work.parts > 1,
            fresh=lambda: work.turn == turn,
        )

    @torch.inference_mode()
    def tree_pass(self, sequences: Sequence[DraftSequence]) -> tuple[TreePass, Sequence[Callable[[], None]]]:
        """The pass that drafts these trees, captured if it is new, and the graph of each of its parts, for between
        `load` and `fetch`. None of them is for a REJECTION request."""
        coupled = any(one.mode is VerificationMode.COUPLED for one in sequences)
        size = _power_of_two(len(sequences)), coupled
        if size not in self._trees:
            work = TreePass(*size, self, self._static)
            work.load(sequences)
            runs = (work.run_early, work.run_rest)[: work.parts]
            captured = work, [self._capture(run, work.plan) for run in runs]
            if self._rehearses:
                return captured
            self._trees[size] = captured
        return self._trees[size]

    def _capturable(self) -> TritonAttention:
        return cast("TritonAttention", self._attention.capturable)

    def _commit(self, rows: PassRows, carried: Tensor | None) -> None:
        if len(rows.token_ids) <= _power_of_two(len(rows.parts)) * _COMMITTED:
            self._commit_few(rows, carried)
            return
        # One prompt must not make all other sequences take a pass each: with some 30 sequences that took 7 to 26 ms
        # instead of 4, in one frame of seven (H100, `benchmarks/results/2026-11-25-h100-host-time.md`).
        begin = 0
        for is_short, run in groupby(rows.parts, lambda part: part.rows <= _COMMITTED):
            parts = list(run)
            for few in [parts] if is_short else [[part] for part in parts]:
                end = begin + sum(part.rows for part in few)
                own = PassRows(few, rows.token_ids[begin:end], rows.positions[begin:end])
                commit = self._commit_few if is_short else self._commit_prompt
                commit(own, None if carried is None else carried[begin:end])
                begin = end

    def _commit_few(self, rows: PassRows, carried: Tensor | None) -> None:
        """One pass over sequences that have few rows on average."""
        sequences = _power_of_two(len(rows.parts))
        self._replay(PassSize(sequences, sequences * _COMMITTED, sequences * _COMMITTED), rows, carried)

    def _commit_prompt(self, rows: PassRows, carried: Tensor | None) -> None:
        """The rows of one sequence, in pieces."""
        (part,), most = rows.parts, PROMPT_ROWS[-1]
        for begin in range(0, part.rows, most):
            count = min(part.rows - begin, most)
            piece = TailPart(part.pages, part.prefix + begin, count, count, slot=part.slot)
            taken = slice(begin, begin + count)
            size = next(size for size in (_COMMITTED, *PROMPT_ROWS) if size >= count)
            own = PassRows([piece], rows.token_ids[taken], rows.positions[taken])
            self._replay(PassSize(1, size, size), own, None if carried is None else carried[taken])

    def _forward_rows(self, rows: PassRows, carried: Tensor | None, level: int = 0) -> RowOutput:
        if any(part.parents is None for part in rows.parts):
            return super()._forward_rows(rows, carried, level)
        sequences, used = _power_of_two(len(rows.parts)), len(rows.token_ids)
        # For the sequences that still grow: of fewer sequences, levels are as wide or wider.
        shape = self.shape.for_sequences(sequences)
        size = PassSize(sequences, sequences * (1 + shape.expanded), sequences * shape.width)
        output = self._replay(size, rows, carried)
        return RowOutput(output.carried[:used], output.lm_input[:used])

    def _replay(self, size: PassSize, rows: PassRows, carried: Tensor | None) -> RowOutput:
        """Run a pass, capturing its size if it is new."""
        captured = self._passes.get(size)
        work = StaticPass(size, self, self._static) if captured is None else captured[0]
        work.load(rows, carried)
        if captured is None:
            captured = work, self._capture(work.compute, work.plan)
            if not self._rehearses:
                self._passes[size] = captured
        return captured[1]()

    def _capture(self, run: Callable[[], Output], plan: TritonPlan) -> Callable[[], Output]:
        """What `run` computes as a graph; see `GraphCapture.capture`."""
        if self._rehearses:
            return run
        if self._graphs is None:
            # Kernels keep the priority of this stream.
            self._graphs = GraphCapture(drafting_stream(self.network.device))
        graph, output = self._graphs.capture(run, plan)

        def replay() -> Output:
            graph.replay()
            return output

        return replay


def drafting_on(network: Network, config: NeuralConfig) -> TreeDrafting:
    """Drafting by the settings: captured on a GPU if `cuda_graphs` is set."""
    captured = config.cuda_graphs and network.device.type == "cuda"
    return (CapturedDrafting if captured else TreeDrafting)(network, config)


def first_batches(drafting: TreeDrafting, config: NeuralConfig) -> Iterator[tuple[VerificationMode, int, int]]:
    """Batches to draft once at the start, so that no request waits for compilation and capture: the mode, the number of
    sequences, and the rows that each has to read."""
    captured = isinstance(drafting, CapturedDrafting)
    if captured:
        yield from ((VerificationMode.GREEDY, 1, rows) for rows in PROMPT_ROWS)
    yield from ((mode, 1, 1) for mode in LOSSLESS_MODES)
    if captured:
        # REJECTION requests need other graphs for each number of sequences, and are rare.
        for mode in (VerificationMode.GREEDY, VerificationMode.COUPLED):
            yield from ((mode, 1 << power, 1) for power in range(1, 1 + (config.captured_sequences - 1).bit_length()))


def _power_of_two(count: int) -> int:
    """The smallest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()
