"""Reads the queries out of the dashboard and the rules, so that tests ask Prometheus what people will."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

STACK = Path(__file__).parent.parent / "target_service" / "stack"
DASHBOARDS = sorted((STACK / "grafana" / "dashboards").glob("*.json"))
METRIC = re.compile(r"\b(outrider_[a-z_]+|process_[a-z_]+)\b")
# A comparison filters; with `bool` it answers 0 or 1, so that an alert that does not fire returns data too.
_COMPARISON = re.compile(r"\s(==|!=|>=|<=|>|<)\s(?!bool\b)")
_UNLESS = re.compile(r"\sunless\s+(?:on\s*\([^)]*\)\s+)?")


def panels() -> Iterator[dict[str, Any]]:
    """Every panel with queries, of every dashboard."""
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            if panel["type"] != "row":
                yield panel


def queries(interval: str = "1m") -> dict[str, str]:
    """Title and letter of every query of every panel, with Grafana's variables filled in."""
    found: dict[str, str] = {}
    for panel in panels():
        for target in panel["targets"]:
            expression = target["expr"].replace("$__rate_interval", interval)
            expression = expression.replace("$target", ".*").replace("$draft", ".*")
            found[f"{panel['title']} {target['refId']}"] = expression
    return found


def rules() -> list[dict[str, Any]]:
    """Every rule, recording and alerting."""
    groups = yaml.safe_load((STACK / "rules.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def alerts() -> dict[str, str]:
    """Every alert's expression, by name."""
    return {rule["alert"]: rule["expr"] for rule in rules() if "alert" in rule}


def answerable(expression: str) -> list[str]:
    """What the expression judges by: every comparison made to answer instead of to filter, and both sides of an
    `unless`, which answers nothing where all is well."""
    return [_COMPARISON.sub(r" \1 bool ", side) for side in _UNLESS.split(expression)]
