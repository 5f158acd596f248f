"""The telemetry table against itself, the conventions, the code that uses it, and the documentation."""

from __future__ import annotations

import ast
import re
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes, rpc_attributes
from opentelemetry.semconv.attributes import error_attributes, server_attributes
from page_tables import rendered

from outrider.telemetry.names import ATTRIBUTES, SPANS
from outrider.telemetry.table import DRAFT, FINE_SECONDS, GATEWAY, METRICS, RPC, TARGET, MetricSpec

ROOT = Path(__file__).parent.parent.parent
DOCUMENT = ROOT / "docs" / "observability.md"
RECORDING = (
    *(
        "protos/outrider/telemetry/tracing.py",
        "protos/outrider/telemetry/rpc.py",
        "target_service/telemetry/tracing.py",
    ),
    *(
        "target_service/telemetry/metrics.py",
        "draft_service/telemetry/tracing.py",
        "draft_service/telemetry/metrics.py",
    ),
    *("clients/outrider_client/tracing.py", "clients/outrider_gateway/metrics.py"),
    "clients/outrider_gateway/targets.py",
)
NAME = re.compile(r"(outrider|gen_ai|rpc|error|server)[._][a-z0-9_.]+")
CONVENTIONS = {
    value
    for module in (gen_ai_attributes, rpc_attributes, error_attributes, server_attributes)
    for key, value in vars(module).items()
    if key.isupper() and isinstance(value, str)
}


def literals(path: str) -> set[str]:
    """Every string in a source file that looks like a name of telemetry."""
    tree = ast.parse((ROOT / path).read_text())
    words = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return {word for word in words if NAME.fullmatch(word)}


def test_names_are_unique() -> None:
    assert len({(span.name, span.kind) for span in SPANS}) == len(SPANS)
    assert len(METRICS) == len((*TARGET, *DRAFT, *RPC, *GATEWAY))


def test_spans_carry_what_the_table_has_and_the_table_nothing_else() -> None:
    assert {name for span in SPANS for name in span.attributes} == set(ATTRIBUTES)


@pytest.mark.parametrize("name", [name for name in ATTRIBUTES if not name.startswith("outrider.")])
def test_borrowed_names_are_in_the_conventions(name: str) -> None:
    assert name in CONVENTIONS


@pytest.mark.parametrize("path", RECORDING)
def test_code_uses_no_name_outside_the_table(path: str) -> None:
    known = {*ATTRIBUTES, *METRICS, *(span.name for span in SPANS)}
    assert literals(path) <= known


def test_the_table_has_no_name_that_code_does_not_use() -> None:
    used = {name for path in RECORDING for name in literals(path)}
    assert set(ATTRIBUTES) <= used
    assert set(METRICS) <= used


@pytest.mark.parametrize("spec", METRICS.values(), ids=METRICS.keys())
def test_metrics_are_named_as_prometheus_wants(spec: MetricSpec) -> None:
    assert re.fullmatch(r"outrider_[a-z_]+[a-z]", spec.name)
    assert not spec.name.endswith("_total")
    assert spec.help.endswith(".")
    assert bool(spec.buckets) == (spec.type == "histogram")
    assert all(a < b for a, b in pairwise(spec.buckets))


def test_latency_bounds_resolve_a_tenth_of_a_millisecond_to_a_hundred() -> None:
    inside = [bound for bound in FINE_SECONDS if 0.0001 <= bound <= 0.1]
    assert inside[0] == 0.0001
    assert inside[-1] == 0.1
    assert max(b / a for a, b in pairwise(inside)) <= 1.5 + 1e-9
    for name in ("outrider_time_to_first_token_seconds", "outrider_time_per_output_token_seconds"):
        assert set(FINE_SECONDS) <= set(METRICS[name].buckets)


def test_the_document_is_what_the_code_writes() -> None:
    page = DOCUMENT.read_text()
    assert rendered(page) == page, "run: python tests/page_tables.py docs/observability.md"


def test_the_document_lists_everything() -> None:
    page = DOCUMENT.read_text()
    rules = yaml.safe_load((ROOT / "target_service/stack/rules.yml").read_text())
    alerts = {rule["alert"] for group in rules["groups"] for rule in group["rules"] if "alert" in rule}
    for name in (*ATTRIBUTES, *METRICS, *(span.name for span in SPANS)):
        assert f"`{name}" in page
    assert set(re.findall(r"^\| ([A-Z][A-Za-z]+) \|", page, re.MULTILINE)) - {"Outrider"} == alerts


@pytest.mark.parametrize("name", [*ATTRIBUTES, *METRICS])
def test_no_name_asks_for_what_was_said(name: str) -> None:
    assert not re.search(r"content|message|text$|token_ids|prompt$", name)
