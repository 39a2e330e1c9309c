"""What tenants get, and how long requests take, in the last minutes, hour and day. Pure, and bounded.

A `Ring` is a row of buckets of equal width. A request that ends is added to one bucket of each ring with its
times and its outcome, and to all buckets in which it held seats with the seconds of its seats. So a
long request counts when it runs, not only when it ends.

    seats from 58 s to 63 s, buckets of 10 s → 2 s in [50, 60), 3 s in [60, 70)

Times are counted in classes of a relative width of 10 %, so a quantile is right to 5 %.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec

from fairlead.generation.metrics.job_metrics import OTHER
from fairlead.generation.metrics.requests import EndedRequest
from fairlead.router.dispatch.open_jobs import OpenJob

TENANTS_AT_MOST = 1000
LINES_AT_MOST = 256
"""The most pairs of a model and a class in a bucket."""

GROWTH = 1.1
LEAST_S = 0.001
MEASURES = ("first_token", "token_gap", "wait")

WINDOWS = {"10m": (600.0, 60), "1h": (3600.0, 60), "24h": (86_400.0, 96)}
"""Seconds and buckets of each window, by its name in requests."""
SHARE_WINDOWS = {"minute": ("10m", 60.0), "hour": ("1h", 3600.0), "day": ("24h", 86_400.0)}
"""The window that has the shares of the last minute, hour and day, and their seconds."""


class Sketch:
    """Counts durations by size, for quantiles."""

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()

    def add(self, seconds: float) -> None:
        """Add a duration."""
        self.counts[0 if seconds <= LEAST_S else math.ceil(math.log(seconds / LEAST_S, GROWTH))] += 1

    def include(self, other: "Sketch") -> None:
        """Add all durations of another sketch."""
        self.counts.update(other.counts)

    @property
    def count(self) -> int:
        """How many durations there are."""
        return self.counts.total()

    def quantile(self, part: float) -> float | None:
        """Return the duration that this part of all do not exceed; None: there are none."""
        rank = part * self.count
        for index, count in sorted(self.counts.items()):
            rank -= count
            if rank <= 0:
                return LEAST_S * float(GROWTH**index) / math.sqrt(GROWTH) if index else LEAST_S
        return None


class Line(NamedTuple):
    """What times are counted apart for: a model, and an index into `queue.classes`."""

    model: str
    priority: int


class Bucket:
    """What happened in a time: `seat_s` by tenant, the times by line, the number of each outcome."""

    def __init__(self) -> None:
        self.seat_s: defaultdict[str, float] = defaultdict(float)
        self.times: dict[Line, tuple[Sketch, ...]] = {}
        self.outcomes: Counter[str] = Counter()

    def of(self, line: Line) -> tuple[Sketch, ...]:
        """Return a line's sketches, in the order of `MEASURES`."""
        if line not in self.times and len(self.times) >= LINES_AT_MOST:
            line = Line(OTHER, line.priority)
        return self.times.setdefault(line, tuple(Sketch() for _ in MEASURES))

    def hold(self, tenant: str, seconds: float) -> None:
        """Add the seconds of a tenant's seats."""
        known = tenant in self.seat_s or len(self.seat_s) < TENANTS_AT_MOST
        self.seat_s[tenant if known else OTHER] += seconds


