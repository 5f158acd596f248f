"""Computing in a thread that ends."""

from __future__ import annotations

import threading

import pytest

from outrider.runtime import in_passing_thread


def test_the_thread_has_ended_when_the_result_is_there() -> None:
    thread = in_passing_thread(threading.current_thread)
    assert thread is not threading.current_thread()
    assert not thread.is_alive()


def test_an_error_comes_through() -> None:
    def fail() -> None:
        raise ValueError("no such model")

    with pytest.raises(ValueError, match="no such model"):
        in_passing_thread(fail)
