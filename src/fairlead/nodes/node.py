"""What a node is. Something that generates: the built-in engine, a command we start, a remote server."""

from contextlib import AbstractAsyncContextManager
from typing import Protocol

import msgspec

from fairlead.errors import FairleadError
from fairlead.job import Job
from fairlead.nodes.sink import Sink


class NodeLimits(msgspec.Struct, frozen=True):
    """What fits a node. `max_model_len`: prompt + output tokens of one sequence; `cache_tokens`: of all that
    run at once, None if the node does not say.

    `load` is how busy a node elsewhere says that it is, 0…, for it may have other clients than us; None if it
    does not say. `evictable`: it is ours, and can be stopped so that another model has its room.
    `needs_relay`: it takes requests only as clients write them, in `Job.relay`. `isolates_tenants`: what it
    has cached of one tenant's prompts is not for others.
    """

    seats: int
    max_model_len: int
    cache_tokens: int | None = None
    load: float | None = None
    evictable: bool = True
    needs_relay: bool = False
    isolates_tenants: bool = False


class NodeCounts(msgspec.Struct, frozen=True):
    """What the dispatcher counts of a node that is up: its jobs, and whether it gets no more of them."""

    busy: int
    draining: bool


class Node(Protocol):
    """The dispatcher does not know more about a node than this."""

    @property
    def id(self) -> str:
        """Unique in the fleet."""

    @property
    def models(self) -> frozenset[str]:
        """Canonical names of the models it can generate with."""

    def generate(self, job: Job, into: Sink) -> AbstractAsyncContextManager[None]:
        """Start the job; leaving the block, however, ends it and frees what it holds.

        Its answer is put into the sink. Entering may take as long as an answer that comes whole, and raises
        `NodeFailed` when the node is not there, `NodeFull` when it has no room; later failures come through
        the sink. A `NodeFailed` is the node's own fault, and another may do better; any other error is the
        job's end.
        """


class NodeListener(Protocol):
    """Whom a node tells that it can take jobs, or no longer. Called synchronously, from the node's task."""

    def node_up(self, node: Node, limits: NodeLimits) -> None:
        """The node is ready and has these seats."""

    def node_down(self, node: Node) -> None:
        """The node is gone; its jobs fail through their sinks."""

    def load_failed(self, node: Node, error: FairleadError) -> None:
        """The node tried to load its models and could not."""
