"""Metric families as rows of a table: a name, a help text, and a function that reads the value of a thing.

A thing whose value is unknown (None) has no sample, which differs from 0.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Generic, NamedTuple, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from fairlead.job_metrics import HistogramStatistics

Labels = tuple[str, ...]
T = TypeVar("T")
Things = Sequence[tuple[Labels, T]]


class Gauge(NamedTuple, Generic[T]):
    """A value that rises and falls."""

    name: str
    text: str
    read: Callable[[T], float | None]

    def family(self, labels: Labels, things: Things[T]) -> Metric:
        """Return the samples of all things, by their label values."""
        return _filled(GaugeMetricFamily(self.name, self.text, labels=labels), self.read, things)


class Counter(NamedTuple, Generic[T]):
    """A counter. Its samples' name gets the suffix `_total`, unless it has it."""

    name: str
    text: str
    read: Callable[[T], float | None]

    def family(self, labels: Labels, things: Things[T]) -> Metric:
        """Return the samples of all things, by their label values."""
        return _filled(CounterMetricFamily(self.name, self.text, labels=labels), self.read, things)


class Histogram(NamedTuple, Generic[T]):
    """A histogram."""

    name: str
    text: str
    read: Callable[[T], HistogramStatistics]

    def family(self, labels: Labels, things: Things[T]) -> Metric:
        """Return the samples of all things, by their label values."""
        family = HistogramMetricFamily(self.name, self.text, labels=labels)
        for values, thing in things:
            histogram = self.read(thing)
            bounds = (*map(repr, histogram.bounds), "+Inf")
            buckets = list(zip(bounds, accumulate(map(float, histogram.counts)), strict=True))
            family.add_metric(values, buckets, histogram.total)
        return family


Row = Gauge[T] | Counter[T] | Histogram[T]


def families(rows: tuple[Row[T], ...], labels: Labels, things: Things[T]) -> Iterator[Metric]:
    """Yield a family for each row, with a sample for each thing."""
    for row in rows:
        yield row.family(labels, things)


def itself(value: float) -> float:
    """Return the value: the reader for things that are their own value."""
    return value


def _filled(
    family: GaugeMetricFamily | CounterMetricFamily, read: Callable[[T], float | None], things: Things[T]
) -> Metric:
    for values, thing in things:
        if (value := read(thing)) is not None:
            family.add_metric(values, float(value))
    return family
