"""Metric series, what they expose, and the server that exposes them."""

from __future__ import annotations

import math
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as plain
from waits import HUNG_SECONDS

from outrider.host_names import is_loopback
from outrider.settings import SettingsError
from outrider.telemetry.registry import Histogram, MetricSet, MetricsServer, VllmNames
from outrider.telemetry.table import DRAFT, TARGET

FIRST_TOKEN = "outrider_time_to_first_token_seconds"


@pytest.fixture
def metrics() -> MetricSet:
    return MetricSet(TARGET)


@pytest.fixture
def server(metrics: MetricSet) -> Iterator[MetricsServer]:
    running = MetricsServer("127.0.0.1:0")
    running.add([metrics], VllmNames(metrics, "tiny"))
    yield running
    running.close()


def get(server: MetricsServer, path: str = "/metrics", accept: str = "text/plain") -> str:
    request = urllib.request.Request(f"http://{server.address}{path}", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=HUNG_SECONDS) as response:
        return str(response.read().decode())


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in plain(text)
        for sample in family.samples
    }


@pytest.mark.parametrize(
    ("value", "place"),
    [(0.0, 0), (1.0, 0), (1.5, 1), (2.0, 1), (9.0, 2), (math.inf, 2)],
)
def test_a_bucket_takes_what_is_at_most_its_bound(value: float, place: int) -> None:
    histogram = Histogram((1.0, 2.0))
    histogram.observe(value)
    assert histogram.counts == [int(at == place) for at in range(3)]


def test_exposed_values_are_what_was_written(metrics: MetricSet, server: MetricsServer) -> None:
    metrics.counter("outrider_requests", "stop").add()
    metrics.counter("outrider_requests", "stop").add(2)
    metrics.gauges(lambda: [("outrider_kv_pages", ("used",), 7.0)])
    for value in (0.001, 0.05, 0.05, 1000.0):
        metrics.histogram(FIRST_TOKEN).observe(value)
    found = samples(get(server))
    assert found["outrider_requests_total", (("outcome", "stop"),)] == 3
    assert found["outrider_kv_pages", (("state", "used"),)] == 7
    assert found[f"{FIRST_TOKEN}_bucket", (("le", "0.05"),)] == 3
    assert found[f"{FIRST_TOKEN}_bucket", (("le", "+Inf"),)] == 4
    assert found[f"{FIRST_TOKEN}_count", ()] == 4
    assert found[f"{FIRST_TOKEN}_sum", ()] == pytest.approx(1000.101)
    assert any(name == "process_resident_memory_bytes" for name, _ in found)


def test_series_without_labels_are_there_from_the_start(server: MetricsServer) -> None:
    found = samples(get(server))
    assert found["outrider_spec_decode_num_drafts_total", ()] == 0
    assert found[f"{FIRST_TOKEN}_count", ()] == 0


def test_exemplars_are_exposed_to_scrapers_that_know_them(metrics: MetricSet, server: MetricsServer) -> None:
    metrics.histogram(FIRST_TOKEN).observe(0.05, "a" * 32)
    metrics.histogram(FIRST_TOKEN).observe(0.05)
    text = get(server, accept="application/openmetrics-text; version=1.0.0")
    found = [
        sample.exemplar
        for family in openmetrics(text)
        for sample in family.samples
        if sample.name == f"{FIRST_TOKEN}_bucket" and sample.exemplar is not None
    ]
    assert [(exemplar.labels, exemplar.value) for exemplar in found] == [({"trace_id": "a" * 32}, 0.05)]


def test_vllm_names_count_the_same(metrics: MetricSet, server: MetricsServer) -> None:
    metrics.counter("outrider_spec_decode_num_drafts").add(5)
    metrics.counter("outrider_spec_decode_num_accepted_tokens_per_depth", "1").add(4)
    for outcome in ("stop", "end_of_sequence", "cancelled", "QUOTA_EXCEEDED", "ENGINE_DEAD"):
        metrics.counter("outrider_requests", outcome).add()
    metrics.histogram("outrider_step_rows").observe(16)
    found = samples(get(server, "/metrics/vllm"))
    labels = (("engine", "0"), ("model_name", "tiny"))
    assert found["vllm:spec_decode_num_drafts_total", labels] == 5
    assert found["vllm:spec_decode_num_accepted_tokens_per_pos_total", (*labels, ("position", "0"))] == 4
    assert found["vllm:iteration_tokens_total_count", labels] == 1
    reasons = {
        dict(pairs)["finished_reason"]: value
        for (name, pairs), value in found.items()
        if name == "vllm:request_success_total"
    }
    assert reasons == {"stop": 2, "abort": 1, "error": 2}
    assert all(name.startswith("vllm:") for name, _ in found)


