"""Metrics of all jobs, in totals that only grow. Pure: timelines go in, frozen counts come out.

Each job is added to the histograms once, when it is over, so its tokens cost nothing while it runs. The gaps
between an answer's tokens are added with their mean, as many times as there were. The sum and the number of
gaps are exact; the distribution is that of the answers' means.

Clients and remote servers may send any number of names of tenants and models. The first `LABELS_AT_MOST` of a
kind are counted by name, the others together as `OTHER`.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from operator import add
from typing import Any

import msgspec

from fairlead.generation.timeline import LEFT, SUCCESS, RequestTimeline
from fairlead.store.journal import JournalStatistics

LABELS_AT_MOST = 1000
OTHER = "other"

# Upper bounds in seconds; they include those in the panels of vLLM's dashboards.
FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_GAP_S = (
    *(0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
PHASE_S = (
    *(0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


class HistogramStatistics(msgspec.Struct, frozen=True):
    """Counts of the values above the previous bound, up to each bound; the last: those above all bounds."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def count(self) -> int:
        """The number of values."""
        return sum(self.counts)


class Durations(msgspec.Struct, frozen=True):
    """One model's histograms, in seconds.

    queue: from arrival to seat, of jobs that got one.
    first_token: from arrival to first token, of jobs with a begun answer.
    prefill: from seat to first token, of the same jobs.
    decode: from first token to end, of jobs with a complete answer.
    end_to_end: from arrival to end, of the same jobs.
    token_gap: the mean time between the tokens of the same jobs.
    """

    queue: HistogramStatistics
    first_token: HistogramStatistics
    prefill: HistogramStatistics
    decode: HistogramStatistics
    end_to_end: HistogramStatistics
    token_gap: HistogramStatistics


class ModelCounts(msgspec.Struct, frozen=True):
    """Metrics of one model. Those of running jobs are included.

    waiting: jobs that have had no seat yet.
    running: jobs that have had one.
    outcomes: ended jobs by outcome.
    finish_reasons: answers by finish reason.
    prompt_tokens: tokens of computed prompts, an estimate if only another server has tokenized them. A prompt
        counts when its answer begins.
    generated_tokens: tokens of answers.
    retries: attempts beyond each job's first.
    durations: the times.
    """

    waiting: int
    running: int
    outcomes: dict[str, int]
    finish_reasons: dict[str, int]
    prompt_tokens: int
    generated_tokens: int
    retries: int
    durations: Durations


class TenantCounts(msgspec.Struct, frozen=True):
    """Metrics of one tenant.

    jobs: finished jobs.
    prompt_tokens: tokens of their prompts.
    generated_tokens: tokens of their answers.
    waited_s: their total wait for a seat.
    waiting: jobs that have had no seat yet.
    running: jobs that have had one.
    """

    jobs: int
    prompt_tokens: int
    generated_tokens: int
    waited_s: float
    waiting: int = 0
    running: int = 0


class JobStatistics(msgspec.Struct, frozen=True):
    """Metrics by model, and by tenant."""

    models: Mapping[str, ModelCounts]
    tenants: Mapping[str, TenantCounts]

    @property
    def prompt_tokens(self) -> int:
        """The prompt tokens of all models."""
        return sum(model.prompt_tokens for model in self.models.values())

    @property
    def generated_tokens(self) -> int:
        """The generated tokens of all models."""
        return sum(model.generated_tokens for model in self.models.values())

    @property
    def outcomes(self) -> Counter[str]:
        """The jobs of all models by outcome."""
        outcomes: Counter[str] = Counter()
        for model in self.models.values():
            outcomes.update(model.outcomes)
        return outcomes


class FrontCounts(msgspec.Struct, frozen=True):
    """What a front has counted.

    `refusals`: requests refused before they became jobs, by error code. `dropped_answers`: those dropped
    because their clients did not read them, by tenant. `usage`: what was counted for the store.
    """

    jobs: JobStatistics = JobStatistics({}, {})
    refusals: dict[str, int] = {}
    dropped_answers: dict[str, int] = {}
    usage: JournalStatistics = JournalStatistics()


