"""The part of the server's state that an API key may read.

A key that is limited to some models reads those models, the nodes that have one of them (without other models
in their lists), and its own tenants. A key for all models that is no operator's reads all models and nodes,
and only its own tenants.

Totals are those of the whole server: waiting and running jobs, seats, mean times, tokens, cache usage, errors
by code. They reveal how busy the server is with other models, but not their names, users or nodes.
"""

from collections.abc import Iterable, Mapping
from typing import TypeVar

import msgspec

from fairlead.generation.metrics.job_metrics import JobStatistics
from fairlead.generation.metrics.snapshot import Snapshot
from fairlead.router.fleet.status import ModelStatus, NodeStatus

Value = TypeVar("Value")


class Scope(msgspec.Struct, frozen=True):
    """What is visible. `models`: canonical names. `tenant`: the key's own, with its users. None: all."""

    models: frozenset[str] | None = None
    tenant: str | None = None

    def of_models(self, models: Iterable[ModelStatus]) -> tuple[ModelStatus, ...]:
        """Return the visible models."""
        return tuple(model for model in models if self.models is None or model.model in self.models)

    def of_nodes(self, nodes: Iterable[NodeStatus]) -> tuple[NodeStatus, ...]:
        """Return the visible nodes, with their visible models."""
        if self.models is None:
            return tuple(nodes)
        listed = [(node, tuple(model for model in node.models if model in self.models)) for node in nodes]
        return tuple(msgspec.structs.replace(node, models=models) for node, models in listed if models)

    def of_snapshot(self, snapshot: Snapshot) -> Snapshot:
        """Return the snapshot with the visible models and nodes."""
        if self.models is None:
            return snapshot
        return msgspec.structs.replace(
            snapshot, models=self.of_models(snapshot.models), nodes=self.of_nodes(snapshot.nodes)
        )

    def of_jobs(self, jobs: JobStatistics) -> JobStatistics:
        """Return the counts of the visible models and tenants."""
        models = {
            name: counts for name, counts in jobs.models.items() if self.models is None or name in self.models
        }
        return JobStatistics(models, self.of_tenants(jobs.tenants))

    def of_tenants(self, tenants: Mapping[str, Value]) -> dict[str, Value]:
        """Return the values of the visible tenants."""
        if self.tenant is None:
            return dict(tenants)
        users = f"{self.tenant}/"
        return {
            name: value for name, value in tenants.items() if name == self.tenant or name.startswith(users)
        }
