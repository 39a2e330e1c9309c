"""What a node is. Something that generates: the built-in engine, a command we start, a remote server."""

from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Protocol

import msgspec

from fairlead.errors import FairleadError
from fairlead.job import Job

if TYPE_CHECKING:
    # The scheduler, which is pure, needs to know what a node is but not the channel that lives in Trio.
    from fairlead.nodes.deltas import Deltas


class NodeLimits(msgspec.Struct, frozen=True):
    """What fits a node. `max_model_len`: prompt + output tokens of one sequence; `cache_tokens`: of all that
    run at once, None if the node does not say.
    """

    seats: int
    max_model_len: int
    cache_tokens: int | None = None


class Node(Protocol):
    """The dispatcher does not know more about a node than this."""

    @property
    def id(self) -> str:
        """Unique in the fleet."""

    @property
    def models(self) -> frozenset[str]:
        """Canonical names of the models it can generate with."""

    def generate(self, job: Job) -> "AbstractAsyncContextManager[Deltas]":
        """Start the job's sequences; leaving the block, however, ends them and frees what they hold.

        Entering raises `NodeFailed` when the node is not there. Later failures come through the deltas.
        """


class NodeListener(Protocol):
    """Whom a node tells that it can take jobs, or no longer. Called synchronously, from the node's task."""

    def node_up(self, node: Node, limits: NodeLimits) -> None:
        """The node is ready and has these seats."""

    def node_down(self, node: Node) -> None:
        """The node is gone; its jobs fail through their deltas."""

    def load_failed(self, node: Node, error: FairleadError) -> None:
        """The node tried to load its models and could not."""
