"""Writes the tables of `docs/observability.md` from the telemetry table: `python -m outrider.telemetry.docs FILE`."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from outrider.telemetry.names import ATTRIBUTES, SPANS
from outrider.telemetry.table import DRAFT, GATEWAY, RPC, TARGET, MetricSpec

_MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _code(*names: str) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _exposed(spec: MetricSpec, name: str) -> str:
    return _code(f"{name}_total" if spec.type == "counter" else name)


def _metrics(specs: Iterable[MetricSpec]) -> str:
    rows = ((_exposed(s, s.name), s.type, s.unit, _code(*s.labels), s.help) for s in specs)
    return _table(("metric", "type", "unit", "labels", "meaning"), rows)


_TABLES: Mapping[str, str] = {
    "spans": _table(
        ("span", "kind", "service", "what it covers", "attributes"),
        ((_code(s.name), s.kind, s.service, s.help, _code(*s.attributes) or "none") for s in SPANS),
    ),
    "attributes": _table(
        ("attribute", "type", "unit", "meaning"), ((_code(a.name), a.type, a.unit, a.help) for a in ATTRIBUTES.values())
    ),
    "target": _metrics(TARGET),
    "draft": _metrics(DRAFT),
    "rpc": _metrics(RPC),
    "gateway": _metrics(GATEWAY),
    "vllm": _table(("vLLM", "Outrider"), ((_exposed(s, s.vllm), _exposed(s, s.name)) for s in TARGET if s.vllm)),
}


def render(page: str) -> str:
    """The page with every marked table replaced. Raises `KeyError` for a mark with an unknown table."""
    return _MARKED.sub(lambda mark: mark[1] + _TABLES[mark[2]] + mark[3], page)


def main(arguments: Sequence[str]) -> int:
    for name in arguments:
        path = Path(name)
        path.write_text(render(path.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
