"""Tables of the pages that are made of the code. They stand between `<!-- KIND: NAME -->` and `<!-- end -->`."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "".join("| " + " | ".join(line) + " |\n" for line in (head, ["---"] * len(head), *rows))


def rendered(page: str, kind: str, table_of: Callable[[str], str]) -> str:
    """The page with every table of a kind replaced. Raises what `table_of` does for a name that it does not know."""
    marked = re.compile(rf"(<!-- {kind}: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
    return marked.sub(lambda mark: mark[1] + table_of(mark[2]) + mark[3], page)


def write_pages(render: Callable[[str], str]) -> None:
    """Render the pages that the command line names."""
    for path in map(Path, sys.argv[1:]):
        path.write_text(render(path.read_text()))
