"""The standard streams of commands: closed, full, in any encoding; and what a service may not do to a terminal."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import pty
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.text import Text
from waits import HUNG_SECONDS

from outrider.consoles import output_console
from outrider.visible import one_line, visible
from outrider_client.cli import main

# A title, the clipboard, a cursor's move, the same by controls of Latin-1, text in another order, a bell.
HOSTILE = "\x1b]0;owned\x07 \x1b]52;c;b3duZWQ=\x07 \x1b[2J\r \x9d0;x\x9c \x9b2J \u202eabc\u2066 \x7f"
HYPOTHESIS = settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow])
ALLOWED = set("\n\t")


def obeyed(text: str) -> set[str]:
    """Characters that a terminal takes commands from."""
    numbers = (*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
    return ({chr(number) for number in numbers} - ALLOWED) & set(text)


@HYPOTHESIS
@given(st.text())
def test_what_is_visible_cannot_be_obeyed(text: str) -> None:
    assert not obeyed(visible(text)) and not obeyed(one_line(text)) and "\n" not in one_line(text)
    visible(text).encode()
    if not obeyed(text) and not any("\ud800" <= one <= "\udfff" for one in text):
        assert visible(text) == text


def test_what_is_shown_of_controls() -> None:
    assert visible("a\x1b[1m\tb\n\x9b\u202e\udce9é") == "a\\x1b[1m\tb\n\\x9b\\u202e\ufffdé"
    assert one_line("a\nb\u2028c") == "a\\nb\\u2028c"


class TestTerminal:
    """Commands in a terminal of their own."""

    async def run(self, python: str, *words: str, typed: bytes = b"") -> tuple[int, str]:
        """The exit status of the `outrider` command, and what the terminal got."""
        ours, theirs = pty.openpty()
        try:
            process = await asyncio.create_subprocess_exec(
                *(python, "-m", "outrider_client.cli", *words),
                stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm"},
            )  # fmt: skip
        finally:
            os.close(theirs)
        try:
            os.write(ours, typed)
            async with asyncio.timeout(HUNG_SECONDS):
                seen = await asyncio.to_thread(self._read, ours)
                return await process.wait(), seen
        finally:
            os.close(ours)
            with contextlib.suppress(ProcessLookupError):
                process.kill()

    def _read(self, terminal: int) -> str:
        pieces = []
        while True:
            try:
                piece = os.read(terminal, 65536)
            except OSError as error:
                # The last program that had it open has ended.
                assert error.errno == errno.EIO
                return b"".join(pieces).decode(errors="replace")
            pieces.append(piece)

    async def test_a_target_cannot_drive_it(self, running: Any, python: str) -> None:
        """By its answers, its errors, and what it tells of itself, in every command that shows them."""
        running.target.words = (HOSTILE, *running.target.words[1:])
        running.target.more_info = {"device": "cuda:0", "device_name": HOSTILE}
        running.target.model = running.target.drafter = HOSTILE
        running.target.refuses = {"refuse"}
        running.target.refusal = HOSTILE
        address = ("--target", running.address)
        for words in (
            ("generate", "hi", "--max-tokens", "1", *address),
            ("generate", "hi", "--max-tokens", "1", "--colour", *address),
            ("generate", "refuse", *address),
            ("health", *address),
            ("info", *address),
        ):
            _, seen = await self.run(python, *words)
            assert "owned" in seen
            self.check(seen)
        status, seen = await self.run(python, "chat", "--max-tokens", "1", *address, typed=b"hi\nrefuse\n/quit\n")
        assert status == 0 and seen.count("owned") >= 3
        self.check(seen)

    def check(self, seen: str) -> None:
        """Colours are our own; nothing of the target's is left."""
        for command in ("\x1b]", "\x1b[2J", "\x07", "\x9d", "\x9b", "\x9c", "\u202e", "\u2066"):
            assert command not in seen, repr(seen)
        assert "\\x1b]0;owned" in seen.replace("\r\n", "")

    async def test_a_pipe_gets_what_the_target_says(self, running: Any, outrider: Any) -> None:
        running.target.words = (HOSTILE, *running.target.words[1:])
        status, out, _ = await outrider("generate", "hi", "--target", running.address, "--max-tokens", "1")
        assert (status, out) == (0, HOSTILE + "\n")

    async def test_bad_bytes_are_typed(self, running: Any, python: str) -> None:
        typed = b"caf\xe9\n/quit\n"
        status, seen = await self.run(python, "chat", "--target", running.address, "--max-tokens", "2", typed=typed)
        assert status == 0 and "Traceback" not in seen, seen
        ((request, _, _),) = running.target.requests
        # Where lines are edited, the library for it drops a byte that it cannot show.
        assert request.chat.messages[0].content in ("caf", "caf\ufffd")

    async def test_bad_bytes_come_through_a_pipe(self, running: Any, python: str) -> None:
        words = ("chat", "--target", running.address, "--max-tokens", "2")
        process = await asyncio.create_subprocess_exec(
            *(python, "-m", "outrider_client.cli", *words),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        _, err = await asyncio.wait_for(process.communicate(b"caf\xe9\n"), HUNG_SECONDS)
        assert (process.returncode, err) == (0, b"")
        assert running.target.requests[0][0].chat.messages[0].content == "caf\ufffd"


async def ended(
    *words: str | bytes, shell: str = "", python: str = sys.executable, **more: str
) -> tuple[int, str, str]:
    """How the `outrider` command ends with the redirections of a shell, and what it printed."""
    process = await asyncio.create_subprocess_exec(
        *("sh", "-c", f'exec "$@" {shell}', "sh", python, "-m", "outrider_client.cli", *words),
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **more},
    )  # fmt: skip
    out, err = await asyncio.wait_for(process.communicate(), HUNG_SECONDS)
    return process.returncode or 0, out.decode(errors="replace"), err.decode(errors="replace")


