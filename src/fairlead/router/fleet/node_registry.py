"""The nodes that are up, by id: they report to it, and jobs find the node of their seat in it."""

from fairlead.base.errors import NodeFailed
from fairlead.nodes.limits import NodeLimits
from fairlead.nodes.node import Node
from fairlead.router.dispatch.scheduling import JobScheduler


class NodeRegistry:
    """Passes the reports of nodes to the scheduler, which uses only their ids."""

    def __init__(self, scheduler: JobScheduler) -> None:
        self._scheduler = scheduler
        self._nodes: dict[str, Node] = {}

    def __len__(self) -> int:
        """Return the number of nodes that are up."""
        return len(self._nodes)

    def find(self, node_id: str) -> Node:
        """Return a node. Raises `NodeFailed` if it is not up, as after a failure since the seat's grant."""
        node = self._nodes.get(node_id)
        if node is None:
            raise NodeFailed(f"{node_id} is down")
        return node

    def serving(self, model: str) -> list[Node]:
        """Return the nodes that have the model."""
        return [node for node in self._nodes.values() if model in node.models]

    def report(self, node: Node, limits: NodeLimits | None) -> None:
        """Add or change a node that is up, with its limits; without limits, remove it. See `NodeReport`.

        A node that the scheduler has evicted meanwhile is added again.
        """
        if limits is None:
            self.remove(node.id)
        elif self._nodes.get(node.id) is node and self._scheduler.node_counts(node.id) is not None:
            self._scheduler.seats_changed(node.id, node.models, limits)
        else:
            self._nodes[node.id] = node
            self._scheduler.node_up(node.id, node.models, limits)

    def remove(self, node_id: str) -> None:
        """Remove a node, if it is up; its seats are gone before its jobs fail."""
        self._nodes.pop(node_id, None)
        self._scheduler.node_down(node_id)
