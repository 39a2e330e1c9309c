"""All nodes of this server, and the nursery they live in."""

import trio

from fairlead.nodes.engine_node import EngineNode
from fairlead.nodes.engine_statistics import EngineNodeStatistics, EngineStatus


class Fleet:
    """Runs its nodes until cancelled. The first load of each must succeed; later deaths are its affair."""

    def __init__(self, nodes: tuple[EngineNode, ...]) -> None:
        self._nodes = nodes

    @property
    def is_ready(self) -> bool:
        """Whether every model is loaded now."""
        return all(node.is_ready for node in self._nodes)

    @property
    def problems(self) -> dict[str, str]:
        """What is wrong, by model; nothing if all is well. Loading is not being ill."""
        return {name: node.problem for node in self._nodes if node.problem for name in sorted(node.models)}

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Start every node at once; report `started` when all are ready."""
        async with trio.open_nursery() as nursery:
            async with trio.open_nursery() as starting:
                for node in self._nodes:
                    starting.start_soon(nursery.start, node.run)
            task_status.started()

    def running(self) -> list[EngineStatus]:
        """Return a picture of each node, for people."""
        return [node.status() for node in self._nodes]

    def statistics(self) -> list[EngineNodeStatistics]:
        """Return the counts of each node, for telemetry."""
        return [node.statistics() for node in self._nodes]
