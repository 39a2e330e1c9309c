"""The status of models that run on a cluster: of what its controller reports, and of their nodes."""

from collections.abc import Callable

from msgspec.structs import replace

from fairlead.router.fleet.catalog import ModelCatalog
from fairlead.router.fleet.remote_nodes import RemoteNodes
from fairlead.router.fleet.status import ModelStatus, ReplicaCounts

ReplicaReport = tuple[ReplicaCounts, str | None]


def _no_replicas(_model: str) -> ReplicaReport:
    return ReplicaCounts(), None


class ClusterModels:
    """The configured models with replicas. Each replica is a remote node.

    `report` returns the replicas of a model, and a problem with them: it is the cluster's controller's.
    """

    def __init__(self, catalog: ModelCatalog, nodes: RemoteNodes) -> None:
        self.report: Callable[[str], ReplicaReport] = _no_replicas
        self._catalog = catalog
        self._nodes = nodes

    @property
    def are_ready(self) -> bool:
        """Whether each model that always has replicas has one that takes jobs."""
        on_cluster = self._catalog.config.cluster_models
        return all(not replicas.min or self._nodes.is_up(name) for name, (_, replicas) in on_cluster.items())

    def statuses(self) -> list[ModelStatus]:
        """Return the status of each model."""
        found = (self.status(name) for name in self._catalog.config.cluster_models)
        return [status for status in found if status is not None]

    def status(self, name: str) -> ModelStatus | None:
        """Return the status of a model; None if it does not run on the cluster."""
        if name not in self._catalog.config.cluster_models:
            return None
        counts, problem = self.report(name)
        status = self._nodes.model(name)
        if status is None:
            status = ModelStatus(
                model=name, kind="remote", node="", state="loading" if counts.starting else "stopped"
            )
        aliases = self._catalog.models[name].aliases
        return replace(status, aliases=aliases, replicas=counts, problem=status.problem or problem)
