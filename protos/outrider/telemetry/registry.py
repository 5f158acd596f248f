"""Metrics that cost well under a microsecond to write: plain numbers, turned into Prometheus families when scraped.

prometheus_client's own counters take a lock per write, and its histograms walk their buckets. A step writes some twenty
values, so here a writer adds to plain numbers, and `MetricSet.collect` reads them, a few times a minute, in the
scraping thread. One thread at a time may write one series; a scrape may see a step half counted, but never a counter
that falls. prometheus_client does the rest: registry, both text formats, HTTP.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import (
    CONTENT_TYPE_PLAIN_0_0_4,
    CollectorRegistry,
    ProcessCollector,
    generate_latest,
    make_wsgi_app,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString

from outrider.addresses import address_at
from outrider.host_names import HostNames, is_loopback
from outrider.settings import SettingsError
from outrider.telemetry.table import METRICS, MetricSpec

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

Labels = tuple[str, ...]
# What a gauge source yields: metric name, label values, value.
Reading = tuple[str, Labels, float]

# vLLM's names for our labels, and its values for them; its positions start at 0.
_VLLM_LABEL_NAMES: Mapping[str, str] = {"depth": "position", "outcome": "finished_reason"}
_VLLM_REASONS: Mapping[str, str] = {"end_of_sequence": "stop", "stop": "stop", "length": "length", "cancelled": "abort"}
_FAMILIES: Mapping[str, Any] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}


class Counter:
    """A number that grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0

    def add(self, amount: float = 1) -> None:
        self.value += amount


class Histogram:
    """Counts by bucket, their sum, and the last traced observation of each bucket as its exemplar."""

    __slots__ = ("bounds", "counts", "exemplars", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0
        self.exemplars: dict[int, Exemplar] = {}

    def observe(self, value: float, trace_id: str = "") -> None:
        place = bisect_left(self.bounds, value)
        self.counts[place] += 1
        self.sum += value
        if trace_id:
            self.exemplars[place] = Exemplar({"trace_id": trace_id}, value, time.time())


@dataclass(frozen=True, slots=True)
class Figures:
    """The values of a `MetricSet` at one moment, without exemplars."""

    counters: list[tuple[str, Labels, float]]
    histograms: list[tuple[str, Labels, list[int], float]]  # with the count of each bucket, and the sum
    gauges: list[Reading]


class MetricSet(Collector):
    """The series of one process, made from rows of the metric table. Names that are not in it raise `KeyError`."""

    def __init__(self, specs: Iterable[MetricSpec]) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self._counters: dict[str, dict[Labels, Counter]] = {}
        self._histograms: dict[str, dict[Labels, Histogram]] = {}
        self._sources: list[Callable[[], Iterable[Reading]]] = []
        for spec in self._specs.values():
            # A series that exists from the start has a rate from its first increase on.
            if not spec.labels and spec.type != "gauge":
                (self.counter if spec.type == "counter" else self.histogram)(spec.name)

    def counter(self, name: str, *labels: str) -> Counter:
        """The counter of these label values, made on first use. Keep it: the look-up costs more than `add`."""
        self._check(name, "counter", labels)
        series = self._counters.setdefault(name, {})
        return series.get(labels) or series.setdefault(labels, Counter())

    def histogram(self, name: str, *labels: str) -> Histogram:
        """The histogram of these label values, made on first use. Keep it."""
        spec = self._check(name, "histogram", labels)
        series = self._histograms.setdefault(name, {})
        return series.get(labels) or series.setdefault(labels, Histogram(spec.buckets))

    def gauges(self, source: Callable[[], Iterable[Reading]]) -> None:
        """Call `source` for the values of gauges at every scrape, in the scraping thread."""
        self._sources.append(source)

    def figures(self) -> Figures:
        """All values as they are now, for another process."""
        return Figures(
            [(name, labels, one.value) for name, series in self._counters.items() for labels, one in series.items()],
            [
                (name, labels, list(one.counts), one.sum)
                for name, series in self._histograms.items()
                for labels, one in series.items()
            ],
            [reading for source in self._sources for reading in source()],
        )

    def add_counted(self, figures: Figures) -> None:
        """Add counters and histograms of another set of the same metrics to these."""
        for name, labels, value in figures.counters:
            self.counter(name, *labels).add(value)
        for name, labels, counts, total in figures.histograms:
            histogram = self.histogram(name, *labels)
            histogram.counts = [own + other for own, other in zip(histogram.counts, counts, strict=True)]
            histogram.sum += total

    def _check(self, name: str, kind: str, labels: Labels) -> MetricSpec:
        spec = self._specs[name]
        if spec.type != kind or len(labels) != len(spec.labels):
            raise ValueError(f"{name} is a {spec.type} with labels {spec.labels}, used as a {kind} with {labels}")
        return spec

    def describe(self) -> Iterable[Metric]:
        """Return nothing: registration must not scrape an engine that has not started."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Every family with its current values."""
        readings: dict[str, dict[Labels, float]] = {}
        for source in self._sources:
            for name, labels, value in source():
                self._check(name, "gauge", labels)
                readings.setdefault(name, {})[labels] = value
        for spec in self._specs.values():
            family = _FAMILIES[spec.type](spec.name, spec.help, labels=spec.labels)
            for labels, value in readings.get(spec.name, {}).items():
                family.add_metric(labels, value)
            for labels, counter in list(self._counters.get(spec.name, {}).items()):
                family.add_metric(labels, counter.value)
            for labels, histogram in list(self._histograms.get(spec.name, {}).items()):
                family.add_metric(labels, _buckets(histogram), histogram.sum)
            yield family


class VllmNames(Collector):
    """The metrics that have a counterpart in vLLM, under its names and labels, for its dashboards."""

    def __init__(self, metrics: MetricSet, model: str) -> None:
        self._metrics = metrics
        self._labels = {"model_name": model, "engine": "0"}

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        for family in self._metrics.collect():
            name = METRICS[family.name].vllm
            if name:
                yield self._renamed(family, name)

    def _renamed(self, family: Metric, name: str) -> Metric:
        """The same samples under other names; those with equal labels, such as all errors, are added up."""
        renamed = Metric(name, family.documentation, family.type)
        sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        for sample in family.samples:
            labels = {_VLLM_LABEL_NAMES.get(key, key): _vllm_value(key, value) for key, value in sample.labels.items()}
            place = (name + sample.name.removeprefix(family.name), tuple({**labels, **self._labels}.items()))
            sums[place] = sums.get(place, 0.0) + sample.value
        for (sample_name, pairs), value in sums.items():
            renamed.add_sample(sample_name, dict(pairs), value)
        return renamed


def _vllm_value(label: str, value: str) -> str:
    if label == "depth":
        return str(int(value) - 1)
    return _VLLM_REASONS.get(value, "error") if label == "outcome" else value


def _buckets(histogram: Histogram) -> list[tuple[str, float] | tuple[str, float, Exemplar]]:
    """Cumulative buckets with their exemplars, as in the exposition format."""
    buckets: list[tuple[str, float] | tuple[str, float, Exemplar]] = []
    total = 0
    for place, (bound, count) in enumerate(zip((*histogram.bounds, float("inf")), list(histogram.counts), strict=True)):
        total += count
        exemplar = histogram.exemplars.get(place)
        le: str = floatToGoString(bound)  # type: ignore[no-untyped-call]
        buckets.append((le, total) if exemplar is None else (le, total, exemplar))
    return buckets


# For a request to arrive; later connections are closed. Scrapers send little.
_REQUEST_SECONDS = 5.0


class _QuietHandler(WSGIRequestHandler):
    timeout = _REQUEST_SECONDS

    def handle(self) -> None:
        """Handle one request; one that does not arrive in time is dropped."""
        hang_up = threading.Timer(_REQUEST_SECONDS, self._hang_up)
        hang_up.daemon = True
        hang_up.start()
        try:
            super().handle()
        except OSError:
            # A timeout, or a caller that disconnected.
            self.close_connection = True
        finally:
            hang_up.cancel()

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, format: str, *args: object) -> None:
        """Do not log scrapes."""


