"""What is being waited for, said to whoever watches: a spinner with a clock, or a line where there is no terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


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
