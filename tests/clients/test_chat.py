"""`outrider chat`: its commands, a server that goes and comes back, lines in a terminal and their history."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import pty
import re
import stat
import sys
import termios
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from waits import HUNG_SECONDS

from outrider_client.cli import chat as command
from outrider_client.client import Client
from outrider_client.terminal.lines import MAX_LINES, History, history_path
from outrider_client.terminal.options import GenerateOptions

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def said(running: Any) -> list[list[str]]:
    """The messages of each request."""
    return [[message.content for message in request.chat.messages] for request, _, _ in running.target.requests]


def speculated(running: Any) -> list[bool]:
    """Of each request, whether it wanted drafts."""
    options = [request.speculation for request, _, _ in running.target.requests]
    return [not option.HasField("enabled") or option.enabled for option in options]


async def chat(outrider: Any, running: Any, *lines: str, flags: tuple[str, ...] = ()) -> str:
    """What a whole conversation over a pipe prints."""
    words = ("chat", "--target", running.address, "--max-tokens", "3", *flags)
    status, out, err = await outrider(*words, stdin="".join(f"{line}\n" for line in lines))
    assert (status, err) == (0, "")
    return str(out)


class TestCommands:
    async def test_retry_replaces_the_last_answer(self, running: Any, outrider: Any) -> None:
        await chat(outrider, running, "first", "second", "/retry", "third")
        answer = "one two three"
        twice = ["first", answer, "second"]
        assert said(running) == [["first"], twice, twice, ["first", answer, "second", answer, "third"]]

    async def test_retry_keeps_the_system_message(self, running: Any, outrider: Any) -> None:
        await chat(outrider, running, "first", "/retry", flags=("--system", "be brief"))
        assert said(running) == [["be brief", "first"]] * 2

    async def test_retry_without_a_question(self, running: Any, outrider: Any) -> None:
        out = await chat(outrider, running, "/retry", "count", "/reset", "/retry")
        assert out.count("there is no question to ask again") == 2
        assert said(running) == [["count"]]

    async def test_speculation(self, running: Any, outrider: Any) -> None:
        lines = ("/speculation", "/speculation off", "a", "/plain", "b", "/plain", "c", "/speculation on", "d")
        out = await chat(outrider, running, *lines, "/speculation maybe", "/speculation")
        assert re.findall(r"drafts are (\w+)", out) == ["on", "off", "on", "off", "on", "on"]
        assert speculated(running) == [False, True, False, True]
        assert "/speculation takes on or off, and not maybe" in out

    async def test_reset_forgets(self, running: Any, outrider: Any) -> None:
        out = await chat(outrider, running, "a", "/reset", "b")
        assert said(running) == [["a"], ["b"]] and "forgotten" in out

    async def test_quit_leaves(self, running: Any, outrider: Any) -> None:
        await chat(outrider, running, "a", "/quit", "b")
        assert said(running) == [["a"]]

    async def test_help(self, running: Any, outrider: Any) -> None:
        out = await chat(outrider, running, "/help")
        for listed in ("/help", "/retry", "/speculation [on|off]", "/plain", "/reset", "/quit"):
            assert f"\n{listed} " in out.replace("you> ", "\n")
        assert "unknown" not in out and running.target.requests == []

    @pytest.mark.parametrize("line", ["/what", "/reset everything"])
    async def test_unknown(self, running: Any, outrider: Any, line: str) -> None:
        out = await chat(outrider, running, "a", line, "b")
        assert f"unknown command: {line}\n" in out and "ask the last question again" in out
        assert said(running) == [["a"], ["a", "one two three", "b"]]

    async def test_a_refused_question_is_no_part_of_the_conversation(self, running: Any, outrider: Any) -> None:
        running.target.refuses = {"a"}
        out = await chat(outrider, running, "a", "b")
        assert out.count("QUOTA_EXCEEDED") == 1
        assert said(running) == [["a"], ["b"]]


class Talk:
    """A conversation with a process: lines go in, and what it prints is waited for."""

    def __init__(self, write: Callable[[bytes], object], read: Callable[[], Any]) -> None:
        self.said = ""
        self._write = write
        self._read = read

    def say(self, text: str) -> None:
        self._write(text.encode())

    async def until(self, text: str) -> str:
        """What was printed since the last time, up to the text."""
        async with asyncio.timeout(HUNG_SECONDS):
            while text not in self.said:
                piece = await self._read()
                assert piece, f"it ended before {text!r}: {self.said!r}"
                self.said += piece.decode(errors="replace")
        before, _, self.said = self.said.partition(text)
        return before + text

    async def rest(self) -> str:
        """What it prints until it ends."""
        async with asyncio.timeout(HUNG_SECONDS):
            while piece := await self._read():
                self.said += piece.decode(errors="replace")
        return self.said


@asynccontextmanager
async def talking(address: str, *flags: str) -> AsyncIterator[Talk]:
    """A conversation over pipes."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "outrider_client.cli", "chat", "--target", address, *flags),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=os.environ | {"COLUMNS": "200"},
    )
    assert process.stdin is not None and process.stdout is not None
    output = process.stdout
    try:
        yield Talk(process.stdin.write, lambda: output.read(4096))
    finally:
        process.stdin.close()
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


