"""What the gateway counts."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

from outrider.telemetry.registry import MetricSet
from outrider.telemetry.table import GATEWAY


class GatewayMetrics:
    """The series of one gateway, and their page."""

    def __init__(self) -> None:
        self._set = MetricSet(GATEWAY)
        # Takes what gives the values of gauges at every scrape.
        self.gauges = self._set.gauges
        self.figures = self._set.figures
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._registry.register(self._set)
        self.first_token = self._set.histogram("outrider_gateway_time_to_first_token_seconds")
        self.tokens = self._set.counter("outrider_gateway_tokens")
        self.retries = self._set.counter("outrider_gateway_retries")

    def ended(self, endpoint: str, status: int, seconds: float) -> None:
        self._set.counter("outrider_gateway_requests", endpoint, str(status)).add()
        self._set.histogram("outrider_gateway_request_seconds", endpoint).observe(seconds)

    async def page(self) -> bytes:
        """The text of /metrics."""
        return generate_latest(self._registry)
