"""Writes the tables of `docs/observability.md` from the telemetry table: `python -m outrider.telemetry.docs FILE`."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from outrider.telemetry.names import ATTRIBUTES, SPANS
from outrider.telemetry.table import DRAFT, GATEWAY, RPC, TARGET, MetricSpec

_MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _code(*names: str) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _spans() -> str:
    rows = [(_code(span.name), span.kind, span.service, span.help, _code(*span.attributes) or "none") for span in SPANS]
    return _table(("span", "kind", "service", "what it covers", "attributes"), rows)


def _attributes() -> str:
    rows = [(_code(a.name), a.type, a.unit, a.help) for a in ATTRIBUTES.values()]
    return _table(("attribute", "type", "unit", "meaning"), rows)


def _exposed(spec: MetricSpec) -> str:
    return f"{spec.name}_total" if spec.type == "counter" else spec.name


def _metrics(specs: Iterable[MetricSpec]) -> str:
    rows = [(_code(_exposed(s)), s.type, s.unit, _code(*s.labels), s.help) for s in specs]
    return _table(("metric", "type", "unit", "labels", "meaning"), rows)


def _vllm() -> str:
    rows = [(_code(s.vllm + ("_total" if s.type == "counter" else "")), _code(_exposed(s))) for s in TARGET if s.vllm]
    return _table(("vLLM", "Outrider"), rows)


_TABLES: Mapping[str, Callable[[], str]] = {
    "spans": _spans,
    "attributes": _attributes,
    "target": lambda: _metrics(TARGET),
    "draft": lambda: _metrics(DRAFT),
    "rpc": lambda: _metrics(RPC),
    "gateway": lambda: _metrics(GATEWAY),
    "vllm": _vllm,
}


def render(page: str) -> str:
    """The page with every marked table replaced. Raises `KeyError` for a mark with an unknown table."""
    return _MARKED.sub(lambda mark: mark[1] + _TABLES[mark[2]]() + mark[3], page)


def main(arguments: Sequence[str]) -> int:
    for name in arguments:
        path = Path(name)
        path.write_text(render(path.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