def merged(parts: Iterable[FrontCounts], *, labels_at_most: int = LABELS_AT_MOST) -> FrontCounts:
    """Return the sums of the counts. Models and tenants beyond `labels_at_most` are counted as `OTHER`."""
    models: dict[str, ModelCounts] = {}
    tenants: dict[str, TenantCounts] = {}
    refusals: Counter[str] = Counter()
    dropped: dict[str, int] = {}
    usage = JournalStatistics()
    for part in parts:
        usage = _sum(usage, part.usage)
        refusals.update(part.refusals)
        _add_all(models, part.jobs.models, labels_at_most)
        _add_all(tenants, part.jobs.tenants, labels_at_most)
        _add_all(dropped, part.dropped_answers, labels_at_most)
    return FrontCounts(JobStatistics(models, tenants), dict(refusals), dropped, usage)


def _add_all(sums: dict[str, Any], parts: Mapping[str, Any], labels_at_most: int) -> None:
    for name, counts in parts.items():
        label = name if name in sums or len(sums) < labels_at_most else OTHER
        sums[label] = _sum(sums[label], counts) if label in sums else counts


def _sum(one: Any, other: Any) -> Any:
    """Return the sum of two values: of numbers, of mappings by key, of structs and histograms by field."""
    match one:
        case HistogramStatistics():
            assert one.bounds == other.bounds
            counts = tuple(map(add, one.counts, other.counts))
            return HistogramStatistics(one.bounds, counts, one.total + other.total)
        case msgspec.Struct():
            fields = one.__struct_fields__
            return type(one)(*(_sum(getattr(one, name), getattr(other, name)) for name in fields))
        case dict():
            return dict(Counter(one) + Counter(other))
        case _:
            return one + other


