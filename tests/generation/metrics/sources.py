"""Fakes of all sources of a snapshot; tests set their values."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fairlead.base.job import Job, Sampling
from fairlead.generation.gateway import Gateway
from fairlead.generation.metrics.job_metrics import FrontCounts, JobMetrics, JobStatistics
from fairlead.generation.metrics.snapshot import Overview
from fairlead.generation.timeline import SUCCESS, RequestTimeline
from fairlead.nodes.status import EngineStatus
from fairlead.router.fleet.fleet import Fleet
from fairlead.router.fleet.status import ModelStatus, NodeStatus


@dataclass
class FakeFleet(Fleet):
    """Returns the statuses that a test sets."""

    statuses: list[ModelStatus] = field(default_factory=list)
    node_statuses: list[NodeStatus] = field(default_factory=list)

    def models(self) -> list[ModelStatus]:
        return self.statuses

    def nodes(self) -> list[NodeStatus]:
        return self.node_statuses


@dataclass
class FakeGateway(Gateway):
    """Computes its statistics from `metrics` and the running requests."""

    metrics: JobMetrics = field(default_factory=JobMetrics)
    under_way: list[RequestTimeline] = field(default_factory=list)

    def statistics(self) -> JobStatistics:
        return self.metrics.statistics(self.under_way)


@dataclass
class FakeSources:
    """A server that is ready, with the statistics of its queue."""

    fleet: FakeFleet = field(default_factory=FakeFleet)
    gateway: FakeGateway = field(default_factory=FakeGateway)
    queue: dict[str, Any] = field(
        default_factory=lambda: {"waiting": 2, "running": 1, "capacity": 100, "seats": 1, "mean_wait_s": 0.5}
    )
    is_ready: bool = True
    refused: Mapping[str, int] = field(default_factory=dict)

    def ready(self) -> bool:
        return self.is_ready

    def queue_statistics(self) -> dict[str, Any]:
        return self.queue

    def counts(self) -> FrontCounts:
        return FrontCounts(self.gateway.statistics(), dict(self.refused))

    def overview(self) -> Overview:
        return Overview(
            self.fleet,
            self.counts,
            ready=self.ready,
            queue_statistics=self.queue_statistics,
        )


def engine(model: str = "m", **changes: Any) -> ModelStatus:
    """Return the status of a loaded local model."""
    settings: dict[str, Any] = {
        "kind": "engine",
        "node": f"engine:{model}",
        "state": "ready",
        "seats": 8,
    } | changes
    return ModelStatus(model=model, **settings)


def engine_status(**changes: Any) -> EngineStatus:
    """Return the state of an engine that has done nothing."""
    return EngineStatus(
        **dict.fromkeys(EngineStatus.__struct_fields__, 0)
        | {"kernel": "torch", "cache_dtype": "float32"}
        | changes
    )


def timeline(
    tenant: str = "A", model: str = "m", *, outcome: str = SUCCESS, **changes: Any
) -> RequestTimeline:
    """Return a job with 3 prompt and 5 output tokens: seat at 1 s, first delta at 3 s, end at 7 s."""
    request = {"request_id": "r-1", "prompts": ([1, 2, 3],), "sampling": Sampling(max_tokens=10)}
    options = {name: changes.pop(name) for name in list(changes) if name in Job.__struct_fields__}
    made = RequestTimeline(
        Job(**{"id": "cmpl-1", "tenant": tenant, "model": model, **request, **options}),
        arrived_s=100.0,
        began_at_ns=5_000_000_000,
    )
    made.granted_s, made.first_delta_s, made.ended_s = 101.0, 103.0, 107.0
    made.node, made.tokens, made.attempts, made.finish_reasons = f"engine:{model}", 5, 1, ("stop",)
    made.outcome = outcome
    for name, value in changes.items():
        setattr(made, name, value)
    return made
