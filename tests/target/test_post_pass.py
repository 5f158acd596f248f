"""What is compiled ahead of what follows passes: all that is captured before the first request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch

from target_service.execution.post_pass import PostPass, PostPassWork
from target_service.model.runner import ModelRunner


def post_pass_of(sizes: list[int], *, tables: bool) -> PostPass:
    """Of passes that were captured with so many rows, in this order."""
    passes = [SimpleNamespace(token_ids=torch.zeros(rows), graph_buffers=object()) for rows in sizes]
    runner = SimpleNamespace(
        device=torch.device("cpu"), node_table=object() if tables else None, empty_passes=lambda: iter(passes)
    )
    nothing = cast(Any, None)
    return PostPass(cast(ModelRunner, runner), nothing, nothing, nothing, "torch", _typical=False)


def test_what_some_requests_need_is_compiled_behind_the_smallest_passes(monkeypatch: Any) -> None:
    """The largest pass is captured first, so the first is not the smallest."""
    post_pass = post_pass_of([2048, 16, 1, 64, 4], tables=True)
    ahead = {(cast(Any, one).args[0], len(cast(Any, one).args[1].token_ids)) for one in post_pass.launches()}
    captured = list[tuple[PostPassWork, int]]()
    monkeypatch.setattr(post_pass, "launch", lambda work, done: captured.append((work, len(done.token_ids))))
    post_pass.capture_ahead()
    # Of the other passes all that follows them usually.
    assert {rows for _, rows in captured} == {2048, 16, 1, 64, 4} and set(captured) <= ahead
    of_some = {rows for work, rows in ahead if work.shaped or work.logprobs}
    assert of_some == {1, 4} and {rows for work, rows in captured if work.shaped} == {1}


def test_without_passes_of_one_row_the_smallest_others_are_taken() -> None:
    of_some = {
        len(cast(Any, one).args[1].token_ids)
        for one in post_pass_of([64, 8], tables=False).launches()
        if cast(Any, one).args[0].logprobs
    }
    assert of_some == {8}
    assert not list(post_pass_of([], tables=False).launches())
