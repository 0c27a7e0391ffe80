"""The metrics page: the table of families, read out of the statistics of one instant, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from memkv_vllm.store.admin.families import FAMILIES, Buckets, Family

__all__ = ["CONTENT_TYPE", "MetricsPage"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class MetricsPage(Collector):
    """Renders the metrics; also remembers each counter, so that none is ever shown lower than before (P095).

    Args:
        statistics: everything that the families read.
    """

    def __init__(self, statistics: Callable[[], Mapping[str, Any]]) -> None:
        self._statistics = statistics
        self._shown: dict[tuple[str, tuple[str, ...]], float] = {}
        """As many entries as there are series: the families bound them."""
        self.clamped = 0
        """How often a counter had gone back."""
        # Of its own: the default registry is the process's, and whoever embeds a server may use it for other things.
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        # Memory, CPU and descriptors under the names that every Prometheus client gives them.
        ProcessCollector(registry=self._registry)

    def render(self) -> bytes:
        """The page as it is now."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """One metric per family, in the order of the table."""
        statistics = self._statistics()
        for family in FAMILIES:
            yield self._metric(family, statistics)

    def describe(self) -> Iterator[Metric]:
        """Nothing: with auto-describe a registry would collect while it registers, before the server has begun."""
        return iter(())

    def _metric(self, family: Family, statistics: Mapping[str, Any]) -> Metric:
        metric: CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
        if family.kind == "histogram":
            metric = HistogramMetricFamily(family.name, family.help, labels=family.labels)
            for labels, value in family.read(statistics):
                assert isinstance(value, Buckets)
                metric.add_metric(labels, value.cumulated, value.sum_s)
        elif family.kind == "counter":
            metric = CounterMetricFamily(family.name.removesuffix("_total"), family.help, labels=family.labels)
            for labels, value in family.read(statistics):
                metric.add_metric(labels, self._never_less(family.name, labels, value))
        else:
            metric = GaugeMetricFamily(family.name, family.help, labels=family.labels)
            for labels, value in family.read(statistics):
                metric.add_metric(labels, value)
        return metric

    def _never_less(self, name: str, labels: tuple[str, ...], value: float) -> float:
        before = self._shown.get((name, labels), 0)
        if value < before:
            self.clamped += 1
            return before
        self._shown[name, labels] = value
        return value
