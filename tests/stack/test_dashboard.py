"""The dashboard as Grafana will read it: well formed, on the provisioned data source, asking for metrics that exist."""

from __future__ import annotations

import json
import re
from itertools import combinations
from typing import Any

import pytest
import yaml
from dashboard import DASHBOARDS, METRIC, STACK, panels, queries

from outrider.telemetry.table import METRICS

PROVISIONING = STACK / "grafana" / "provisioning"
PANELS = {panel["title"]: panel for panel in panels()}
# What the issue of observability is about; each of these must be on a panel.
WANTED = (
    "spec_decode_num_accepted_tokens_total",
    "num_accepted_tokens_per_depth",
    "fallback_steps",
    "speculation_active",
    "draft_connected",
    "kv_usage_ratio",
    "requests_running",
    "requests_waiting",
    "time_to_first_token",
    "time_per_output_token",
    "step_phase_seconds",
    "requests_total",
    "rpc_calls",
    "draft_propose_seconds",
    "draft_sequences",
    "draft_nodes",
    "draft_figure",
    "heartbeat",
)


@pytest.fixture(scope="module", params=DASHBOARDS, ids=lambda path: path.stem)
def dashboard(request: pytest.FixtureRequest) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(request.param.read_text())
    return loaded


def overlaps(one: dict[str, int], other: dict[str, int]) -> bool:
    return (
        one["x"] < other["x"] + other["w"]
        and other["x"] < one["x"] + one["w"]
        and one["y"] < other["y"] + other["h"]
        and other["y"] < one["y"] + one["h"]
    )


def test_shape(dashboard: dict[str, Any]) -> None:
    assert dashboard["uid"] == "outrider"
    assert dashboard["schemaVersion"] >= 39
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    places = [panel["gridPos"] for panel in dashboard["panels"]]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    assert not any(overlaps(one, other) for one, other in combinations(places, 2))


@pytest.mark.parametrize("title", PANELS)
def test_panel(title: str) -> None:
    panel = PANELS[title]
    assert panel["type"] in ("stat", "timeseries")
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]
    letters = [target["refId"] for target in panel["targets"]]
    assert len(set(letters)) == len(letters) > 0
    assert all(target["datasource"]["uid"] == "prometheus" for target in panel["targets"])


def test_data_sources_are_provisioned(dashboard: dict[str, Any]) -> None:
    sources = yaml.safe_load((PROVISIONING / "datasources" / "outrider.yml").read_text())["datasources"]
    by_uid = {source["uid"]: source for source in sources}
    assert {panel["datasource"]["uid"] for panel in dashboard["panels"] if "datasource" in panel} <= set(by_uid)
    leads_to = by_uid["prometheus"]["jsonData"]["exemplarTraceIdDestinations"][0]
    assert leads_to == {"name": "trace_id", "datasourceUid": "jaeger"}
    assert leads_to["datasourceUid"] in by_uid


def test_the_dashboard_folder_is_provisioned() -> None:
    (provider,) = yaml.safe_load((PROVISIONING / "dashboards" / "outrider.yml").read_text())["providers"]
    compose = yaml.safe_load((STACK.parent.parent / "compose.yaml").read_text())
    mounts = [volume.split(":")[1] for volume in compose["services"]["grafana"]["volumes"]]
    assert provider["options"]["path"] in mounts


@pytest.mark.parametrize("title", queries())
def test_query_uses_metrics_that_exist(title: str) -> None:
    exposed = {f"{spec.name}_total" if spec.type == "counter" else spec.name: spec for spec in METRICS.values()}
    expression = queries()[title]
    names = [name for name in METRIC.findall(expression) if name.startswith("outrider_")]
    for name in names:
        base = re.sub(r"_(bucket|count|sum)$", "", name)
        assert base in exposed, f"{expression} asks for {name}"
        assert (exposed[base].type == "histogram") == (base != name)
    for labels in re.findall(r"by \(([^)]*)\)", expression):
        known = {label for name in names for label in exposed[re.sub(r"_(bucket|count|sum)$", "", name)].labels}
        assert {label.strip() for label in labels.split(",")} <= {*known, "le", "instance", "job"}


@pytest.mark.parametrize("wanted", WANTED)
def test_what_matters_is_shown(wanted: str) -> None:
    assert any(wanted in expression for expression in queries().values())


def test_latency_panels_ask_for_exemplars() -> None:
    with_exemplars = {title for title, panel in PANELS.items() if any(t.get("exemplar") for t in panel["targets"])}
    assert with_exemplars == {"Time to first token", "Time per output token", "Request duration"}
