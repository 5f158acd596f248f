"""`outrider chat`: a conversation in the terminal, drafted tokens in one colour and the model's own in another."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
from dataclasses import dataclass, field

from rich.console import Console
from rich.markup import escape

from outrider.errors import OutriderError
from outrider.runtime import run
from outrider.settings import add_flags
from outrider_client.cli.base import Command, add_config_flag, options
from outrider_client.cli.generate import summary
from outrider_client.client import Client, Message
from outrider_client.local.models import Tokenizer, find_tokenizer
from outrider_client.results import Result
from outrider_client.terminal.options import ClientOptions, GenerateOptions
from outrider_client.terminal.painting import Painter, legend

_HELP = "/plain switches drafts off and on, /reset forgets the conversation, /quit leaves; Ctrl-C ends an answer."


def _add_flags(parser: argparse.ArgumentParser) -> None:
    add_config_flag(parser)
    parser.add_argument("--system", default="", metavar="TEXT", help="system message of the conversation")
    add_flags(parser, ClientOptions)
    add_flags(parser, GenerateOptions)


def _run(arguments: argparse.Namespace) -> int:
    reach = options(ClientOptions, "client", arguments)
    wanted = options(GenerateOptions, "generate", arguments)
    return run(_chat(reach, wanted, arguments.system))


async def _chat(reach: ClientOptions, wanted: GenerateOptions, system: str) -> int:
    console = Console(highlight=False)
    async with Client(reach.connection(reach.target)) as client:
        info = await client.info()
        drafter = info.drafter or "none"
        console.print(f"[bold]{escape(info.model)}[/] on {escape(reach.target)}, drafter {escape(drafter)}")
        console.print(legend())
        console.print(f"[dim]{_HELP}[/]")
        tokenizer = await asyncio.to_thread(find_tokenizer, info.model)
        await Conversation(client, console, wanted, reach.deadline, tokenizer, system).run()
    return 0


@dataclass
class Conversation:
    """One conversation: its messages so far, and whether drafts are on."""

    client: Client
    console: Console
    options: GenerateOptions
    timeout: float | None
    tokenizer: Tokenizer | None
    system: str
    speculating: bool = True
    messages: list[Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.speculating = self.options.speculation
        self._reset()

    async def run(self) -> None:
        """Read lines until the end of input or /quit."""
        while True:
            line = self._read_line()
            if line is None or line in ("/quit", "/exit"):
                return
            if line.startswith("/"):
                self._command(line)
            elif line:
                await self._turn(line)

    def _read_line(self) -> str | None:
        """A line from the user; None at the end of input or after Ctrl-C.

        It blocks the event loop, which has nothing else to do; a thread could not be woken by Ctrl-C.
        """
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            return self.console.input("\n[bold]you>[/] ").strip()
        except (EOFError, KeyboardInterrupt):
            self.console.print()
            return None
        finally:
            signal.signal(signal.SIGINT, before)

    def _reset(self) -> None:
        self.messages = [("system", self.system)] if self.system else []

    def _command(self, line: str) -> None:
        if line == "/plain":
            self.speculating = not self.speculating
            self.console.print(f"[dim]drafts are {'on' if self.speculating else 'off'}[/]")
        elif line == "/reset":
            self._reset()
            self.console.print("[dim]forgotten[/]")
        else:
            self.console.print(f"[dim]{_HELP}[/]")

    async def _turn(self, line: str) -> None:
        self.messages.append(("user", line))
        answer = asyncio.ensure_future(self._answer())
        loop = asyncio.get_running_loop()
        with contextlib.suppress(NotImplementedError):
            loop.add_signal_handler(signal.SIGINT, answer.cancel)
        try:
            result = await answer
        except asyncio.CancelledError:
            self.console.print("\n[dim]ended by you[/]")
            self.messages.pop()
        except OutriderError as error:
            self.console.print(f"[bold red]error:[/] {escape(error.message)} ({error.reason})")
            self.messages.pop()
        else:
            self.messages.append(("assistant", result.text))
            self.console.print(f"\n[dim]{summary(result)}[/]", soft_wrap=True)
        finally:
            with contextlib.suppress(NotImplementedError):
                loop.remove_signal_handler(signal.SIGINT)

    async def _answer(self) -> Result:
        painter = Painter(self.tokenizer)
        async with self.client.generate(
            messages=self.messages,
            sampling=self.options.sampling(),
            speculation=self.options.speculating(self.speculating),
            timeout=self.timeout,
        ) as generation:
            async for chunk in generation:
                self.console.print(painter.paint(chunk), end="", soft_wrap=True)
            return await generation.result()


CHAT = Command(
    "chat",
    "talk to the model, drafted tokens in colour",
    f"A conversation in the terminal. {_HELP}",
    _add_flags,
    _run,
)
