"""The server's metrics for Prometheus: `fairlead_*`, and the `vllm:*` names that existing dashboards read.

All values are read on request, from the same sources as the dashboard's snapshot; nothing is counted here.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import get_args

from msgspec.structs import asdict
from prometheus_client import ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from fairlead.base.telemetry.streams import lines_dropped
from fairlead.base.version import VERSION
from fairlead.generation.metrics.families import Counter, Gauge, Histogram, Row, families, identity
from fairlead.generation.metrics.job_metrics import (
    LABELS_AT_MOST,
    OTHER,
    JobStatistics,
    ModelCounts,
    TenantCounts,
)
from fairlead.generation.metrics.scope import Scope
from fairlead.generation.metrics.snapshot import Overview, Snapshot
from fairlead.generation.metrics.tenants import TenantNames
from fairlead.generation.metrics.vllm import as_vllm
from fairlead.nodes.node import ModelState
from fairlead.nodes.status import EngineStatus
from fairlead.router.fleet.status import ModelStatus, NodeStatus
from fairlead.store.journal import JournalStatistics


@dataclass(frozen=True, slots=True)
class KeptResponses:
    """The responses of `/v1/responses` that are kept: their number, and their memory in bytes."""

    number: int = 0
    size: int = 0


SERVER: tuple[Row[Snapshot], ...] = (
    Gauge("fairlead_ready", "1 if no job would wait for a model to be loaded.", lambda now: now.ready),
    Gauge("fairlead_queue_waiting_jobs", "Jobs that wait for a seat.", lambda now: now.queue.waiting),
    Gauge("fairlead_queue_capacity_jobs", "Maximum number of waiting jobs.", lambda now: now.queue.capacity),
    Gauge("fairlead_running_jobs", "Jobs that hold a seat.", lambda now: now.queue.running),
    Gauge("fairlead_seats", "Seats of all nodes that are up.", lambda now: now.queue.seats),
    Gauge(
        "fairlead_queue_mean_wait_seconds",
        "Mean wait of the last 100 jobs that got a seat.",
        lambda now: now.queue.mean_wait_s,
    ),
    Gauge(
        "fairlead_mean_service_seconds",
        "Mean time for which the last 100 jobs held their seats.",
        lambda now: now.queue.mean_service_s,
    ),
)

JOBS: tuple[Row[ModelCounts], ...] = (
    Counter("fairlead_prompt_tokens", "Prompt tokens of jobs with a first token.", lambda t: t.prompt_tokens),
    Counter("fairlead_generated_tokens", "Generated tokens.", lambda t: t.generated_tokens),
    Counter("fairlead_retries", "Attempts after the first one of a job.", lambda t: t.retries),
    Histogram("fairlead_queue_seconds", "From the arrival to the seat.", lambda t: t.durations.queue),
    Histogram("fairlead_prefill_seconds", "From the seat to the first token.", lambda t: t.durations.prefill),
    Histogram(
        "fairlead_first_token_seconds",
        "From the arrival to the first token.",
        lambda t: t.durations.first_token,
    ),
    Histogram("fairlead_decode_seconds", "From the first token to the last.", lambda t: t.durations.decode),
    Histogram(
        "fairlead_request_seconds", "From the arrival to the last token.", lambda t: t.durations.end_to_end
    ),
    Histogram(
        "fairlead_token_gap_seconds",
        "Time between tokens; each gap of an answer counts with their mean.",
        lambda t: t.durations.token_gap,
    ),
)

TENANTS: tuple[Row[TenantCounts], ...] = (
    Gauge("fairlead_tenant_waiting_jobs", "Jobs that wait for a seat.", lambda t: t.waiting),
    Gauge("fairlead_tenant_running_jobs", "Jobs that hold a seat.", lambda t: t.running),
    Counter("fairlead_tenant_jobs", "Finished jobs.", lambda t: t.jobs),
    Counter("fairlead_tenant_prompt_tokens", "Prompt tokens.", lambda t: t.prompt_tokens),
    Counter("fairlead_tenant_generated_tokens", "Generated tokens.", lambda t: t.generated_tokens),
    Counter("fairlead_tenant_wait_seconds", "Time that jobs waited for seats.", lambda t: t.waited_s),
)

MODELS: tuple[Row[ModelStatus], ...] = (
    Gauge("fairlead_model_seats", "Seats, while it is loaded.", lambda m: m.seats),
    Gauge("fairlead_model_busy_seats", "Seats that jobs hold.", lambda m: m.busy),
    Gauge(
        "fairlead_model_load_progress", "Progress of the load, 0 to 1, if known.", lambda m: m.load.progress
    ),
    Gauge("fairlead_model_memory_bytes", "Memory of its processes.", lambda m: m.memory_bytes),
    Gauge("fairlead_model_last_load_seconds", "Duration of the latest load.", lambda m: m.load.duration_s),
    Counter("fairlead_model_loads", "How often it was loaded.", lambda m: m.counts.loads),
    Counter("fairlead_model_load_failures", "How often its load failed.", lambda m: m.counts.load_failures),
    Counter(
        "fairlead_model_evictions",
        "How often it was evicted for another model.",
        lambda m: m.counts.evictions,
    ),
    Counter(
        "fairlead_model_restarts",
        "How often it was restarted after its process had ended unexpectedly.",
        lambda m: m.counts.restarts,
    ),
    Counter("fairlead_model_stuck", "How often a step did not finish in time.", lambda m: m.counts.stuck),
)

ENGINES: tuple[Row[EngineStatus], ...] = (
    Gauge("fairlead_model_cache_usage", "Fraction of cache blocks in use.", lambda e: e.cache_usage),
    Gauge("fairlead_model_cache_blocks", "Cache blocks.", lambda e: e.blocks_total),
    Gauge("fairlead_model_cached_tokens", "Tokens kept for reuse.", lambda e: e.cached_tokens),
    Gauge(
        "fairlead_model_suspended_sequences",
        "Sequences that have no slot until they are resumed.",
        lambda e: e.suspended,
    ),
    Counter(
        "fairlead_model_preemptions", "Sequences preempted because memory was short.", lambda e: e.preemptions
    ),
    Counter(
        "fairlead_model_prefix_queries", "Prompt tokens looked up in the cache.", lambda e: e.prefix_queries
    ),
    Counter("fairlead_model_prefix_hits", "Prompt tokens found in the cache.", lambda e: e.prefix_hits),
    Counter("fairlead_model_draft_tokens", "Drafts that were tried.", lambda e: e.draft_tokens),
    Counter(
        "fairlead_model_accepted_tokens", "Drafts that the model chose itself.", lambda e: e.accepted_tokens
    ),
)

NODES: tuple[Row[NodeStatus], ...] = (
    Gauge("fairlead_node_up", "1 if it accepts jobs.", lambda n: n.state == "up"),
    Gauge("fairlead_node_seats", "Sequences that it runs at once.", lambda n: n.seats),
    Gauge("fairlead_node_busy_seats", "Seats that jobs hold.", lambda n: n.busy),
    Counter("fairlead_node_ups", "How often it came up.", lambda n: n.ups),
    Counter("fairlead_node_downs", "How often it went down.", lambda n: n.downs),
)

USAGE: tuple[Row[JournalStatistics], ...] = (
    Gauge("fairlead_usage_jobs_waiting", "Finished jobs that are not in the store yet.", lambda j: j.waiting),
    Counter("fairlead_usage_jobs_written", "Finished jobs that are in the store.", lambda j: j.written),
    Counter(
        "fairlead_usage_jobs_dropped", "Finished jobs that the store will never have.", lambda j: j.dropped
    ),
)

RESPONSES: tuple[Row[KeptResponses], ...] = (
    Gauge("fairlead_kept_responses", "Responses that are kept for later requests.", lambda r: r.number),
    Gauge("fairlead_kept_responses_bytes", "Memory of kept responses.", lambda r: r.size),
)

REPLICAS: Row[int] = Gauge(
    "fairlead_replicas", "Replicas on the cluster: how many are wanted, and how many in each state.", identity
)
BUILD: Row[float] = Gauge("fairlead_build_info", "1, with the version of the server.", identity)
STATE: Row[float] = Gauge(
    "fairlead_model_state", "1 for the current state of the model, 0 for others.", identity
)
DROPPED: Row[float] = Counter(
    "fairlead_log_lines_dropped", "Log lines dropped because they could not be written in time.", identity
)
REFUSED: Row[float] = Counter(
    "fairlead_requests_refused", "Requests refused before they became jobs, by error code.", identity
)
UNREAD: Row[float] = Gauge(
    "fairlead_unread_answers_bytes", "Memory of answers that wait for their clients to read them.", identity
)
UNREAD_DROPPED: Row[float] = Counter(
    "fairlead_unread_answers_dropped", "Answers dropped because their clients did not read them.", identity
)
OUTCOMES: Row[float] = Counter(
    "fairlead_jobs", "Finished jobs: success, client_left, or the error's code.", identity
)


class ServerMetrics:
    """Collects all metrics.

    overview: takes snapshots.
    tenants: the names of tenants that have their own lines.
    responses: returns the responses that this process keeps.
    unread_bytes: returns the memory of unread answers in this process.
    """

    def __init__(
        self,
        overview: Overview,
        *,
        tenants: TenantNames,
        responses: Callable[[], KeptResponses] = KeptResponses,
        unread_bytes: Callable[[], int] = int,
    ) -> None:
        self._overview = overview
        self._tenants = tenants
        self._responses = responses
        self._unread_bytes = unread_bytes

    def pull(self, scope: Scope) -> "CollectedMetrics":
        """Return the current values that `scope` allows."""
        counts = self._overview.counts()
        jobs = scope.of_jobs(counts.jobs)
        now = scope.of_snapshot(self._overview.snapshot())
        return CollectedMetrics(
            now,
            jobs,
            counts.refusals,
            self._tenants,
            self._responses(),
            unread_bytes=self._unread_bytes(),
            dropped_answers=scope.of_tenants(counts.dropped_answers),
            usage=counts.usage,
            lines_dropped=lines_dropped(),
        )


class CollectedMetrics(Collector):
    """The values at one moment, as families of metrics.

    now: The fleet, the queue and the tokens.
    jobs: The totals of jobs.
    refusals: Requests that were refused before they became jobs, by code.
    tenants: The shown names of tenants.
    responses: What is kept of responses.
    unread_bytes: Bytes of answers that wait for their clients.
    dropped_answers: Answers that were dropped for those, by tenant.
    lines_dropped: Lines of the log that did not fit its buffer.
    """

    def __init__(
        self,
        now: Snapshot,
        jobs: JobStatistics,
        refusals: Mapping[str, int],
        tenants: TenantNames,
        responses: KeptResponses,
        *,
        unread_bytes: int,
        dropped_answers: Mapping[str, int],
        usage: JournalStatistics,
        lines_dropped: int,
    ) -> None:
        self._now = now
        self._jobs = jobs
        self._refusals = refusals
        self._tenants = tenants
        self._responses = responses
        self._unread_bytes = unread_bytes
        self._dropped_answers = dropped_answers
        self._usage = usage
        self._lines_dropped = lines_dropped
        self._process = ProcessCollector(registry=None)

    def collect(self) -> Iterator[Metric]:
        """Yield all families: the server's, and those of its process."""
        now, jobs = self._now, self._jobs
        models = now.models[:LABELS_AT_MOST]  # local ones come first; a node may report any number
        yield BUILD.family(("version",), [((VERSION,), 1.0)])
        yield from families(SERVER, (), [((), now)])
        yield from families(RESPONSES, (), [((), self._responses)])
        yield from families(USAGE, (), [((), self._usage)])
        yield UNREAD.family((), [((), self._unread_bytes)])
        dropped = [((self._shown(name),), number) for name, number in self._dropped_answers.items()]
        yield UNREAD_DROPPED.family(("tenant",), dropped)
        yield DROPPED.family((), [((), self._lines_dropped)])
        yield REFUSED.family(("code",), [((code,), number) for code, number in self._refusals.items()])
        yield from _jobs(jobs.models)
        tenants = [((self._shown(name),), tenant) for name, tenant in jobs.tenants.items()]
        yield from families(TENANTS, ("tenant",), tenants)
        yield from _models(models)
        nodes = [((node.id, node.kind), node) for node in now.nodes[:LABELS_AT_MOST]]
        yield from families(NODES, ("node", "kind"), nodes)
        yield from as_vllm(jobs.models, models, at_s=now.at_s)
        yield from self._process.collect()

    def _shown(self, tenant: str) -> str:
        return OTHER if tenant == OTHER else self._tenants.shown(tenant)


def _jobs(counts: Mapping[str, ModelCounts]) -> Iterator[Metric]:
    ended = [
        ((model, outcome), number)
        for model, of_model in counts.items()
        for outcome, number in of_model.outcomes.items()
    ]
    yield OUTCOMES.family(("model", "outcome"), ended)
    yield from families(JOBS, ("model",), [((model,), of_model) for model, of_model in counts.items()])


def _models(models: tuple[ModelStatus, ...]) -> Iterator[Metric]:
    states = [
        ((model.model, state), model.state == state) for model in models for state in get_args(ModelState)
    ]
    yield STATE.family(("model", "state"), states)
    yield from families(MODELS, ("model",), [((model.model,), model) for model in models])
    replicas = [
        ((model.model, state), number)
        for model in models
        if model.replicas is not None
        for state, number in asdict(model.replicas).items()
    ]
    yield REPLICAS.family(("model", "state"), replicas)
    engines = [((model.model,), model.engine) for model in models if model.engine is not None]
    yield from families(ENGINES, ("model",), engines)
