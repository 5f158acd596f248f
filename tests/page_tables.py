"""Writes the tables of pages that are made of the code: `python tests/page_tables.py PAGE..`. They stand between
`<!-- KIND: NAME -->` and `<!-- end -->`."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from outrider.telemetry.names import ATTRIBUTES, SPANS
from outrider.telemetry.table import DRAFT, GATEWAY, RPC, TARGET, MetricSpec
from outrider_gateway.request_fields import TABLES, RequestField, Use

_HEADS = {Use.TAKEN: "what it does", Use.IGNORED: "why it has no effect", Use.REFUSED: "why it is refused"}


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "".join("| " + " | ".join(line) + " |\n" for line in (head, ["---"] * len(head), *rows))


def _code(*names: str) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _exposed(spec: MetricSpec, name: str) -> str:
    return _code(f"{name}_total" if spec.type == "counter" else name)


def _metrics(specs: Iterable[MetricSpec]) -> str:
    rows = ((_exposed(s, s.name), s.type, s.unit, _code(*s.labels), s.help) for s in specs)
    return _table(("metric", "type", "unit", "labels", "meaning"), rows)


def _fields(use: Use) -> str:
    rows = []
    for where, fields in TABLES.items():
        # Fields of one note stand together.
        notes: dict[str, list[str]] = {}
        for field in fields:
            if field.use is use:
                notes.setdefault(field.note, []).append(_shown(field))
        rows += [(", ".join(names), where, note) for note, names in notes.items()]
    return _table(("field", "of", _HEADS[use]), rows)


def _shown(field: RequestField) -> str:
    values = ", ".join(f"`{json.dumps(value)}`" for value in field.harmless)
    return f"`{field.name}`" + (f" (but {values})" if values else "")


_MADE: Mapping[tuple[str, str], str] = {
    ("table", "spans"): _table(
        ("span", "kind", "service", "what it covers", "attributes"),
        ((_code(s.name), s.kind, s.service, s.help, _code(*s.attributes) or "none") for s in SPANS),
    ),
    ("table", "attributes"): _table(
        ("attribute", "type", "unit", "meaning"), ((_code(a.name), a.type, a.unit, a.help) for a in ATTRIBUTES.values())
    ),
    ("table", "target"): _metrics(TARGET),
    ("table", "draft"): _metrics(DRAFT),
    ("table", "rpc"): _metrics(RPC),
    ("table", "gateway"): _metrics(GATEWAY),
    ("table", "vllm"): _table(
        ("vLLM", "Outrider"), ((_exposed(s, s.vllm), _exposed(s, s.name)) for s in TARGET if s.vllm)
    ),
    **{("fields", use.value): _fields(use) for use in Use},
}


def rendered(page: str) -> str:
    """The page with every marked table made again. Raises `KeyError` for a mark of an unknown one."""
    marked = re.compile(r"(<!-- (table|fields): (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
    return marked.sub(lambda mark: mark[1] + _MADE[mark[2], mark[3]] + mark[4], page)


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        path.write_text(rendered(path.read_text()))
