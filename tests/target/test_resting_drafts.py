"""What a draft is sent while no step waits for it: nothing, until a step does, a frame is full or a sequence ends."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import pytest
import torch
from engine_harness import request

from outrider.drafting.events import Connected, Grown, Lost, SequenceFailure
from outrider.wire.frames import (
    MAX_SEQUENCES_PER_FRAME,
    DraftInfo,
    OpenSequence,
    SequenceAdvance,
    SequenceGrowth,
    TreeLimits,
)
from target_service.config import TargetConfig
from target_service.core.sequence import Sequence, SequenceTotals
from target_service.execution.node_tables import NodeTables
from target_service.speculation.drafts import DraftTrees
from tree_kernels.node_table import Mailboxes


class QuietFeatures:
    """Of a draft that reads no hidden states, or as if of one that does."""

    holds_vectors = False

    def __init__(self, reads_every_pass: bool = False) -> None:
        self.reads_every_pass = reads_every_pass

    def connect(self, _request: object) -> None: ...
    def hold_vectors(self, _sequence: object) -> None: ...
    def forget(self, _sequence_id: int) -> None: ...
    def release_vectors(self, _sequence_id: int, _first: int) -> None: ...
    def due(self, _trees: object, _commits: object) -> tuple[list[object], dict[int, object]]:
        return [], {}


class AnsweringLink:
    """Notes the frames in order, and answers each advance with one node for the newest step of each sequence."""

    def __init__(self, drafting: DraftTrees) -> None:
        self.frames: list[tuple[str, object]] = []
        self._drafting, self._next_id = drafting, 1

    def open(self, sequence: OpenSequence) -> None:
        self.frames.append(("open", (sequence.sequence_id, sequence.step, sequence.token_ids)))
        self._answer([(sequence.sequence_id, sequence.step)])

    def advance(self, advances: SequenceOf[SequenceAdvance]) -> None:
        self.frames.append(("advance", [tuple(one[:3]) for one in advances]))
        self._answer([*{one.sequence_id: one.step for one in advances}.items()])

    def close(self, sequence_ids: SequenceOf[int]) -> None:
        self.frames.append(("close", list(sequence_ids)))

    def _answer(self, newest: SequenceOf[tuple[int, int]]) -> None:
        grown = []
        for sequence_id, step in newest:
            grown.append(SequenceGrowth(sequence_id, step, self._next_id, (0,), (7,), (0.5,), replaces=True))
            self._next_id += 1
        self._drafting.receive(Grown(grown))


class Drive:
    """Sequences 1 .. `count`, open at a draft that has drafted for them."""

    def __init__(self, count: int = 1, *, tables: NodeTables | None = None, head: bool = False) -> None:
        features = QuietFeatures(head)
        self.drafting = DraftTrees(TargetConfig(draft="any", draft_wait_ms=100.0), 100, features, tables)  # type: ignore[arg-type]
        self.link = AnsweringLink(self.drafting)
        self.drafting.attach(self.link)  # type: ignore[arg-type]
        self.drafting.receive(Connected(DraftInfo("any", 0, "", TreeLimits(63, 8), 4096, "0")))
        self.drafting.listen()
        self.sequences = [
            Sequence(number, request([1, 2, 3], 4000), [1, 2, 3], SequenceTotals()) for number in range(1, count + 1)
        ]
        for sequence in self.sequences:
            self.drafting.add(sequence)
        self.drafting.open_added()
        self.drafting.listen()
        self.link.frames.clear()
        self.drafting.rests = True

    def commit(self, *tokens: int) -> None:
        """A step of every sequence."""
        for sequence in self.sequences:
            sequence.token_ids.extend(tokens)
            sequence.step += 1
        self.drafting.send_commits([(sequence, len(tokens)) for sequence in self.sequences])


def test_a_step_that_waits_gets_the_tree_of_its_own_root() -> None:
    drive = Drive()
    drive.commit(11)
    drive.commit(12, 13)
    drive.commit(14)
    assert drive.link.frames == []
    # No step waits for nothing.
    drive.drafting.wait_for([])
    assert drive.link.frames == []
    assert drive.drafting.wait_for(drive.sequences) == 0
    assert drive.link.frames == [("advance", [(1, 1, (11,)), (1, 2, (12, 13)), (1, 3, (14,))])]
    tree = drive.drafting.tree_of(drive.sequences[0])
    assert tree is not None and tree.answered and tree.token_ids == [14, 7]


def test_commits_go_at_once_where_the_next_step_waits() -> None:
    drive = Drive()
    drive.commit(11)
    drive.drafting.rests = False
    drive.commit(12)
    drive.commit(13)
    assert drive.link.frames == [("advance", [(1, 1, (11,)), (1, 2, (12,))]), ("advance", [(1, 3, (13,))])]


def test_a_draft_that_rests_for_long_gets_full_frames() -> None:
    """So it reads what it may learn from, and what a step that waits has it read is bounded."""
    drive = Drive(2)
    for _ in range(MAX_SEQUENCES_PER_FRAME // 2 + 3):
        drive.commit(11)
    (kind, sent), *more = drive.link.frames
    assert kind == "advance" and isinstance(sent, list) and len(sent) == MAX_SEQUENCES_PER_FRAME and not more


def test_an_answer_that_ends_is_sent_to_its_end() -> None:
    drive = Drive(2)
    drive.commit(11)
    drive.drafting.remove(2)
    drive.drafting.remove(1)
    assert drive.link.frames == [("advance", [(1, 1, (11,)), (2, 1, (11,))]), ("close", [2]), ("close", [1])]


def test_a_draft_that_is_left_is_sent_what_was_committed() -> None:
    drive = Drive()
    drive.commit(11)
    drive.drafting.update_load(1 << 20)
    assert drive.link.frames == [("advance", [(1, 1, (11,))]), ("close", [1])]


@pytest.mark.parametrize("connects", [True, False])
def test_a_sequence_that_another_draft_opens_is_sent_once(connects: bool) -> None:
    drive = Drive()
    drive.commit(11)
    if connects:
        drive.drafting.receive(Connected(DraftInfo("any", 0, "", TreeLimits(63, 8), 4096, "0")))
    else:
        drive.drafting.receive(Lost([1]))
    drive.drafting.listen()
    drive.drafting.wait_for(drive.sequences)
    assert drive.link.frames == [("open", (1, 1, (1, 2, 3, 11)))]


def test_of_a_sequence_that_the_draft_has_closed_nothing_is_sent() -> None:
    drive = Drive(2)
    drive.commit(11)
    drive.drafting.receive(SequenceFailure(1, "INTERNAL", "a bug"))
    drive.drafting.listen()
    drive.drafting.wait_for(drive.sequences)
    assert drive.link.frames == [("advance", [(2, 1, (11,))])]


def test_a_draft_that_may_be_preparing_does_not_rest() -> None:
    """Nothing would come of it that shows that it is ready."""
    drive = Drive()
    drive.drafting.latency.expect_first_answer()
    drive.commit(11)
    assert len(drive.link.frames) == 1


@pytest.mark.parametrize("kind", ["head", "tables"])
def test_whoever_is_followed_in_every_step_is_sent_every_step(kind: str) -> None:
    """A head reads hidden states as they come, and a device takes rows of any tree that is there."""
    tables = NodeTables(2, Mailboxes(2, torch.device("cpu"))) if kind == "tables" else None
    drive = Drive(tables=tables, head=kind == "head")
    drive.commit(11)
    assert drive.link.frames == [("advance", [(1, 1, (11,))])]