FULL = "error: the output cannot be written: No space left on device\n"
GENERATE = ("generate", "hi", "--max-tokens", "1")


@pytest.mark.parametrize(
    ("words", "shell", "status", "err"),
    [
        (("health",), ">&-", 0, ""),
        (("health",), "<&- >&- 2>&-", 0, ""),
        (("generate",), "<&-", 2, "outrider generate: error: the prompt is empty\n"),
        (("chat",), "<&-", 0, ""),
        (("health",), ">/dev/full 2>/dev/full", 1, ""),
        (GENERATE, "2>/dev/full", 0, ""),
        (GENERATE, ">/dev/full", 1, FULL),
        (("info",), ">/dev/full", 1, FULL),
        (("--help",), ">/dev/full", 1, FULL),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
async def test_streams_that_are_closed_or_full(
    running: Any, python: str, words: tuple[str, ...], shell: str, status: int, err: str
) -> None:
    # Which descriptors are free, and what messages go to, is a matter of how an interpreter starts.
    real = sys.executable if "&-" in shell or "2>" in shell else python
    took, _, said = await ended(*words, shell=shell, python=real, OUTRIDER_CLIENT_TARGET=running.address)
    assert took == status and said.startswith(err) and "Traceback" not in said, said
    assert err or "error" not in said


NO_UTF8 = b"caf\xe9"


@pytest.mark.parametrize("words", [(NO_UTF8,), ("hi", "--system", NO_UTF8), ("hi", "--stop", NO_UTF8)], ids=str)
async def test_texts_that_are_no_utf8(running: Any, python: str, words: tuple[str | bytes, ...]) -> None:
    took, out, said = await ended("generate", *words, python=python, OUTRIDER_CLIENT_TARGET=running.address)
    assert (took, out, said) == (1, "", "error: this text is no UTF-8: caf\ufffd\n")
    assert running.target.requests == []


@pytest.mark.parametrize(
    ("words", "status", "err"),
    [
        (("generate", "hi", "--tenant", NO_UTF8), 2, "outrider generate: error: tenant: must be printable ASCII"),
        (("generate", "hi", "--tenant", "Zoë"), 2, "outrider generate: error: tenant: must be printable ASCII"),
        (("generate", "hi", "--token", "Zoë"), 2, "outrider generate: error: no such flag or argument: --token Zoë"),
        (("bench", "--prompts", NO_UTF8), 2, "outrider bench: error: caf\ufffd: No such file or directory"),
        (("head", "path", NO_UTF8), 1, "error: no head called caf\ufffd comes with Outrider"),
    ],
    ids=str,
)
def test_arguments_that_are_no_utf8(words: tuple[str | bytes, ...], status: int, err: str, capfd: Any) -> None:
    try:
        took = main([os.fsdecode(word) for word in words])
    except SystemExit as leaving:
        took = leaving.code  # type: ignore[assignment]
    out, said = capfd.readouterr()
    assert (took, out) == (status, "") and said.splitlines()[0].startswith(err), said


@pytest.mark.parametrize(
    "words", [("generate", "--" + HOSTILE.replace(" ", "")), ("bench", "--prompts", HOSTILE)], ids=["flag", "file"]
)
def test_errors_of_arguments_show_controls(words: tuple[str, ...], capfd: Any) -> None:
    with pytest.raises(SystemExit):
        main(list(words))
    said = capfd.readouterr().err
    assert "owned" in said and all(character.isprintable() or character == "\n" for character in said)


def test_a_token_that_is_no_ascii_is_not_quoted(monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.setenv("OUTRIDER_CLIENT_TOKEN", "geheimß")
    with pytest.raises(SystemExit):
        main(["health", "--target", "127.0.0.1:1"])
    assert capfd.readouterr().err.startswith("outrider health: error: token: must be printable ASCII\n")


@pytest.mark.parametrize(("encoding", "shown"), [("latin-1", "é?"), ("ascii:strict", "??")])
async def test_characters_that_an_encoding_lacks(running: Any, encoding: str, shown: str) -> None:
    running.target.words = ("é🙂", *running.target.words[1:])
    environment = {"OUTRIDER_CLIENT_TARGET": running.address, "PYTHONIOENCODING": encoding}
    # Encodings are chosen as an interpreter starts.
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "outrider_client.cli", *GENERATE), env={**os.environ, **environment},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, _ = await asyncio.wait_for(process.communicate(), HUNG_SECONDS)
    assert (process.returncode, out.decode(encoding.partition(":")[0])) == (0, shown + "\n")


def test_services_start_with_closed_streams() -> None:
    for module in ("target_service", "outrider_gateway"):
        command = f'exec "{sys.executable}" -P -m {module} --help <&- >&- 2>&-'
        assert subprocess.run(["sh", "-c", command], timeout=HUNG_SECONDS, check=False).returncode == 0


def test_tables_and_styles_show_controls_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    console = output_console(force_terminal=True, width=200, record=True)
    with console.capture() as captured:
        console.print(Text(HOSTILE, "bold"), f"[red]{HOSTILE}")
    assert not {"\x07", "\x9b", "\x9d", "\u202e"} & set(captured.get())
    assert "\\x1b]52;c" in captured.get()
