"""What is launched around captured passes becomes a graph once, for each of them. No GPU: graphs are recorded calls."""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from target_service.execution import post_pass
from target_service.execution.post_pass import PostPass, PostPassWork
from target_service.execution.pre_pass import PrePass
from target_service.model.cuda_graphs.pass_graphs import PassGraphs

CPU = torch.device("cpu")


class Keeper:
    """Stands for a captured pass."""


class Graph:
    def __init__(self) -> None:
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1


class Recorded(PassGraphs):
    """Captures by a call, as a capture runs the host's part of a launch and not the device's."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.captured: list[Graph] = []

    def _capture(self, launch: Callable[[], object]) -> tuple[Any, object]:
        self.captured.append(Graph())
        return self.captured[-1], launch()


def test_a_launch_is_captured_once_and_replayed_from_then_on() -> None:
    graphs, graph_buffers, launched = Recorded(), Keeper(), list[int]()

    def launch() -> int:
        launched.append(len(launched))
        return launched[-1]

    # The first is launched as it is, so that everything is compiled, and then captured.
    assert graphs.replay_or_capture(graph_buffers, "work", launch) == 0 and launched == [0, 1]
    # The tensors of the capture are those that replays write.
    assert [graphs.replay_or_capture(graph_buffers, "work", launch) for _ in range(3)] == [1, 1, 1]
    assert launched == [0, 1] and [one.replays for one in graphs.captured] == [3]


def test_each_pass_and_each_kind_of_work_has_its_graph() -> None:
    graphs, keepers = Recorded(), [Keeper(), Keeper()]
    for _ in range(2):
        for number, graph_buffers in enumerate(keepers):
            for work in ("one", "other"):
                assert graphs.replay_or_capture(graph_buffers, work, lambda seen=(number, work): seen) == (number, work)  # type: ignore[misc]
    assert [one.replays for one in graphs.captured] == [1] * 4


def test_what_nobody_keeps_is_launched_each_time() -> None:
    graphs, launched = Recorded(), list[int]()
    for number in range(3):
        graphs.replay_or_capture(None, "work", lambda number=number: launched.append(number))  # type: ignore[misc]
    assert launched == [0, 1, 2] and not graphs.captured


def test_graphs_of_a_pass_that_was_dropped_are_dropped_too() -> None:
    graphs, graph_buffers = Recorded(), Keeper()
    graphs.replay_or_capture(graph_buffers, "work", lambda: 0)
    assert len(graphs._graphs) == 1
    del graph_buffers
    gc.collect()
    assert not len(graphs._graphs)


class Behind(PostPass):
    """What follows passes, launched by a count."""

    def __init__(self) -> None:
        super().__init__(SimpleNamespace(device=CPU), *[None] * 5)  # type: ignore[arg-type]
        self._graphs = self.graphs = Recorded()
        self.launched = 0

    def _launch(self, *_: Any) -> None:
        self.launched += 1


def large_pass(graph_buffers: object | None, rows: int = 512) -> Any:
    return SimpleNamespace(graph_buffers=graph_buffers, token_ids=[0] * rows)


@pytest.mark.parametrize("work", [PostPassWork(False, shaped=True), PostPassWork(False, logprobs=True)])
def test_what_only_some_requests_need_behind_a_large_pass_is_captured_once_it_comes_often(work: PostPassWork) -> None:
    behind, buffers, often = Behind(), Keeper(), post_pass._LAUNCHES_BEFORE_CAPTURE
    for number in range(1, often):
        behind.launch(work, large_pass(buffers))
        assert behind.launched == number and not behind.graphs.captured
    behind.launch(work, large_pass(buffers))
    # Launched, and then captured, which runs nothing.
    assert behind.launched == often + 1 and [one.replays for one in behind.graphs.captured] == [0]
    for _ in range(3):
        behind.launch(work, large_pass(buffers))
    assert behind.launched == often + 1 and behind.graphs.captured[0].replays == 3
    # Another pass, and other work behind the same.
    for other, where in ((work, Keeper()), (PostPassWork(False, shaped=True, logprobs=True), buffers)):
        behind.launch(other, large_pass(where))
    assert behind.launched == often + 3 and len(behind.graphs.captured) == 1


def test_behind_a_small_pass_it_is_captured_at_once_and_never_without_buffers() -> None:
    behind, work = Behind(), PostPassWork(False, shaped=True)
    behind.launch(work, large_pass(Keeper(), rows=64))
    assert len(behind.graphs.captured) == 1
    for _ in range(2 * post_pass._LAUNCHES_BEFORE_CAPTURE):
        behind.launch(work, large_pass(None))
    assert len(behind.graphs.captured) == 1


def test_without_memory_for_a_capture_launches_go_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    behind, work, buffers, often = Behind(), PostPassWork(False, shaped=True), Keeper(), 3
    monkeypatch.setattr(post_pass, "_LAUNCHES_BEFORE_CAPTURE", often)
    monkeypatch.setattr(behind.graphs, "_capture", Mock(side_effect=torch.OutOfMemoryError("none is left")))
    for _ in range(3 * often):
        behind.launch(work, large_pass(buffers))
    assert behind.launched == 3 * often and caplog.text.count("no memory to capture") == 1


class Table:
    """Notes what is asked of a node table, and of its mailboxes."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def copy_sent_tables(self, mail: Table) -> None:
        assert mail is self
        self.calls.append(("copy", None))

    def choose_rows(self, step: Any, pending: Any, moves: Any, prefilling: int) -> None:
        assert pending == "pending"
        self.calls.append(("choose", (step, moves, prefilling)))

    def await_sent(self) -> None:
        self.calls.append(("await", None))


@pytest.mark.parametrize(
    ("moves", "prefilling", "captured"),
    [(None, 0, True), ("moves", 0, False), (None, 2, False)],
    ids=["as mostly", "behind a step of another kind", "beside a prompt"],
)
def test_rows_are_chosen_by_a_graph_where_nothing_else_changes(moves: Any, prefilling: int, captured: bool) -> None:
    """A graph keeps the arguments that it was captured with."""
    table, graph_buffers = Table(), Keeper()
    runner: Any = type("Runner", (), {"pending": "pending", "device": CPU})
    pre_pass = PrePass(runner, table, table)  # type: ignore[arg-type]
    graphs = pre_pass._graphs = Recorded()
    for step in ("first", "second"):
        pre_pass.launch(step, graph_buffers, moves, prefilling)  # type: ignore[arg-type]
    launches = [("copy", None), ("choose", ("first", moves, prefilling))]
    # What was sent is waited for outside, in front of every pass.
    expected = [("await", None), *launches, *(launches if captured else ()), ("await", None)]
    if not captured:
        expected += [("copy", None), ("choose", ("second", moves, prefilling))]
    assert table.calls == expected
    assert [one.replays for one in graphs.captured] == ([1] if captured else [])