class MetricsServer:
    """`/metrics` over HTTP, in its own threads. OpenMetrics, with exemplars, for scrapers that accept it.

    `/metrics/vllm` has vLLM's names, in the plain text format only: prometheus_client replaces colons in names by
    underscores in OpenMetrics.

    A loopback port accepts only addresses and this machine's names as `Host`, so that no web page can read it
    (`outrider.host_names`). Other ports accept any name, since a scraper may use any name of the machine.
    """

    def __init__(self, address: str) -> None:
        """Serve on HOST:PORT; port 0 takes a free one. Raises `SettingsError` if the port cannot be bound."""
        host, _, port = address.rpartition(":")
        host = host.strip("[]") or "127.0.0.1"
        self._names = HostNames.of_listener(host) if is_loopback(host) else None
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self._registry, self._vllm = registry, CollectorRegistry()
        self._registry_app = make_wsgi_app(registry)
        server_class = _Ipv6Server if ":" in host else _BoundedServer
        try:
            self._server = make_server(host, int(port), self._answer, server_class, handler_class=_QuietHandler)
        except (OSError, ValueError, OverflowError) as error:
            raise SettingsError(f"cannot serve metrics on {address}: {error}") from None
        self.address = address_at(host, self._server.server_port)
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def add(self, collectors: Iterable[Collector], vllm: Collector | None = None) -> None:
        """Export these from now on, beside those of the process: a service has them only once its model is loaded."""
        for collector in collectors:
            self._registry.register(collector)
        if vllm is not None:
            self._vllm.register(vllm)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _answer(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        # HTTP/1.0 scrapers may omit it; browsers always send it.
        host = environ.get("HTTP_HOST")
        if host and self._names is not None and not self._names.answers(host):
            start_response("403 Forbidden", [("Content-Type", "text/plain")])
            return [b"a metrics port of loopback answers to addresses and its machine's own names alone\n"]
        path = environ["PATH_INFO"]
        if path == "/metrics":
            page: Iterable[bytes] = self._registry_app(environ, start_response)
            return page
        if path == "/metrics/vllm":
            start_response("200 OK", [("Content-Type", CONTENT_TYPE_PLAIN_0_0_4)])
            return [generate_latest(self._vllm)]
        start_response("404 Not Found", [("Content-Type", "text/plain")])
        return [b"metrics are at /metrics and /metrics/vllm\n"]


class _BoundedServer(ThreadingWSGIServer):
    """Closes connections past a limit; `ThreadingWSGIServer` would start a thread for each."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        # Of requests at once; further connections are closed.
        self._places = threading.BoundedSemaphore(16)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()


class _Ipv6Server(_BoundedServer):
    address_family = socket.AF_INET6