class TestServerGoesAway:
    async def test_the_question_waits_for_it(self, start: Any) -> None:
        first = await start()
        async with talking(first.address, "--max-tokens", "3") as talk:
            talk.say("before\n")
            await talk.until("ended by length")
            await first.server.stop(0)
            talk.say("while it is away\n")
            await talk.until(f"waiting for {first.address}, Ctrl-C ends it")
            second = await start(first.address)
            await talk.until("ended by length")
            assert said(second) == [["before", "one two three", "while it is away"]]
            talk.say("after\n")
            await talk.until("ended by length")
            assert len(said(second)[1]) == 5

    async def test_in_the_middle_of_an_answer(self, start: Any) -> None:
        first = await start(step_seconds=0.2)
        async with talking(first.address, "--max-tokens", "300") as talk:
            talk.say("long\n")
            await talk.until("one two three")
            await first.server.stop(0)
            out = await talk.until("you> ")
            assert "\nerror: " in out and "waiting" not in out
            second = await start(first.address)
            talk.say("/retry\n")
            await talk.until("ended by length")
            assert said(second) == [["long"]]

    async def test_one_that_loads_is_waited_for_before_the_first_question(self, running: Any) -> None:
        running.target.loads = 2
        async with talking(running.address, "--max-tokens", "3") as talk:
            await talk.until("the target is loading its model; Ctrl-C ends the wait")
            await talk.until("scripted")
            talk.say("hello\n")
            await talk.until("ended by length")

    async def test_waiting_ends(self, start: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
        monkeypatch.setattr(command, "_WAIT_SECONDS", 0.5)
        first = await start()
        lines = iter(["a", "/retry"])

        class Reader(command.LineReader):
            def read(self, prompt: str, *, bold: bool) -> str:  # noqa: ARG002
                line = next(lines, None)
                if line is None:
                    raise EOFError
                return line

        async with Client.connect(first.address) as client:
            await client.info()
            await first.server.stop(0)
            console = Console(width=200)
            conversation = command.Conversation(client, console, Reader(None), GenerateOptions(), None, None, "")
            await conversation.read_and_answer()
        out = capsys.readouterr().out
        assert out.count(f"error: cannot reach {first.address}: ") == 2
        assert out.count("the conversation is kept, and /retry asks again") == 2
        assert conversation.messages == []

    async def test_ctrl_c_ends_waiting(self, start: Any, tmp_path: Path) -> None:
        first = await start()
        async with in_terminal(first.address, tmp_path) as talk:
            await talk.until("you>")
            await first.server.stop(0)
            talk.say("a\n")
            await talk.until("waiting for")
            talk.say("\x03")
            await talk.until("ended by you")
            await talk.until("you>")
            talk.say("/quit\n")
            await talk.rest()


@asynccontextmanager
async def in_terminal(address: str, state: Path, *flags: str, columns: int = 60) -> AsyncIterator[Talk]:
    """A conversation in a terminal of its own."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(ours, (40, columns))
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    environment = kept | {"TERM": "xterm-256color", "XDG_STATE_HOME": str(state)}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _IN_TERMINAL, "chat", "--target", address, *flags),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
        start_new_session=True,
    )
    os.close(theirs)

    def read() -> bytes:
        try:
            return os.read(ours, 4096)
        except OSError as error:
            # How Linux says that nobody has the other end any more.
            if error.errno != errno.EIO:
                raise
            return b""

    try:
        yield Talk(lambda data: os.write(ours, data), lambda: asyncio.to_thread(read))
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        os.close(ours)


# The terminal becomes the process's own, so that Ctrl-C reaches it.
_IN_TERMINAL = """
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from outrider_client.cli import main
sys.exit(main())
"""


class TestTerminal:
    async def test_earlier_lines_come_back(self, running: Any, tmp_path: Path) -> None:
        up = "\x1b[A"
        async with in_terminal(running.address, tmp_path, "--max-tokens", "3") as talk:
            await talk.until("you>")
            talk.say("count\n")
            await talk.until("ended by")
            await talk.until("you>")
            talk.say(f"{up}\n")
            await talk.until("ended by")
        # Another session, which ends with an edited line.
        async with in_terminal(running.address, tmp_path, "--max-tokens", "3") as talk:
            await talk.until("you>")
            talk.say(f"{up} down\x01up and \n")
            await talk.until("ended by")
            await talk.until("you>")
            talk.say("/quit\n")
            await talk.rest()
        assert [messages[-1] for messages in said(running)] == ["count", "count", "up and count down"]
        file = tmp_path / "outrider" / "chat_history"
        assert file.read_text().splitlines() == ["count", "count", "up and count down", "/quit"]
        assert stat.S_IMODE(file.stat().st_mode) == 0o600

    async def test_colours_of_the_prompt_take_no_room(self, running: Any, tmp_path: Path) -> None:
        async with in_terminal(running.address, tmp_path, columns=24) as talk:
            assert "\x1b[1m" in await talk.until("you>")
            # With the prompt's five they fit on the line, so that its start is not sought on the line above.
            talk.say("x" * 17)
            await talk.until("x" * 17)
            talk.say("\x01y")
            assert "\x1b[A" not in await talk.until("y")

    async def test_words_are_not_broken(self, running: Any, tmp_path: Path) -> None:
        async with in_terminal(running.address, tmp_path, "--max-tokens", "40", columns=24) as talk:
            await talk.until("you>")
            talk.say("count\n")
            await talk.until("count")
            out = _ESCAPES.sub("", (await talk.until("40 tokens"))).replace("\r", "")
        lines = out.strip("\n").split("\n")[:-1]
        answer = "one two three four five six seven eight" * 5
        assert len(lines) > 5 and all(len(line) <= 24 for line in lines)
        assert "".join(lines) == answer
        assert {word for line in lines for word in line.split()} == set(answer.split())


class TestHistory:
    def test_is_bounded_and_private(self, tmp_path: Path) -> None:
        path = tmp_path / "new" / "history"
        path.parent.mkdir()
        path.write_text("".join(f"{number}\n" for number in range(MAX_LINES + 50)))
        path.chmod(0o644)
        history = History(path)
        assert len(history.lines()) == MAX_LINES
        history.add("a pasted\nline")
        lines = path.read_text().splitlines()
        assert (len(lines), lines[0], lines[-1]) == (MAX_LINES, "51", "a pasted line")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert os.listdir(path.parent) == ["history"]

    def test_two_sessions(self, tmp_path: Path) -> None:
        first, second = History(tmp_path / "history"), History(tmp_path / "history")
        first.add("a")
        second.add("b")
        first.add("c")
        assert second.lines() == ["a", "b", "c"]

    def test_what_cannot_be_written_is_no_error(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        history = History(tmp_path / "file" / "history")
        history.add("a")
        assert history.lines() == []
        folder = tmp_path / "history"
        folder.mkdir()
        History(folder).add("a")
        assert History(folder).lines() == []
        assert sorted(os.listdir(tmp_path)) == ["file", "history"]

    def test_damaged_file(self, tmp_path: Path) -> None:
        (tmp_path / "history").write_bytes(b"a\xff\0b\n")
        assert History(tmp_path / "history").lines() == ["a\ufffdb"]

    def test_where_it_is(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        for state in ("", "relative"):
            monkeypatch.setenv("XDG_STATE_HOME", state)
            assert history_path() == tmp_path / ".local/state/outrider/chat_history"
        monkeypatch.setenv("XDG_STATE_HOME", "/state")
        assert history_path() == Path("/state/outrider/chat_history")
