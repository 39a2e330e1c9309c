"""Families of samples as rows of a table: a name, what it means, and how each labelled thing is read.

What cannot be told of a thing (None) has no sample, which is not the same as 0.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Generic, NamedTuple, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from fairlead.tally import HistogramStatistics

Labels = tuple[str, ...]
T = TypeVar("T")
Things = Sequence[tuple[Labels, T]]


class Gauge(NamedTuple, Generic[T]):
    """A number that rises and falls."""

    name: str
    text: str
    read: Callable[[T], float | None]

    def family(self, labels: Labels, things: Things[T]) -> Metric:
        """Return the samples of all things, by their labels' values."""
        family = GaugeMetricFamily(self.name, self.text, labels=labels)
        for values, thing in things:
            if (value := self.read(thing)) is not None:
                family.add_metric(values, float(value))
        return family


class Count(NamedTuple, Generic[T]):
    """A number that only grows. Its samples' name gets `_total` behind it, if it has none."""

    name: str
    text: str
    read: Callable[[T], float | None]

    def family(self, labels: Labels, things: Things[T]) -> Metric:
        """Return the samples of all things, by their labels' values."""
        family = CounterMetricFamily(self.name, self.text, labels=labels)
        for values, thing in things:
            if (value := self.read(thing)) is not None:
                family.add_metric(values, float(value))
        return family


class Spread(NamedTuple, Generic[T]):
    """A histogram."""

    name: str
    text: str
    read: Callable[[T], HistogramStatistics]

    def family(self, labels: Labels, things: Things[T]) -> Metric:
        """Return the samples of all things, by their labels' values."""
        family = HistogramMetricFamily(self.name, self.text, labels=labels)
        for values, thing in things:
            histogram = self.read(thing)
            bounds = (*map(repr, histogram.bounds), "+Inf")
            buckets = list(zip(bounds, accumulate(map(float, histogram.counts)), strict=True))
            family.add_metric(values, buckets, histogram.total)
        return family


Row = Gauge[T] | Count[T] | Spread[T]


def families(rows: tuple[Row[T], ...], labels: Labels, things: Things[T]) -> Iterator[Metric]:
    """Yield a family for each row, with a sample for each thing."""
    for row in rows:
        yield row.family(labels, things)


def itself(value: float) -> float:
    """Read a thing that is its own value."""
    return value