def test_every_vllm_name_of_the_table_is_exposed(server: MetricsServer) -> None:
    text = get(server, "/metrics/vllm")
    assert {spec.vllm for spec in TARGET if spec.vllm} <= {family.name for family in plain(text)} | {
        "vllm:iteration_tokens_total"
    }


@pytest.mark.parametrize(
    ("kind", "name", "labels", "error"),
    [
        ("counter", "outrider_unheard_of", (), KeyError),
        ("counter", "outrider_draft_nodes", (), KeyError),
        ("counter", FIRST_TOKEN, (), ValueError),
        ("counter", "outrider_requests", (), ValueError),
        ("histogram", FIRST_TOKEN, ("extra",), ValueError),
    ],
)
def test_what_the_table_does_not_have_is_refused(
    metrics: MetricSet, kind: str, name: str, labels: tuple[str, ...], error: type[Exception]
) -> None:
    with pytest.raises(error):
        getattr(metrics, kind)(name, *labels)


def test_other_paths_are_not_found(server: MetricsServer) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        get(server, "/debug")
    assert refused.value.code == 404
    refused.value.close()


@pytest.mark.parametrize("address", ["127.0.0.1:http", "127.0.0.1:99999", "203.0.113.1:9464", "127.0.0.1"])
def test_an_address_that_cannot_be_is_a_settings_error(address: str) -> None:
    with pytest.raises(SettingsError, match="cannot serve metrics"):
        MetricsServer(address)


def test_a_taken_port_is_a_settings_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(SettingsError):
        MetricsServer(f"127.0.0.1:{taken.getsockname()[1]}")


def test_ipv6() -> None:
    try:
        server = MetricsServer("[::1]:0")
    except SettingsError:
        pytest.skip("this machine has no IPv6 loopback")
    server.add([MetricSet(DRAFT)])
    assert "outrider_draft_nodes_total" in get(server)
    server.close()


def status(server: MetricsServer, host: str, path: str = "/metrics") -> int:
    """What a request that calls the server `host` is answered with."""
    request = urllib.request.Request(f"http://{server.address}{path}", headers={"Host": host})
    try:
        with urllib.request.urlopen(request, timeout=HUNG_SECONDS) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        assert b"outrider_" not in error.read()
        return error.code


def test_a_page_of_another_name_reads_nothing_on_loopback(server: MetricsServer) -> None:
    """Its name may come to mean this machine once it is loaded (DNS rebinding)."""
    for path in ("/metrics", "/metrics/vllm", "/absent"):
        assert status(server, "evil.example:9464", path) == 403
    assert status(server, "127.0.0.1.evil.example") == 403
    for host in ("127.0.0.1:9464", "[::1]:9464", "10.1.2.3", "localhost:9464", f"{socket.gethostname()}:9464"):
        assert status(server, host) == 200


def test_a_scraper_elsewhere_uses_whichever_name(metrics: MetricSet) -> None:
    """As that of a compose service, which the service itself does not know."""
    server = MetricsServer("0.0.0.0:0")
    server.add([metrics])
    try:
        for host in ("target:9464", "target.svc.cluster.local", "10.1.2.3:9464"):
            assert status(server, host) == 200
    finally:
        server.close()


def test_a_listener_without_a_host_is_on_loopback(metrics: MetricSet) -> None:
    server = MetricsServer(":0")
    server.add([metrics])
    try:
        assert status(server, "evil.example") == 403
    finally:
        server.close()


def test_an_ipv4_loopback_written_as_ipv6_is_one(metrics: MetricSet) -> None:
    try:
        server = MetricsServer("[::ffff:127.0.0.1]:0")
    except SettingsError:
        pytest.skip("this machine has no IPv6")
    server.add([metrics])
    try:
        assert status(server, "evil.example") == 403
        assert status(server, "localhost") == 200
    finally:
        server.close()


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        *((host, True) for host in ("127.0.0.1", "127.1.2.3", "::1", "[::1]", "localhost", "a.localhost")),
        *((host, True) for host in ("::ffff:127.0.0.1", "[::ffff:7f00:1]")),
        *((host, False) for host in ("0.0.0.0", "::", "10.1.2.3", "::ffff:10.1.2.3", "::ffff:0:0", "example.org", "")),
    ],
)
def test_what_only_this_machine_reaches(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected
