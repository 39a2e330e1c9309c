"""Metric families as rows of a table: a name, a help text, and a function that reads the value of a source.

A source is a model, a node, a tenant or the server. A value of None (unknown) has no sample, unlike 0.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Generic, NamedTuple, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from fairlead.generation.metrics.job_metrics import HistogramStatistics

Labels = tuple[str, ...]
T = TypeVar("T")
Sources = Sequence[tuple[Labels, T]]


class Gauge(NamedTuple, Generic[T]):
    """A value that rises and falls."""

    name: str
    text: str
    read: Callable[[T], float | None]

    def family(self, labels: Labels, sources: Sources[T]) -> Metric:
        """Return the samples of all sources, by their label values."""
        return _filled(GaugeMetricFamily(self.name, self.text, labels=labels), self.read, sources)


class Counter(NamedTuple, Generic[T]):
    """A counter. Its samples' name gets the suffix `_total`, unless it has it."""

    name: str
    text: str
    read: Callable[[T], float | None]

    def family(self, labels: Labels, sources: Sources[T]) -> Metric:
        """Return the samples of all sources, by their label values."""
        return _filled(CounterMetricFamily(self.name, self.text, labels=labels), self.read, sources)


class Histogram(NamedTuple, Generic[T]):
    """A histogram."""

    name: str
    text: str
    read: Callable[[T], HistogramStatistics]

    def family(self, labels: Labels, sources: Sources[T]) -> Metric:
        """Return the samples of all sources, by their label values."""
        family = HistogramMetricFamily(self.name, self.text, labels=labels)
        for values, source in sources:
            histogram = self.read(source)
            bounds = (*map(repr, histogram.bounds), "+Inf")
            buckets = list(zip(bounds, accumulate(map(float, histogram.counts)), strict=True))
            family.add_metric(values, buckets, histogram.total)
        return family


Row = Gauge[T] | Counter[T] | Histogram[T]


def families(rows: tuple[Row[T], ...], labels: Labels, sources: Sources[T]) -> Iterator[Metric]:
    """Yield a family for each row, with a sample for each source."""
    for row in rows:
        yield row.family(labels, sources)


def identity(value: float) -> float:
    """Return the value: the reader for sources that are numbers."""
    return value


def _filled(
    family: GaugeMetricFamily | CounterMetricFamily, read: Callable[[T], float | None], sources: Sources[T]
) -> Metric:
    for values, source in sources:
        if (value := read(source)) is not None:
            family.add_metric(values, float(value))
    return family
