"""The result of a soak and its checks. Pure functions.

The bounds: an hour has about 100,000 requests. A leak of 100 bytes per request is 10 MB, and a leaked object
is one allocated block per request. A process's memory (USS) may grow faster, because freed memory is kept for
reuse, and its maximum still rises after an hour when large requests coincide. Growth is a problem only if it
is above the bound with a confidence of 97.5 %, so the lower end of the interval is compared. When the server
is idle, all counts must be as before the load, except for one keep-alive connection to each node.
"""

import statistics
from collections.abc import Sequence

import msgspec

from soaking.sampling import Idle, Sample
from soaking.slopes import Slope, slope
from soaking.tenants import LoadReport

WARM_UP = 0.25  # the first part of the time, which slopes ignore
MIB = 1024 * 1024
MINUTE_S = 60.0
HOUR_S = 3600.0
MIN_POINTS = 20
IDLE_DESCRIPTORS = 2
IDLE_TASKS = 6
# Growth per hour; of blocks per request; of p99s in parts of their median.
BOUNDS = {
    "heap": 8.0 * MIB,
    "uss": 32.0 * MIB,
    "steady_uss": 8.0 * MIB,
    "descriptors": 8.0,
    "threads": 8.0,
    "tasks": 20.0,
}
BLOCKS_A_REQUEST = 0.5
P99_GROWTH = 1.0


class Minute(msgspec.Struct, frozen=True):
    """Figures of the fair tenants' streams in one minute: seconds, or None without streams."""

    minute: int
    streams: int
    first_p50_s: float | None
    first_p99_s: float | None
    gap_p50_s: float | None
    gap_p99_s: float | None


class Growth(msgspec.Struct, frozen=True):
    """A slope, its 95 % interval, and its upper bound."""

    value: float
    low: float
    high: float
    bound: float

    @property
    def is_flat(self) -> bool:
        """Whether the growth is not above the bound with confidence."""
        return self.low <= self.bound


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The result. `problems` is empty if the soak passed. `events` are (seconds, fault)."""

    seed: int
    minutes: float
    requests: int
    outcomes: dict[str, int]
    answered: dict[str, int]
    canaries: dict[str, int]
    idle_before: Idle
    idle_after: Idle
    exit_code: int
    growth: dict[str, Growth]
    by_minute: list[Minute]
    events: list[tuple[float, str]]
    problems: list[str]
    samples: list[Sample]


def growth_of(samples: Sequence[Sample], by_minute: Sequence[Minute]) -> dict[str, Growth]:
    """Return the slopes after the warm-up, if there are enough points."""
    samples = samples[int(len(samples) * WARM_UP) :]
    found: dict[str, Growth] = {}
    if len(samples) >= MIN_POINTS:
        hours = [sample.at_s / HOUR_S for sample in samples]
        for name, bound in BOUNDS.items():
            found[f"{name} an hour"] = _growth(
                slope(hours, [float(getattr(sample, name)) for sample in samples], min), bound
            )
        requests = [float(sample.requests) for sample in samples]
        blocks = [float(sample.blocks) for sample in samples]
        found["blocks a request"] = _growth(slope(requests, blocks, min), BLOCKS_A_REQUEST)
    minutes = by_minute[int(len(by_minute) * WARM_UP) :]
    for name in ("first_p99_s", "gap_p99_s"):
        points = [(each.minute / 60, getattr(each, name)) for each in minutes if getattr(each, name)]
        if len(points) >= MIN_POINTS:
            usual = statistics.median(value for _, value in points)
            of_it = slope([hour for hour, _ in points], [value / usual for _, value in points])
            found[f"{name} an hour, in its median"] = _growth(of_it, P99_GROWTH)
    return found


def minutes_of(report: LoadReport, began_s: float) -> list[Minute]:
    """Return the figures of each minute."""
    firsts, gaps = _by_minute(report.firsts, began_s), _by_minute(report.gaps, began_s)
    return [
        Minute(
            minute,
            len(firsts.get(minute, ())),
            quantile(firsts.get(minute, ()), 0.5),
            quantile(firsts.get(minute, ()), 0.99),
            quantile(gaps.get(minute, ()), 0.5),
            quantile(gaps.get(minute, ()), 0.99),
        )
        for minute in range(max((*firsts, *gaps), default=-1) + 1)
    ]


def quantile(values: Sequence[float], part: float) -> float | None:
    """Return a quantile; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(part * len(ordered)))], 5)


def problems_at_rest(before: Idle, after: Idle) -> list[str]:
    """Return the counts that are not as before the load."""
    problems = [f"at rest: {count}" for count in after.busy]
    if after.descriptors > before.descriptors + IDLE_DESCRIPTORS:
        problems.append(f"at rest: {after.descriptors} descriptors, before the load {before.descriptors}")
    if after.tasks > before.tasks + IDLE_TASKS:
        problems.append(f"at rest: {after.tasks} tasks, before the load {before.tasks}")
    return problems


def problems_of_growth(growth: dict[str, Growth]) -> list[str]:
    """Return the measurements that grow faster than their bounds."""
    return [
        f"{name}: grows by {each.value:.3g} ({each.low:.3g} to {each.high:.3g}), bound {each.bound:.3g}"
        for name, each in growth.items()
        if not each.is_flat
    ]


def problems_in_log(lines: Sequence[dict[str, object]]) -> list[str]:
    """Return the events of the server's log that report internal faults."""
    problems = []
    for line in lines:
        if "exception" in line or line.get("level") == "critical" or line.get("outcome") == "internal_error":
            problems.append(f"log: {line.get('event')}: {str(line.get('exception', line))[-600:]}")
        elif "Traceback" in str(line.get("line", "")):
            problems.append(f"log: {line.get('source')}: {line['line']}")
    return problems


def _growth(found: Slope, bound: float) -> Growth:
    return Growth(found.value, found.low, found.high, bound)


def _by_minute(times: Sequence[tuple[float, float]], began_s: float) -> dict[int, list[float]]:
    minutes: dict[int, list[float]] = {}
    for at_s, value in times:
        minutes.setdefault(int((at_s - began_s) / MINUTE_S), []).append(value)
    return minutes
