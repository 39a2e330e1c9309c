"""A front's copy of the fleet, which the dispatcher has: queries read it, operations are sent there."""

from collections.abc import Callable
from math import inf
from typing import Any

import msgspec
import structlog
import trio

from fairlead.base.config import Config, NodeConfig
from fairlead.base.errors import InvalidRequest, ModelNotFound, NoNode
from fairlead.base.requester import Requester
from fairlead.distributed.frontends.client import DispatchClient
from fairlead.distributed.supervisor.fleet_state import FleetState, decoded, seconds
from fairlead.nodes.processes.output import ProcessOutput
from fairlead.router.fleet.catalog import ModelCatalog, Reader
from fairlead.router.fleet.fleet import REREAD_S
from fairlead.router.fleet.status import ModelStatus, NodeStatus

REFRESH_INTERVAL_S = 0.25

logger = structlog.get_logger("fairlead.distributed.frontends")


class FleetView:
    """The `FleetAccess` of a front. `run` and `refresh` bring it up to date.

    `on_change` is called with each new state. Before the first one, when `has_state` is set, there are no
    models and no nodes, and the fleet is not ready.
    """

    def __init__(self, config: Config, client: DispatchClient, read: Reader) -> None:
        self.catalog = ModelCatalog(config, read)
        self.has_state = trio.Event()
        self.on_change: Callable[[FleetState], None] = lambda _state: None
        self._client = client
        self._state = FleetState.empty()
        self._outputs: dict[str, ProcessOutput] = {}
        self._queue: dict[str, Any] = msgspec.to_builtins(self._state.queue)

    async def prepare(self) -> None:
        """Read what a front must know of every model. Raises `LoadFailed` or `ConfigError` as `Fleet`."""
        self.catalog.apply(self.catalog.config, await self.catalog.read_all())

    async def reload(self, config: Config) -> None:
        """Use another configuration. Raises `LoadFailed`, in which case nothing has changed."""
        before = self.catalog.models
        changed = {model.name for model in config.models if before.get(model.name) != model}
        self.catalog.apply(config, await self.catalog.read_changed(config, changed))

    async def run(self) -> None:
        """Refresh regularly until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._reread_faulty)
            while True:
                await self.refresh()
                await trio.sleep(REFRESH_INTERVAL_S)

    async def _reread_faulty(self) -> None:
        """Use faulty models once their files have been repaired."""
        while True:
            await trio.sleep(REREAD_S)
            config, readings = self.catalog.config, await self.catalog.read_faulty()
            if config is self.catalog.config:
                self.catalog.apply_readings(readings)

    def _node_with_fault(self, status: NodeStatus) -> NodeStatus:
        faults = self.catalog.faults if status.kind == "engine" and status.problem is None else {}
        fault = next((faults[model] for model in status.models if model in faults), None)
        return status if fault is None else msgspec.structs.replace(status, problem=fault.message)

    def _with_fault(self, status: ModelStatus) -> ModelStatus:
        fault = self.catalog.faults.get(status.model)
        if fault is None or status.problem is not None:
            return status
        return msgspec.structs.replace(status, state="failed", problem=fault.message)

    async def refresh(self) -> None:
        """Get the current state. If the dispatcher does not answer, the last one stays."""
        try:
            state = decoded(await self._client.ask("state"))
            await self._read_output(state)
        except NoNode:
            return
        if self.has_state.is_set() and not state.knows_nodes:
            return  # models of nodes that a new dispatcher has not probed yet are served all the same
        self._state = state
        self._queue = msgspec.to_builtins(state.queue)
        self.on_change(state)
        self.has_state.set()

    # Queries -----------------------------------------------------------------------------------------

    @property
    def instance(self) -> str:
        """See `Fleet`."""
        return self._state.instance

    @property
    def is_ready(self) -> bool:
        """See `Fleet`; not without a dispatcher."""
        return self._client.is_connected and self._state.is_ready

    @property
    def problems(self) -> dict[str, str]:
        """Why models are unhealthy, by name; empty if none is."""
        return self._state.problems

    @property
    def queue(self) -> dict[str, Any]:
        """The statistics of the queue."""
        return self._queue

    def models(self) -> list[ModelStatus]:
        """See `Fleet`; the dispatcher reads no vocabularies, so it does not find faults in these."""
        return [self._with_fault(status) for status in self._state.models]

    def model(self, name: str) -> ModelStatus | None:
        """Return the status of one model; None if it is not known."""
        found = next((status for status in self._state.models if status.model == name), None)
        return None if found is None else self._with_fault(found)

    def nodes(self) -> list[NodeStatus]:
        """See `Fleet`; with the faults of `models`."""
        return [self._node_with_fault(status) for status in self._state.nodes]

    def load_times(self, model: str) -> tuple[float, float] | None:
        """Return when the load of a local model began and ended, by Trio's clock; None if not loaded."""
        local = self._state.local.get(model)
        if local is None or local.load_began_s is None or local.load_ended_s is None:
            return None
        now = trio.current_time()
        return now - local.load_began_s, now - local.load_ended_s

    def expires_in_s(self, model: str) -> float:
        """Return the time until a loaded local model is unloaded if it gets no job; infinite: no limit."""
        return seconds(self._state.local[model].expires_in_s)

    def gpu_bytes(self, model: str) -> int:
        """Return the GPU memory that a local model takes; 0 if it is on none."""
        return self._state.local[model].gpu_bytes

    def has(self, model: str) -> bool:
        """Return whether a node has the model or could load it."""
        return model in self.catalog.models or self._is_remote(model)

    def offers(self, model: str) -> bool:
        """Return whether a job for the model may wait for a node; not if all that have it are drained."""
        if model in self.catalog.models:
            return True
        return any(model in node.models and not node.is_withdrawn for node in self._state.remote)

    def is_relayed(self, model: str) -> bool:
        """Return whether the model may run on a node that takes requests as clients write them."""
        config = self.catalog.models.get(model)
        return (config is not None and config.is_relayed) or self._is_remote(model)

    def speaks(self, model: str, dialect: str) -> bool:
        """Return whether all servers that jobs for the model may be relayed to speak the dialect."""
        config = self.catalog.models.get(model)
        local = config is None or not config.is_relayed or dialect in config.dialects
        return local and all(
            node.dialects is None or dialect in node.dialects
            for node in self._state.remote
            if model in node.models
        )

    def output(self, model: str) -> ProcessOutput:
        """Return what the processes of a local model have printed."""
        if model in self._outputs:
            return self._outputs[model]
        if self._is_remote(model):
            raise InvalidRequest(f"the model {model} is on another server", param="model")
        raise ModelNotFound(f"the model {model} is not served here", param="model")

    # Operations --------------------------------------------------------------------------------------

    async def load(self, model: str, *, by: Requester | None = None) -> None:
        """Load the model in its turn and return when it is ready; join a load that is under way."""
        await self._order("load", model, by)

    async def unload(
        self, model: str, *, force: bool = False, wait: bool = False, by: Requester | None = None
    ) -> None:
        """Unload the model; return when its process is gone."""
        await self._order("unload", model, force, wait, by)

    def keep(self, model: str, ttl_s: float, *, by: Requester | None = None) -> None:
        """Keep a local model loaded for this time without a job; see `ModelLifecycle.keep`."""
        self._client.tell("keep", model, ttl_s, by)

    async def add_node(self, config: NodeConfig, *, by: Requester | None = None) -> None:
        """Add a remote node; return after its first probe, whether that succeeded or not."""
        await self._order("add_node", msgspec.to_builtins(config), by)

    async def remove_node(self, node_id: str, *, by: Requester | None = None) -> None:
        """Remove a remote node; return when its jobs are finished."""
        await self._order("remove_node", node_id, by)

    async def drain_node(self, node_id: str, *, by: Requester | None = None) -> None:
        """Give the remote node no more jobs, but keep it listed."""
        await self._order("drain_node", node_id, by)

    # Helpers -----------------------------------------------------------------------------------------

    def _is_remote(self, model: str) -> bool:
        return any(model in node.models for node in self._state.remote)

    async def _order(self, order: str, *arguments: Any) -> None:
        await self._client.ask(order, *arguments, timeout_s=inf)

    async def _read_output(self, state: FleetState) -> None:
        """Get the lines that models' processes have printed since the last refresh."""
        for model, local in state.local.items():
            output = self._outputs.setdefault(model, ProcessOutput())
            if output.end > local.printed:  # of a new dispatcher
                output = self._outputs[model] = ProcessOutput()
            if output.end < local.printed:
                begin, lines = await self._client.ask("output", model, output.end)
                output.end = max(output.end, begin)
                for line in lines:
                    output.add(line)
        for model in self._outputs.keys() - state.local.keys():
            del self._outputs[model]
