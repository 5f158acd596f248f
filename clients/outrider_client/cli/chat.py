"""`outrider chat`: a conversation in the terminal, drafted tokens in one colour and the model's own in another."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from rich.console import Console
from rich.markup import escape

from outrider.consoles import output_console
from outrider.errors import DeadlineExceeded, OutriderError
from outrider.runtime import signal_handlers
from outrider_client.cli.base import Command, failure_line, options
from outrider_client.cli.generate import summary, warn_of_refusal
from outrider_client.client import Client, Message
from outrider_client.failures import AWAY, ServiceUnreachable
from outrider_client.results import Chunk, Result
from outrider_client.terminal.lines import History, LineReader, history_path
from outrider_client.terminal.options import ClientOptions, GenerateOptions
from outrider_client.terminal.painting import Painter, coloured, legend
from outrider_client.terminal.waiting import until_loaded, waiting
from outrider_client.terminal.wrapping import Part, WordWrap

_COMMANDS = (
    ("/help", "show this list"),
    ("/retry", "ask the last question again; the new answer takes the place of the last one"),
    ("/speculation [on|off]", "show whether drafts are on, or switch them"),
    ("/plain", "switch drafts off, or on again"),
    ("/reset", "forget the conversation"),
    ("/quit", "leave, as Ctrl-D does"),
)
_HELP = "\n".join(f"{command:22} {meaning}" for command, meaning in _COMMANDS) + "\nCtrl-C ends an answer."
# Long enough for a restarted service to load a small model; longer waits are the user's decision.
_WAIT_SECONDS = 30.0


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", default="", metavar="TEXT", help="system message of the conversation")


async def _run(arguments: argparse.Namespace) -> int:
    reach = options(ClientOptions, "client", arguments)
    wanted = options(GenerateOptions, "generate", arguments)
    console = output_console()
    async with Client(reach.connection(reach.target)) as client:
        info = await until_loaded(client, console, reach.deadline)
        drafter = info.drafter or "none"
        console.print(f"[bold]{escape(info.model)}[/] on {escape(reach.target)}, drafter {escape(drafter)}")
        console.print(legend())
        console.print("[dim]/help lists the commands; Ctrl-C ends an answer.[/]")
        path = history_path()
        reader = LineReader(History(path) if path else None)
        await Conversation(client, console, reader, wanted, reach.deadline, arguments.system).read_and_answer()
    return 0


class _Writer:
    """Shows one answer as it arrives: coloured, and on a terminal broken between words."""

    def __init__(self, console: Console) -> None:
        self.begun = False
        self._console = console
        self._painter = Painter()
        self._wrap = WordWrap(lambda: console.width) if console.is_terminal else None

    def write(self, chunk: Chunk) -> None:
        parts = self._painter.parts(chunk)
        self.begun = self.begun or bool(parts)
        self._print(parts if self._wrap is None else self._wrap.feed(parts))

    def end(self) -> None:
        """Show what is still held back."""
        if self._wrap is not None:
            self._print(self._wrap.rest())

    def interrupt(self) -> None:
        """End the line of an incomplete answer, so that other output starts a new one."""
        self.end()
        if self.begun:
            self._console.print()

    def _print(self, parts: Iterable[Part]) -> None:
        self._console.print(coloured(parts), end="", soft_wrap=True)


@dataclass
class Conversation:
    """One conversation: its messages so far, and whether drafts are on."""

    client: Client
    console: Console
    reader: LineReader
    options: GenerateOptions
    timeout: float | None
    system: str
    speculating: bool = True
    messages: list[Message] = field(default_factory=list)
    # The last question, and the messages before it.
    question: str = ""
    before: list[Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.speculating = self.options.speculation
        self._reset()

    async def read_and_answer(self) -> None:
        """Read lines until the end of input or /quit."""
        while True:
            line = self._read_line()
            if line is None or line in ("/quit", "/exit"):
                return
            if line.startswith("/"):
                await self._command(line)
            elif line:
                self.question, self.before = line, self.messages
                await self._turn()

    def _read_line(self) -> str | None:
        """A line from the user; None at the end of input or after Ctrl-C. It blocks the event loop, which is idle then;
        a thread could not be interrupted by Ctrl-C."""
        self.console.print()
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            return self.reader.read("you> ", bold=self.console.color_system is not None)
        except (EOFError, KeyboardInterrupt):
            self.console.print()
            return None
        finally:
            signal.signal(signal.SIGINT, before)

    def _reset(self) -> None:
        self.messages = [("system", self.system)] if self.system else []
        self.question, self.before = "", []

    async def _command(self, line: str) -> None:
        name, _, argument = line.partition(" ")
        match name, argument.strip():
            case "/speculation", state:
                self._speculation(state)
            case "/plain", "":
                self._speculation("off" if self.speculating else "on")
            case "/reset", "":
                self._reset()
                self._note("forgotten")
            case "/retry", "" if self.question:
                await self._turn()
            case "/retry", "":
                self._note("there is no question to ask again")
            case "/help", "":
                self._note(_HELP)
            case _:
                self._note(f"unknown command: {line}\n{_HELP}")

    def _speculation(self, state: str) -> None:
        if state not in ("", "on", "off"):
            self._note(f"/speculation takes on or off, and not {state}")
            return
        if state:
            self.speculating = state == "on"
        self._note(f"drafts are {'on' if self.speculating else 'off'}")

    def _note(self, text: str) -> None:
        self.console.print(text, style="dim", markup=False, soft_wrap=True)

    async def _turn(self) -> None:
        """Ask the last question. Only a whole answer changes the conversation."""
        asked: list[Message] = [*self.before, ("user", self.question)]
        answer = asyncio.ensure_future(self._answer(asked))
        with signal_handlers({signal.SIGINT: answer.cancel}):
            try:
                result = await answer
            except asyncio.CancelledError:
                self.console.print("\n[dim]ended by you[/]")
            except ServiceUnreachable as error:
                self._failed(f"{error}; the conversation is kept, and /retry asks again")
            except OutriderError as error:
                self._failed(failure_line(error))
            else:
                self.messages = [*asked, ("assistant", result.text)]
                self.console.print(f"\n[dim]{summary(result)}[/]", soft_wrap=True)
                warn_of_refusal(result, self.options)

    def _failed(self, message: str) -> None:
        self.console.print(f"[bold red]error:[/] {escape(message)}", soft_wrap=True)

    async def _answer(self, asked: list[Message]) -> Result:
        """The answer, shown as it arrives. A server that is away before the first word is waited for."""
        writer = _Writer(self.console)
        try:
            return await self._stream(asked, writer)
        except AWAY as error:
            # A partly shown answer is not started again.
            hopeless = isinstance(error, ServiceUnreachable) and error.tls_problem is not None
            if writer.begun or hopeless or not await self._comes_back():
                raise
        return await self._stream(asked, _Writer(self.console))

    async def _comes_back(self) -> bool:
        """Wait until the server answers; False where it does not within `_WAIT_SECONDS`."""
        end = time.monotonic() + _WAIT_SECONDS
        with waiting(self.console, f"waiting for {self.client.address}, Ctrl-C ends it"):
            while (left := end - time.monotonic()) > 0:
                await asyncio.sleep(0.25)
                # The channel reconnects by itself; a call before that fails at once.
                with contextlib.suppress(*AWAY, DeadlineExceeded):
                    await self.client.info(left)
                    return True
        return False

    async def _stream(self, asked: list[Message], writer: _Writer) -> Result:
        async with self.client.generate(
            messages=asked,
            sampling=self.options.sampling(),
            speculation=self.options.speculating(self.speculating),
            timeout=self.timeout,
        ) as generation:
            try:
                async for chunk in generation:
                    writer.write(chunk)
                return await generation.result()
            except (OutriderError, ServiceUnreachable):
                writer.interrupt()
                raise
            finally:
                writer.end()


CHAT = Command(
    "chat",
    "chat with the model, drafted tokens in colour",
    f"A conversation in the terminal. Lines are questions, or commands:\n\n{_HELP}",
    _run,
    settings=(ClientOptions, GenerateOptions),
    add_flags=_add_flags,
)
