"""What promtool says of the configuration, and alerts on made-up data: those that must fire and those that must not."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from dashboard import METRIC, STACK, alerts, answerable, rules
from waits import HUNG_SECONDS

from outrider.telemetry.table import METRICS

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (Debian: apt-get install prometheus)"
)

UP = "0+{}x60"
# Alert -> series (over 60 minutes, one sample a minute) that must make it fire at some time, and that must not.
CASES: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "TargetDown": ({'up{job="outrider-target"}': "0x60"}, {'up{job="outrider-target"}': "1x60"}),
    "TargetNotReady": (
        {'up{job="outrider-target"}': "1x60"},
        {'up{job="outrider-target"}': "1x60", "outrider_engine_up": "_x15 1x45"},
    ),
    "EngineFailed": ({"outrider_engine_up": "0x60"}, {"outrider_engine_up": "1x60"}),
    "EngineStuck": (
        {"outrider_engine_heartbeat_age_seconds": "0+60x60"},
        {"outrider_engine_heartbeat_age_seconds": "0.2x60"},
    ),
    "DraftDown": ({"outrider_draft_connected": "0x60"}, {"outrider_draft_connected": "1x60"}),
    "FallbackHigh": (
        {"outrider_fallback_steps_total": UP.format(30), "outrider_sequence_steps_total": UP.format(100)},
        {"outrider_fallback_steps_total": UP.format(10), "outrider_sequence_steps_total": UP.format(100)},
    ),
    "AcceptanceDropped": (
        {
            "outrider_spec_decode_num_accepted_tokens_total": "0+50x30 1500+1x30",
            "outrider_spec_decode_num_draft_tokens_total": UP.format(100),
        },
        {
            "outrider_spec_decode_num_accepted_tokens_total": "0+50x30 1500+40x30",
            "outrider_spec_decode_num_draft_tokens_total": UP.format(100),
        },
    ),
    "AcceptanceTooGood": (
        {
            "outrider_spec_decode_num_accepted_tokens_total": UP.format(1000),
            "outrider_spec_decode_num_draft_tokens_total": UP.format(1000),
        },
        # Every draft accepted, but too few to mean anything.
        {
            "outrider_spec_decode_num_accepted_tokens_total": UP.format(10),
            "outrider_spec_decode_num_draft_tokens_total": UP.format(10),
        },
    ),
    "FirstTokenSlow": (
        {
            'outrider_time_to_first_token_seconds_bucket{le="2.5"}': UP.format(90),
            "outrider_time_to_first_token_seconds_count": UP.format(100),
        },
        {
            'outrider_time_to_first_token_seconds_bucket{le="2.5"}': UP.format(99),
            "outrider_time_to_first_token_seconds_count": UP.format(100),
        },
    ),
    "OutputTokensSlow": (
        {
            'outrider_time_per_output_token_seconds_bucket{le="0.1"}': UP.format(90),
            "outrider_time_per_output_token_seconds_count": UP.format(100),
        },
        {
            'outrider_time_per_output_token_seconds_bucket{le="0.1"}': UP.format(99),
            "outrider_time_per_output_token_seconds_count": UP.format(100),
        },
    ),
    "QueueGrowing": ({"outrider_requests_waiting": "20x60"}, {"outrider_requests_waiting": "20 0 20x58"}),
    "KvCacheFull": ({"outrider_kv_usage_ratio": "0.99x60"}, {"outrider_kv_usage_ratio": "0.8x60"}),
    "CallsFailing": (
        {
            'outrider_rpc_calls_total{code="OK"}': UP.format(90),
            'outrider_rpc_calls_total{code="INTERNAL"}': UP.format(10),
        },
        {
            'outrider_rpc_calls_total{code="OK"}': UP.format(10),
            'outrider_rpc_calls_total{code="INVALID_ARGUMENT"}': UP.format(90),
        },
    ),
}
# When an alert is looked at: late enough for every `for`, and where a queue of once 20 has been empty in between.
LOOK_AT = {"QueueGrowing": ("30m", "3m"), "AcceptanceDropped": ("55m", "55m")}


def promtool(*arguments: str) -> None:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=HUNG_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr


def with_instance(series: str) -> str:
    return f'{series[:-1]},instance="t"}}' if series.endswith("}") else f'{series}{{instance="t"}}'


@needs_promtool
def test_the_configuration_is_valid() -> None:
    promtool("check", "config", str(STACK / "prometheus.yml"))


@needs_promtool
def test_the_rules_are_valid() -> None:
    promtool("check", "rules", str(STACK / "rules.yml"))


@needs_promtool
@pytest.mark.parametrize("fires", [True, False], ids=["fires", "keeps quiet"])
@pytest.mark.parametrize("alert", CASES)
def test_alerts_on_made_up_data(alert: str, fires: bool, tmp_path: Path) -> None:
    series = CASES[alert][0 if fires else 1]
    look_at = LOOK_AT.get(alert, ("30m", "30m"))[0 if fires else 1]
    expected: list[dict[str, Any]] = []
    case = {
        "interval": "1m",
        "input_series": [{"series": with_instance(name), "values": values} for name, values in series.items()],
        # Counted by name alone: a second sample, of ALERTS itself, would need every label spelled out.
        "promql_expr_test": [
            {
                "expr": f'count(ALERTS{{alertname="{alert}", alertstate="firing"}})',
                "eval_time": look_at,
                "exp_samples": [{"labels": "{}", "value": 1}] if fires else expected,
            }
        ],
    }
    path = tmp_path / "case.yml"
    path.write_text(json.dumps({"rule_files": [str(STACK / "rules.yml")], "tests": [case]}))
    promtool("test", "rules", str(path))


def test_every_alert_is_tried() -> None:
    assert set(CASES) == set(alerts())


def test_rules_use_metrics_that_exist() -> None:
    exposed = {f"{spec.name}_total" if spec.type == "counter" else spec.name for spec in METRICS.values()}
    for rule in rules():
        for name in METRIC.findall(rule["expr"]):
            assert re.sub(r"_(bucket|count|sum)$", "", name) in exposed, name


@pytest.mark.parametrize(
    ("metric", "bound"),
    [("outrider_time_to_first_token_seconds", 2.5), ("outrider_time_per_output_token_seconds", 0.1)],
)
def test_bounds_that_rules_name_are_buckets(metric: str, bound: float) -> None:
    assert f'{metric}_bucket{{le="{bound:g}"}}' in (STACK / "rules.yml").read_text()
    assert bound in METRICS[metric].buckets


def test_a_rule_is_made_answerable_without_changing_what_it_compares() -> None:
    assert answerable("a / b > 0.5") == ["a / b > bool 0.5"]
    assert answerable("(a >= 1) and on (x) (b > 2)") == ["(a >= bool 1) and on (x) (b > bool 2)"]
    assert answerable('up{job="a"} == 0') == ['up{job="a"} == bool 0']
    assert answerable("up == 1 unless on (x) b") == ["up == bool 1", "b"]
    assert answerable("a unless b > 2") == ["a", "b > bool 2"]
