"""A device that chooses and verifies rows of known answers, from the tables that an engine publishes: `Steps` for the
measurement of the host's time for forms of output."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.host.host_time import HostOnly, HostRunner, Times
from target_service.compiling import compiled
from target_service.execution.batch import StepBatch
from target_service.execution.device_time import DeviceSpan
from target_service.execution.host_executor import Launched, Ready
from target_service.execution.post_pass import TableWork
from target_service.grammars.row_masks import TreeRows
from target_service.sampling.verifier import SequenceVerifier, Verified
from tree_kernels.node_table import StepIntegers
from tree_kernels.node_table.layout import (
    COST_OF_HALVING,
    COSTS,
    ENDS,
    EXPECTED_UNIT,
    FIRST_COST,
    MOST_COST,
    NEXT_COST,
    PARENTS,
    PROSPECTS,
    REPORT_ROWS,
    REPORT_TOKENS,
    TOKENS,
    ReportField,
)
from tree_kernels.node_table.mailboxes import TURNS

Ints = NDArray[np.int32]
# Of chains that lookup finds within a form: tokens of a chain, the share that is right, and the tokens of the run
# before them, by which they are ranked. Chosen.
_CHAIN, _RIGHT, _RUN = 3, 0.15, 2
_WORDS = ("north", "Anna", "lake", "Muster", "stone", "42", "green", "Dr.", "hill", "Paul", "info", "moon", "Ida")


def form_answer(dice: random.Random) -> str:
    """A text of the form `FORM` of `sampling_parameters`."""
    first, second = dice.sample(_WORDS, 2)
    return json.dumps(
        {
            "name": f"{first} {second}",
            "age": dice.randrange(121),
            "email": f"{first}.{second}@{dice.choice(_WORDS)}.org"[:30],
            "is_customer": dice.random() < 0.5,
            "country_of_residence": dice.choice(["Germany", "France", "Spain", "Italy"]),
            "preferred_contact_method": dice.choice(["email", "telephone", "letter"]),
            "number_of_previous_orders": dice.randrange(1000),
        },
        separators=(",", ":"),
    )


class _SequenceRows(NamedTuple):
    """The rows of one sequence in a pass."""

    first: int
    tree: TreeRows
    from_table: int
    costs: Ints  # of every candidate, rising


class AnsweredRows:
    """Stands for `ChosenRows`: the rows of the pass that was launched last, chosen when they are asked for first."""

    def __init__(self, choose: Callable[[StepBatch], list[_SequenceRows]]) -> None:
        self._choose = choose
        self._batch: StepBatch | None = None
        self._rows: list[_SequenceRows] = []
        self.most = 0

    def begin(self, batch: StepBatch) -> None:
        """A pass is launched."""
        self._batch, self.most = batch, 0 if batch.device_rows is None else batch.device_rows.rows

    def copy(self, step: StepIntegers) -> None:
        """See `ChosenRows.copy`."""

    def all(self) -> list[_SequenceRows]:
        """Those of every sequence whose rows the device chooses."""
        if self._batch is not None:
            self._rows, self._batch = self._choose(self._batch), None
        return self._rows

    def of(self, place: int) -> tuple[int, TreeRows]:
        """See `ChosenRows.of`."""
        one = self.all()[place]
        return one.first, one.tree


class _FormStep:
    """A step of `FormSteps`; see `Launched`. It has ended at a time."""

    on_device = True
    span: DeviceSpan | None = None

    def __init__(self, launched: Launched, ends_at: float) -> None:
        self._launched, self._ends_at = launched, ends_at
        self.can_launch_before_results = launched.can_launch_before_results
        self.mask, self.prompt_logprobs = launched.mask, launched.prompt_logprobs

    @property
    def awaits_masks(self) -> bool:
        """See `Launched.awaits_masks`."""
        return self._launched.awaits_masks

    def wait(self) -> None:
        """See `Launched.wait`."""
        time.sleep(max(0.0, self._ends_at - time.perf_counter()))

    def ended(self) -> bool:
        """See `Launched.ended`."""
        return time.perf_counter() >= self._ends_at

    def outcomes(self) -> list[Verified | None]:
        """See `Launched.outcomes`."""
        return self._launched.outcomes()


class FormSteps(HostOnly):
    """`Steps` whose passes verify rows by answers that are known, beside the host's time."""

    def __init__(
        self,
        runner: HostRunner,
        one_pass: Callable[[int], float],
        max_sequences: int,
        max_rows: int,
        device: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """`device` is entered for what is a device's work; the others as of `HostOnly`."""
        super().__init__(runner, Times(), one_pass, max_sequences, max_rows)
        self._device = device
        self._rows = AnsweredRows(self._choose)
        setattr(self, "_chosen", self._rows)  # noqa: B010
        copy = self._shaper.mask

        def copied(*arguments: Any) -> None:
            with device():
                copy(*arguments)

        setattr(self._shaper, "mask", copied)  # noqa: B010
        self._dice = random.Random(5)
        # By sequence id: the prompt and the tokens generated so far, and those still to come.
        self._texts: dict[int, list[int]] = {}
        self._answers: dict[int, list[int]] = {}

    def expect(self, sequence_id: int, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Set what a sequence will generate; its end token is repeated."""
        self._texts[sequence_id], self._answers[sequence_id] = list(prompt), [*answer, *[answer[-1]] * 64]

    def launch(self, batch: StepBatch, verifiers: Sequence[SequenceVerifier], passes: int, ready: Ready) -> Launched:
        """See `Steps.launch`."""
        assert passes == 1, "rows of a pass are chosen behind the one before"
        self._rows.begin(batch)
        launched = super(HostOnly, self).launch(batch, verifiers, passes, ready)
        rows = batch.device_rows.rows if batch.device_rows is not None else len(batch.input.token_ids)
        self._free_at = max(self._free_at, time.perf_counter()) + self._one_pass(rows)
        return _FormStep(launched, self._free_at)

    def _choose(self, batch: StepBatch) -> list[_SequenceRows]:
        with self._device():
            device_rows, tables = batch.device_rows, self.tables
            assert device_rows is not None and tables is not None
            newest, boxes = tables.mail.newest.numpy(), tables.mail.tables.numpy()
            found: list[tuple[Ints, Ints, Ints, int]] = []
            for item in batch.items:
                text = self._texts[item.sequence.sequence_id]
                slot = slot_of(tables, item.sequence.sequence_id)
                table = None if slot < 0 else boxes[slot, newest[slot] % TURNS]
                found.append(self._candidates(table, text, self._answers[item.sequence.sequence_id]))
            return _best_rows(batch, [text[-1] for text in map(self._text_of, batch.items)], found)

    def _text_of(self, item: Any) -> list[int]:
        return self._texts[item.sequence.sequence_id]

    def _candidates(
        self, table: Ints | None, text: Sequence[int], answer: Sequence[int]
    ) -> tuple[Ints, Ints, Ints, int]:
        """Tokens, parents (0 for the root, 1 for the first candidate ..) and costs of what may be drafted, parents
        first, and how many of them are the table's."""
        tokens = parents = costs = np.zeros(0, np.int32)
        if table is not None and 0 < table[0] <= len(text):
            tokens, parents, costs = below(table, np.array(text[table[0] :], np.int32))
        right = self._dice.random() < _RIGHT
        chain = list(answer[:_CHAIN]) if right else self._dice.choices(text, k=_CHAIN)
        chained = FIRST_COST[_RUN] + NEXT_COST[_RUN] * np.arange(_CHAIN, dtype=np.int32)
        above = [0, *range(len(tokens) + 1, len(tokens) + _CHAIN)]
        return (
            np.append(tokens, np.array(chain, np.int32)),
            np.append(parents, np.array(above, np.int32)),
            np.append(costs, chained).astype(np.int32),
            len(tokens),
        )

    def _conclude(
        self, batch: StepBatch, rows: Any, done: Any, table: TableWork = TableWork.NONE
    ) -> Callable[[], None]:
        """Report what of the rows agrees with the answers."""
        del rows, done
        with self._device():
            verdicts, assert_table = self._verifier.verdicts, self._runner.node_table
            assert assert_table is not None
            verdicts.accepted_counts.zero_()
            reports = assert_table.reports.numpy()
            laid_out = len(batch.items) if batch.device_rows is None else batch.device_rows.laid_out
            chosen = self._rows.all() if table is not TableWork.NONE else []
            for place, item in enumerate(batch.items):
                if item.tree is None:
                    continue
                sequence_id = item.sequence.sequence_id
                answer, accepted = self._answers[sequence_id], list[int]()
                if place >= laid_out:
                    accepted = accepted_rows(chosen[place].tree, answer)
                    _report(reports[place, 0], chosen[place], accepted)
                count = len(accepted) + 1
                verdicts.next_tokens[place] = answer[count - 1]
                reports[place, 0, REPORT_TOKENS : REPORT_TOKENS + count] = answer[:count]
                self._texts[sequence_id] += answer[:count]
                del answer[:count]
        return lambda: None


def slot_of(tables: Any, sequence_id: int) -> int:
    """The slot of a sequence's table; -1 for none."""
    tree = tables._trees.get(sequence_id)
    return -1 if tree is None else int(tree.slot)


def accepted_rows(tree: TreeRows, answer: Sequence[int]) -> list[int]:
    """The rows that agree with an answer, below the root."""
    found, above = list[int](), 0
    for row in range(1, len(tree.token_ids)):
        if tree.parents[row] == above and tree.token_ids[row] == answer[len(found)]:
            found.append(row)
            above = row
    return found


def _best_rows(
    batch: StepBatch, roots: Sequence[int], candidates: Sequence[tuple[Ints, Ints, Ints, int]]
) -> list[_SequenceRows]:
    """The candidates of least cost of all sequences, as many as the pass has room for."""
    device_rows = batch.device_rows
    assert device_rows is not None
    laid_out = device_rows.laid_out
    room = device_rows.rows - device_rows.laid_out_rows - (len(batch.items) - laid_out)
    places = [(int(cost), place, node)
              for place, (_, _, costs, _) in enumerate(candidates) if place >= laid_out
              for node, cost in enumerate(costs) if cost < MOST_COST]  # fmt: skip
    kept: list[list[int]] = [[] for _ in candidates]
    for _, place, node in sorted(places):
        above = int(candidates[place][1][node])
        if room and len(kept[place]) < device_rows.limits[place] and (not above or above - 1 in kept[place]):
            kept[place].append(node)
            room -= 1
    found, first = list[_SequenceRows](), device_rows.laid_out_rows
    for place, (root, (tokens, parents, costs, from_table)) in enumerate(zip(roots, candidates, strict=True)):
        nodes = sorted(kept[place])
        rows = {node + 1: row for row, node in enumerate(nodes, start=1)} | {0: 0}
        tree = TreeRows([root, *tokens[nodes].tolist()], [0, *[rows[int(parents[node])] for node in nodes]])
        found.append(_SequenceRows(first, tree, sum([node < from_table for node in nodes]), np.sort(costs)))
        first += len(tree.token_ids) if place >= laid_out else 0
    return found


def _report(report: Ints, rows: _SequenceRows, accepted: Sequence[int]) -> None:
    """Write the figures of a pass; see `ReportField`."""
    chances = 2.0 ** (-rows.costs / COST_OF_HALVING)
    summed = np.cumsum(np.append(chances, np.zeros(max(0, PROSPECTS[-1] - len(chances)))))
    drafted = len(rows.tree.token_ids) - 1
    report[:REPORT_TOKENS] = 0
    report[ReportField.ACCEPTED], report[ReportField.DRAFTED] = len(accepted), drafted
    report[ReportField.DRAFTED_FROM_TABLE], report[ReportField.ACCEPTED_FROM_TABLE] = rows.from_table, len(accepted)
    expected = int(summed[drafted - 1] * EXPECTED_UNIT) if drafted else 0
    report[ReportField.EXPECTED] = report[ReportField.EXPECTED_FROM_TABLE] = expected
    report[ReportField.FIRST_ROW] = rows.first
    first = ReportField.FIRST_PROSPECT
    report[first : first + len(PROSPECTS)] = [int(summed[count - 1] * EXPECTED_UNIT) for count in PROSPECTS]
    report[REPORT_ROWS : REPORT_ROWS + len(accepted)] = accepted


@compiled
def below(table: Ints, tokens: Ints) -> tuple[Ints, Ints, Ints]:
    """Tokens, parents and costs of the nodes below the one to which `tokens` lead from a table's root; none where they
    lead to no node. Parents count from 1 for the first of the nodes, and 0 is the one that they lead to."""
    node, count = 0, table[1]
    for token in tokens:
        place, end = node + 1, table[ENDS + node]
        while place < end and table[TOKENS + place] != token:
            place = table[ENDS + place]
        if place >= end:
            count = 0
            break
        node = place
    size = table[ENDS + node] - node - 1 if count else 0
    first = node + 1
    found = table[TOKENS + first : TOKENS + first + size].copy()
    parents = table[PARENTS + first : PARENTS + first + size] - np.int32(node)
    costs = table[COSTS + first : COSTS + first + size] - table[COSTS + node]
    return found, parents, costs
