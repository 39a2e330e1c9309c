"""The fleet as views and telemetry use it: `Fleet` itself, or in a front its copy of the dispatcher's."""

from collections.abc import Sequence
from typing import Protocol

from fairlead.base.config import NodeConfig
from fairlead.base.requester import Requester
from fairlead.nodes.processes.output import ProcessOutput
from fairlead.router.fleet.catalog import ModelCatalog
from fairlead.router.fleet.status import ModelStatus, NodeStatus


class FleetAccess(Protocol):
    """Queries about models and nodes, and operations on them; see `Fleet`."""

    @property
    def instance(self) -> str:
        """A unique id by which this server recognizes itself."""

    @property
    def catalog(self) -> ModelCatalog:
        """The configured models."""

    def models(self) -> list[ModelStatus]:
        """Return the status of every known model."""

    def model(self, name: str, /) -> ModelStatus | None:
        """Return the status of one model; None if it is not known."""

    def nodes(self) -> Sequence[NodeStatus]:
        """Return the status of every node."""

    def expires_in_s(self, model: str, /) -> float:
        """Return the time until a loaded local model is unloaded if it gets no job; infinite: no limit."""

    def gpu_bytes(self, model: str, /) -> int:
        """Return the GPU memory that a local model takes; 0 if it is on none."""

    def offers(self, model: str, /) -> bool:
        """Return whether a job for the model may wait for a node."""

    def is_relayed(self, model: str, /) -> bool:
        """Return whether the model may run on a node that takes requests as clients write them."""

    def speaks(self, model: str, dialect: str, /) -> bool:
        """Return whether all servers that jobs for the model may be relayed to speak the dialect."""

    def output(self, model: str, /) -> ProcessOutput:
        """Return what the processes of a local model have printed."""

    # `by`: who has requested the operation, for its log lines; None: the server itself.

    async def load(self, model: str, /, *, by: Requester | None = None) -> None:
        """Load the model in its turn and return when it is ready."""

    async def unload(
        self, model: str, /, *, force: bool = False, wait: bool = False, by: Requester | None = None
    ) -> None:
        """Unload the model; return when its process is gone."""

    def keep(self, model: str, ttl_s: float, /, *, by: Requester | None = None) -> None:
        """Keep a local model loaded for this time without a job."""

    async def add_node(self, config: NodeConfig, /, *, by: Requester | None = None) -> None:
        """Add a remote node; return after its first probe."""

    async def remove_node(self, node_id: str, /, *, by: Requester | None = None) -> None:
        """Remove a remote node; return when its jobs are finished."""

    async def drain_node(self, node_id: str, /, *, by: Requester | None = None) -> None:
        """Give the remote node no more jobs, but keep it listed."""
