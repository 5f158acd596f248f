"""Waiting, visibly: a spinner with a clock or a bar in a terminal, lines elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, TextColumn, TimeElapsedColumn

from outrider.errors import DeadlineExceeded, Loading
from outrider_client.client import Client
from outrider_client.results import TargetInfo

# Between questions to a target that loads its model: the interval that it suggests.
_POLL_SECONDS = 1.0


@contextlib.contextmanager
def waiting(console: Console, what: str) -> Iterator[None]:
    """Show `what` while the block runs."""
    if not console.is_terminal:
        console.print(f"{what} ...", markup=False)
        yield
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        progress.add_task(escape(what), total=None)
        yield


class ProgressBar(Progress):
    """Progress while a block runs: a bar in a terminal, lines elsewhere."""

    def __init__(self, console: Console, total: float, *columns: ProgressColumn) -> None:
        """`columns` are shown after the bar."""
        shown = (TextColumn("{task.description}"), BarColumn(), *columns)
        super().__init__(*shown, console=console, transient=True, disable=not console.is_terminal)
        self._shown = self.add_task("starting", total=total)

    def show(self, what: str, *, completed: float | None = None) -> None:
        self.update(self._shown, description=what, completed=completed)

    def line(self, text: str) -> None:
        """Print a line if there is no bar."""
        if self.disable:
            self.console.print(text, markup=False)


async def until_loaded(client: Client, console: Console, timeout: float | None = None) -> TargetInfo:
    """What the target serves, once it has loaded its model. `console` shows the wait, if any. `timeout` is in seconds;
    None has no limit. Raises `Loading` if the target still loads after it, and what `Client.info` raises."""
    loop = asyncio.get_running_loop()
    end = None if timeout is None else loop.time() + timeout
    try:
        return await client.info(timeout)
    except Loading as error:
        loading = error
    message = "the target is loading its model; Ctrl-C ends the wait"
    with waiting(console, message), contextlib.suppress(TimeoutError, DeadlineExceeded):
        async with asyncio.timeout_at(end):
            while True:
                await asyncio.sleep(_POLL_SECONDS)
                try:
                    # With the time that is left, the call's own pauses before it tries again do not pass the end.
                    return await client.info(None if end is None else max(0.001, end - loop.time()))
                except Loading as error:
                    loading = error
    raise loading
