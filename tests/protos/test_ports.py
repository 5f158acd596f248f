"""Free ports are none that the system gives to others."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from outrider import ports
from outrider.ports import free_port


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Says, as Linux does, from where on the system gives ports."""
    monkeypatch.setattr(ports, "_FIRST_GIVEN", tmp_path / "range")
    return tmp_path / "range"


def test_a_free_port_is_given_to_nobody_else(given: Path) -> None:
    given.write_text("32768\t60999\n")
    drawn = [free_port() for _ in range(300)]
    assert len({*drawn}) == 300 and max(drawn) < 32768


def test_where_the_system_gives_all_it_is_one_of_those(given: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given.write_text("1024\t60999\n")
    monkeypatch.setattr(ports, "_RARELY_USED", range(2000, 2001))
    assert free_port() != 2000


def test_systems_that_do_not_say_give_the_highest(given: Path) -> None:
    assert not given.exists() and free_port() < 49152


def test_one_that_is_listened_on_is_not_free(given: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given.write_text("65536\t65536\n")
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        monkeypatch.setattr(ports, "_RARELY_USED", range(taken, taken + 1))
        assert free_port() != taken