class Ring:
    """The buckets of the last `duration_s`. Its times are in seconds since 1970."""

    def __init__(self, duration_s: float, count: int) -> None:
        self.width_s = duration_s / count
        self.count = count
        self._buckets: dict[int, Bucket] = {}
        self._latest = 0

    def add(self, request: EndedRequest) -> None:
        """Add a request that has ended. One that ended before the ring's time has no effect."""
        if (bucket := self._at(request.ended_at)) is not None:
            bucket.outcomes[request.outcome] += 1
            values = (request.first_token_s, request.token_gap_s, request.wait_s)
            for sketch, seconds in zip(bucket.of(Line(request.model, request.priority)), values, strict=True):
                if seconds is not None:
                    sketch.add(seconds)
        if request.seats:
            since = request.ended_at - request.took_s + request.wait_s
            for index, seconds in self._parts(since, request.ended_at):
                if (bucket := self._of(index)) is not None:
                    bucket.hold(request.tenant, seconds * request.seats)

    def refuse(self, code: str, count: int, now: float) -> None:
        """Add requests that were refused with an error before they became jobs."""
        if (bucket := self._at(now)) is not None:
            bucket.outcomes[code] += count

    def seat_s(self, past_s: float, now: float, open_jobs: Iterable[OpenJob]) -> dict[str, float]:
        """Return the seconds of seats of each tenant in the last `past_s`, those of open jobs included.

        The first bucket counts for the part of it that is within this time.
        """
        sums: defaultdict[str, float] = defaultdict(float)
        since = now - past_s
        for index, bucket in self.buckets(now):
            part = min(1.0, max(0.0, (index + 1) * self.width_s - since) / self.width_s)
            for tenant, seconds in bucket.seat_s.items() if part else ():
                sums[tenant] += seconds * part
        for job in open_jobs:
            held_s = min(past_s, job.age_s - job.wait_s) if job.seats else 0.0
            if held_s > 0:
                sums[job.tenant] += held_s * job.seats
        return dict(sums)

    def buckets(self, now: float) -> Iterator[tuple[int, Bucket]]:
        """Yield the buckets that are not empty with their indices, the oldest first."""
        last = self._index(now)
        for index in range(last - self.count + 1, last + 1):
            if (bucket := self._buckets.get(index)) is not None:
                yield index, bucket

    def _index(self, at: float) -> int:
        return int(at // self.width_s)

    def _at(self, at: float) -> Bucket | None:
        return self._of(self._index(at))

    def _of(self, index: int) -> Bucket | None:
        """Return a bucket; None if it is too old. A later one drops those that become too old."""
        if index > self._latest:
            self._latest = index
            for old in [each for each in self._buckets if each <= index - self.count]:
                del self._buckets[old]
        if index <= self._latest - self.count:
            return None
        return self._buckets.setdefault(index, Bucket())

    def _parts(self, since: float, until: float) -> Iterator[tuple[int, float]]:
        """Yield the buckets of a time, and how many seconds of it are in each."""
        since = max(since, until - self.width_s * self.count)
        for index in range(self._index(since), self._index(until) + 1):
            began, ended = index * self.width_s, (index + 1) * self.width_s
            if (seconds := min(until, ended) - max(since, began)) > 0:
                yield index, seconds


class DurationQuantiles(msgspec.Struct, frozen=True):
    """The median and the 95th percentile of durations in seconds, None without any; and their number."""

    p50: float | None = None
    p95: float | None = None
    count: int = 0


class TimingRow(msgspec.Struct, frozen=True, kw_only=True):
    """The times of requests of a model and class.

    model: the model; "": all.
    priority: the class, an index into `queue.classes`; None: all.
    first_token: from arrival to the first token.
    token_gap: between two tokens; one mean for each request.
    wait: from arrival to the seat.
    """

    model: str
    priority: int | None
    first_token: DurationQuantiles
    token_gap: DurationQuantiles
    wait: DurationQuantiles


class TimingSeries(msgspec.Struct, frozen=True, kw_only=True):
    """The times of requests of a class, for each step.

    priority: the class, an index into `queue.classes`; None: all.
    The others are as in `TimingRow`.
    """

    priority: int | None
    first_token: tuple[DurationQuantiles, ...]
    token_gap: tuple[DurationQuantiles, ...]
    wait: tuple[DurationQuantiles, ...]


class WindowTimings(msgspec.Struct, frozen=True, kw_only=True):
    """How long the requests of a window took, and how they ended.

    starts: the beginning of each step, in seconds since 1970.
    step_s: the seconds of a step.
    rows: of all models together, and of each model; of all classes, and of each class.
    series: of all classes, and of each class, with a value for each step.
    outcomes: how many requests ended with each outcome in each step.
    """

    starts: tuple[float, ...]
    step_s: float
    rows: tuple[TimingRow, ...]
    series: tuple[TimingSeries, ...]
    outcomes: dict[str, tuple[int, ...]]


class Activity:
    """A ring for each window."""

    def __init__(self, requests: Iterable[EndedRequest] = ()) -> None:
        self.rings = {name: Ring(*shape) for name, shape in WINDOWS.items()}
        for request in requests:
            self.add(request)

    def add(self, request: EndedRequest) -> None:
        """Add a request that has ended."""
        for ring in self.rings.values():
            ring.add(request)

    def refuse(self, code: str, count: int, now: float) -> None:
        """Add requests that were refused with an error before they became jobs."""
        for ring in self.rings.values():
            ring.refuse(code, count, now)

    def timings(self, window: str, now: float, models: frozenset[str] | None = None) -> WindowTimings:
        """Return the times and outcomes of a window. Rows are of these models; None: of all.

        Totals are those of all models.
        """
        ring = self.rings[window]
        last = int(now // ring.width_s)
        indices = range(last - ring.count + 1, last + 1)
        buckets = dict(ring.buckets(now))
        lines = sorted({line for bucket in buckets.values() for line in bucket.times})
        priorities = [None, *sorted({line.priority for line in lines})]
        names = ["", *sorted({line.model for line in lines if models is None or line.model in models})]
        outcomes = sorted({name for bucket in buckets.values() for name in bucket.outcomes})
        rows = []
        for name in names:
            for priority in priorities:
                sketches = _sum(buckets.values(), name, priority)
                if any(sketch.count for sketch in sketches):
                    quantiles = dict(zip(MEASURES, map(_quantiles, sketches), strict=True))
                    rows.append(TimingRow(model=name, priority=priority, **quantiles))
        return WindowTimings(
            starts=tuple(index * ring.width_s for index in indices),
            step_s=ring.width_s,
            rows=tuple(rows),
            series=tuple(_series(indices, buckets, priority) for priority in priorities),
            outcomes={
                name: tuple(buckets[index].outcomes[name] if index in buckets else 0 for index in indices)
                for name in outcomes
            },
        )


def _series(indices: Iterable[int], buckets: dict[int, Bucket], priority: int | None) -> TimingSeries:
    steps = [
        tuple(map(_quantiles, _sum((buckets[index],) if index in buckets else (), "", priority)))
        for index in indices
    ]
    return TimingSeries(priority=priority, **dict(zip(MEASURES, zip(*steps, strict=True), strict=True)))


def _sum(buckets: Iterable[Bucket], model: str, priority: int | None) -> tuple[Sketch, ...]:
    """Return the sketches of a model ("": all) and a class (None: all)."""
    sums = tuple(Sketch() for _ in MEASURES)
    for bucket in buckets:
        for line, sketches in bucket.times.items():
            if model in ("", line.model) and priority in (None, line.priority):
                for total, sketch in zip(sums, sketches, strict=True):
                    total.include(sketch)
    return sums


def _quantiles(sketch: Sketch) -> DurationQuantiles:
    if not sketch.count:
        return DurationQuantiles()
    return DurationQuantiles(sketch.quantile(0.5), sketch.quantile(0.95), sketch.count)
