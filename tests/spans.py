"""Records spans in memory, and holds them to the telemetry table."""

from __future__ import annotations

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from outrider.telemetry.names import ATTRIBUTES, SPANS
from outrider.telemetry.tracing import Tracing

PARENT = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
UNSAMPLED = PARENT[:-1] + "0"
_TYPES = {"string": str, "int": int, "boolean": bool, "double": float, "string[]": tuple, "int[]": tuple}


class Recorder:
    """A process's tracing, and the spans it has ended."""

    def __init__(self, *, steps: bool = False) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracing = Tracing(provider, steps=steps)

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        return self._exporter.get_finished_spans()

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.spans if span.name == name]


def check(span: ReadableSpan) -> None:
    """Fail unless the table has this kind of span, with these attributes, of these types."""
    allowed = {(spec.name, spec.kind): spec.attributes for spec in SPANS}[span.name, span.kind.name]
    for name, value in (span.attributes or {}).items():
        assert name in allowed, f"{span.name} carries {name}"
        assert isinstance(value, _TYPES[ATTRIBUTES[name].type]), f"{name} is {value!r}"
