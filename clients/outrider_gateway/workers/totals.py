"""What all workers of a gateway have counted together, and the page of it."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from outrider.telemetry.registry import Figures, MetricSet, Reading
from outrider.telemetry.table import GATEWAY

# Of what is no sum over processes: the first start, the least limit, and health as the worker has it that sees least.
_LEAST = {"process_start_time_seconds", "process_max_fds", "outrider_gateway_target_healthy"}


class WorkerTotals:
    """The last figures of each worker, and those of all that have ended."""

    def __init__(self) -> None:
        self._ended = MetricSet(GATEWAY)
        self._running: dict[int, Figures] = {}

    def put(self, worker: int, figures: Figures) -> None:
        """A worker has counted so far."""
        self._running[worker] = figures

    def end(self, worker: int) -> None:
        """A worker has ended: what it counted stays, its gauges do not."""
        figures = self._running.pop(worker, None)
        if figures is not None:
            self._ended.add_counted(figures)

    def page(self, process_ids: Iterable[int]) -> bytes:
        """The text of /metrics, with those of the processes."""
        together = MetricSet(GATEWAY)
        together.add_counted(self._ended.figures())
        for figures in self._running.values():
            together.add_counted(figures)
        together.gauges(self._gauges)
        registry = CollectorRegistry()
        registry.register(_Processes(tuple(process_ids)))
        registry.register(together)
        return generate_latest(registry)

    def _gauges(self) -> Iterator[Reading]:
        found: dict[tuple[str, tuple[str, ...]], float] = {}
        for figures in self._running.values():
            for name, labels, value in figures.gauges:
                found[name, tuple(labels)] = _together(name)([value, *_known(found, name, tuple(labels))])
        for (name, labels), value in found.items():
            yield name, labels, value


def _known(found: dict[tuple[str, tuple[str, ...]], float], name: str, labels: tuple[str, ...]) -> list[float]:
    return [found[name, labels]] if (name, labels) in found else []


def _together(name: str) -> Callable[[Iterable[float]], float]:
    return min if name in _LEAST else sum


class _Processes(Collector):
    """Memory, processor time and open files of several processes together. Processor time is also that of children
    which have ended, so that it never falls."""

    def __init__(self, process_ids: tuple[int, ...]) -> None:
        self._collectors = [ProcessCollector(pid=partial(int, one), registry=None) for one in process_ids]

    def collect(self) -> Iterator[Metric]:
        families: dict[str, list[Metric]] = {}
        for collector in self._collectors:
            for family in collector.collect():
                families.setdefault(family.name, []).append(family)
        for name, found in families.items():
            together, first = _together(name), found[0]
            values = [sample.value for family in found for sample in family.samples]
            if name == "process_cpu_seconds":
                ended = resource.getrusage(resource.RUSAGE_CHILDREN)
                values.append(ended.ru_utime + ended.ru_stime)
            sample = first.samples[0]
            merged = Metric(first.name, first.documentation, first.type)
            merged.add_sample(sample.name, sample.labels, together(values))
            yield merged
