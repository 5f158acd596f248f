"""Progress display: a spinner with a clock or a bar in a terminal, lines elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, TextColumn, TimeElapsedColumn


@contextmanager
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
        """Show what is being done, and how much of the total is done."""
        self.update(self._shown, description=what, completed=completed)

    def line(self, text: str) -> None:
        """Print a line if there is no bar."""
        if self.disable:
            self.console.print(text, markup=False)