class DurationHistogram:
    """Counts values by size. Adding one takes a binary search of the bounds, and no memory."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Add a value that occurred `times` times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._total += value * times

    def statistics(self) -> HistogramStatistics:
        """Return the current counts."""
        return HistogramStatistics(self._bounds, tuple(self._counts), self._total)


class JobMetrics:
    """Adds up finished jobs. Running ones are not kept here, but passed to `statistics`."""

    def __init__(self, *, labels_at_most: int = LABELS_AT_MOST) -> None:
        self._labels_at_most = labels_at_most
        self._models: dict[str, _Model] = {}
        self._tenants: dict[str, _Tenant] = {}
        self._reported_tokens: dict[str, tuple[int, int]] = {}

    def add(self, timeline: RequestTimeline) -> None:
        """Count a finished job."""
        model = self._models.setdefault(self._label(self._models, timeline.job.model), _Model())
        model.add(timeline)
        tenant = self._tenants.setdefault(self._label(self._tenants, timeline.job.tenant), _Tenant())
        tenant.add(timeline)

    def statistics(self, under_way: Iterable[RequestTimeline] = ()) -> JobStatistics:
        """Return the current counts, with the tokens of the jobs under way. No total ever falls."""
        now: defaultdict[str, _Now] = defaultdict(_Now)
        tenants_now: defaultdict[str, _Now] = defaultdict(_Now)
        for timeline in under_way:
            tenant = self._label(self._tenants, timeline.job.tenant)
            self._tenants.setdefault(tenant, _Tenant())
            tenants_now[tenant].add(timeline)
            name = self._label(self._models, timeline.job.model)
            if name not in self._models:
                self._models[name] = _Model()
            now[name].add(timeline)
        models = {name: self._of_model(name, now[name]) for name in self._models}
        tenants = {
            name: tenant.statistics(tenants_now[name].waiting, tenants_now[name].running)
            for name, tenant in self._tenants.items()
        }
        return JobStatistics(models, tenants)

    def _of_model(self, name: str, now: "_Now") -> ModelCounts:
        model = self._models[name]
        earlier = self._reported_tokens.get(name, (0, 0))
        # An answer that restarts on another node has fewer tokens than before.
        prompt = max(earlier[0], model.prompt_tokens + now.prompt_tokens)
        generated = max(earlier[1], model.generated_tokens + now.generated_tokens)
        self._reported_tokens[name] = (prompt, generated)
        return ModelCounts(
            now.waiting,
            now.running,
            dict(model.outcomes),
            dict(model.finish_reasons),
            prompt,
            generated,
            model.retries,
            Durations(*(histogram.statistics() for histogram in model.histograms)),
        )

    def _label(self, known: Mapping[str, object], name: str) -> str:
        return name if name in known or len(known) < self._labels_at_most else OTHER


class _Now:
    """The counts of one model's, or one tenant's, jobs that are under way."""

    __slots__ = ("generated_tokens", "prompt_tokens", "running", "waiting")

    def __init__(self) -> None:
        self.waiting = 0
        self.running = 0
        self.prompt_tokens = 0
        self.generated_tokens = 0

    def add(self, timeline: RequestTimeline) -> None:
        self.waiting += timeline.granted_s is None
        self.running += timeline.granted_s is not None
        self.prompt_tokens += timeline.computed_prompt_tokens
        self.generated_tokens += timeline.tokens


class _Model:
    """One model's counts."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.finish_reasons: Counter[str] = Counter()
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.retries = 0
        # In the order of `Durations`.
        bounds = (PHASE_S, FIRST_TOKEN_S, PHASE_S, PHASE_S, PHASE_S, TOKEN_GAP_S)
        self.histograms = tuple(map(DurationHistogram, bounds))

    def add(self, timeline: RequestTimeline) -> None:
        self.outcomes[timeline.outcome] += 1
        self.prompt_tokens += timeline.computed_prompt_tokens
        self.generated_tokens += timeline.tokens
        self.retries += max(0, timeline.attempts - 1)
        if timeline.outcome == SUCCESS:
            # One per job, as vLLM counts them: an answer counts as cut short if any choice was.
            self.finish_reasons["length" if "length" in timeline.finish_reasons else "stop"] += 1
        elif timeline.outcome in (LEFT, "cancelled") and timeline.granted_s is not None:
            self.finish_reasons["abort"] += 1
        self._time(timeline)

    def _time(self, timeline: RequestTimeline) -> None:
        queue, first_token, prefill, decode, end_to_end, token_gap = self.histograms
        if timeline.granted_s is None:
            return
        queue.add(timeline.waited_s)
        if timeline.first_delta_s is None:
            return
        first_token.add(timeline.first_delta_s - timeline.arrived_s)
        prefill.add(timeline.first_delta_s - timeline.granted_s)
        if timeline.outcome != SUCCESS or timeline.ended_s is None:
            return
        decode.add(timeline.ended_s - timeline.first_delta_s)
        end_to_end.add(timeline.ended_s - timeline.arrived_s)
        if timeline.token_gaps:
            token_gap.add(timeline.token_gap_s, timeline.token_gaps)


class _Tenant:
    """One tenant's counts."""

    __slots__ = ("generated_tokens", "jobs", "prompt_tokens", "waited_s")

    def __init__(self) -> None:
        self.jobs = 0
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.waited_s = 0.0

    def add(self, timeline: RequestTimeline) -> None:
        self.jobs += 1
        self.prompt_tokens += timeline.computed_prompt_tokens
        self.generated_tokens += timeline.tokens
        self.waited_s += timeline.waited_s

    def statistics(self, waiting: int, running: int) -> TenantCounts:
        return TenantCounts(
            self.jobs, self.prompt_tokens, self.generated_tokens, self.waited_s, waiting, running
        )
