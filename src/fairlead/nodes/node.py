"""The interface of a node, which generates: the built-in engine, a started command, or a remote server."""

from contextlib import AbstractAsyncContextManager
from typing import Literal, NamedTuple, Protocol

import msgspec

from fairlead.answer.sink import Sink
from fairlead.errors import FairleadError
from fairlead.job import Job

ModelState = Literal["stopped", "loading", "ready", "draining", "stopping", "failed"]


class NodeLimits(msgspec.Struct, frozen=True):
    """What fits a node. `max_model_len`: prompt + output tokens of one sequence; `cache_tokens`: those of all
    running sequences, None if the node does not report it.

    `load` is the load that a remote node reports, 0 or more, because it may have other clients; None if it
    reports none. `evictable`: it is local, and can be stopped to make room for another model. `needs_relay`:
    it takes requests only as clients write them, in `Job.relay`. `isolates_tenants`: the cached prefixes of
    one tenant are not used for others.
    """

    seats: int
    max_model_len: int
    cache_tokens: int | None = None
    load: float | None = None
    evictable: bool = True
    needs_relay: bool = False
    isolates_tenants: bool = False


class GpuUse(NamedTuple):
    """The memory that a process takes of a GPU, which has `total_bytes`. `device` is named as "cuda:1"."""

    device: str
    taken_bytes: int
    total_bytes: int


class NodeCounts(msgspec.Struct, frozen=True):
    """The dispatcher's view of a node that is up: the jobs that it runs, and whether it gets no more."""

    busy: int
    draining: bool


class Node(Protocol):
    """The properties of a node that the dispatcher uses."""

    @property
    def id(self) -> str:
        """The node's id, unique in the fleet."""

    @property
    def models(self) -> frozenset[str]:
        """Canonical names of the models it can generate with."""

    def generate(self, job: Job, into: Sink) -> AbstractAsyncContextManager[None]:
        """Start the job; leaving the block in any way ends it and frees what it holds.

        The answer is put into the sink. Entering may take until the end of an answer that is not streamed.
        It raises `NodeFailed` if the node is down, and `NodeFull` if it has no room; later failures go to the
        sink. A `NodeFailed` is the node's fault, and another node may succeed; any other error ends the job.
        """


class NodeListener(Protocol):
    """Is notified when a node can take jobs, or no longer can. Called synchronously, from the node's task."""

    def node_up(self, node: Node, limits: NodeLimits) -> None:
        """Note that the node is ready, with these limits."""

    def node_down(self, node: Node) -> None:
        """Note that the node is down; its jobs fail through their sinks."""

    def load_failed(self, node: Node, error: FairleadError) -> None:
        """Note that the node could not load its models."""
