"""Writes the tables of `docs/observability.md` from the telemetry table: `python -m outrider.telemetry.docs FILE`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from outrider.page_tables import rendered, table, write_pages
from outrider.telemetry.names import ATTRIBUTES, SPANS
from outrider.telemetry.table import DRAFT, GATEWAY, RPC, TARGET, MetricSpec


def _code(*names: str) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _exposed(spec: MetricSpec, name: str) -> str:
    return _code(f"{name}_total" if spec.type == "counter" else name)


def _metrics(specs: Iterable[MetricSpec]) -> str:
    rows = ((_exposed(s, s.name), s.type, s.unit, _code(*s.labels), s.help) for s in specs)
    return table(("metric", "type", "unit", "labels", "meaning"), rows)


_TABLES: Mapping[str, str] = {
    "spans": table(
        ("span", "kind", "service", "what it covers", "attributes"),
        ((_code(s.name), s.kind, s.service, s.help, _code(*s.attributes) or "none") for s in SPANS),
    ),
    "attributes": table(
        ("attribute", "type", "unit", "meaning"), ((_code(a.name), a.type, a.unit, a.help) for a in ATTRIBUTES.values())
    ),
    "target": _metrics(TARGET),
    "draft": _metrics(DRAFT),
    "rpc": _metrics(RPC),
    "gateway": _metrics(GATEWAY),
    "vllm": table(("vLLM", "Outrider"), ((_exposed(s, s.vllm), _exposed(s, s.name)) for s in TARGET if s.vllm)),
}


def render(page: str) -> str:
    """The page with every marked table replaced. Raises `KeyError` for a mark with an unknown table."""
    return rendered(page, "table", _TABLES.__getitem__)


if __name__ == "__main__":
    write_pages(render)
