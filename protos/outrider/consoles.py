"""Consoles on the standard streams. On a terminal they show control characters of what they print instead of having the
terminal obey them: much of it comes from a service."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook
from rich.segment import Segment

from outrider.visible import visible


class _Shown:
    """What it is given, with the control characters of its texts as escapes. Rich's own are no part of texts."""

    def __init__(self, inner: ConsoleRenderable) -> None:
        self._inner = inner

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for text, style, control in console.render(self._inner, options):
            yield Segment(text if control else visible(text), style, control)


class _ControlsShown(RenderHook):
    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Shown(one) for one in renderables]


class _Console(Console):
    def on_broken_pipe(self) -> NoReturn:
        """Raise the error on, to be handled as that of other writes is; rich would end the program here."""
        raise


def output_console(**options: Any) -> Console:
    """A console for results. `options` are those of `rich.console.Console`."""
    return _safe(_Console(highlight=False, **options))


def error_console(**options: Any) -> Console:
    """A console for messages; results go to the standard output."""
    return _safe(_Console(stderr=True, highlight=False, **options))


def _safe(console: Console) -> Console:
    if console.is_terminal:
        console.push_render_hook(_ControlsShown())
    return console
