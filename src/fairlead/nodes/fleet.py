"""All nodes of this server, and the nursery they live in."""

import trio

from fairlead.nodes.engine_node import EngineNode, EngineStatus


class Fleet:
    """Runs its nodes until cancelled. The first load of each must succeed; later deaths are its affair."""

    def __init__(self, nodes: tuple[EngineNode, ...]) -> None:
        self._nodes = nodes

    @property
    def is_ready(self) -> bool:
        """Whether every model is loaded now."""
        return all(node.is_ready for node in self._nodes)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Start every node at once; report `started` when all are ready."""
        async with trio.open_nursery() as nursery:
            async with trio.open_nursery() as starting:
                for node in self._nodes:
                    starting.start_soon(nursery.start, node.run)
            task_status.started()

    def statistics(self) -> list[EngineStatus]:
        """Return a picture of each node."""
        return [node.status() for node in self._nodes]
