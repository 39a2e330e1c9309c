"""The interface of a node, which generates: the built-in engine, a started command, or a remote server."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Literal, NamedTuple, Protocol, runtime_checkable

from fairlead.base.grant import Grant
from fairlead.base.job import Job
from fairlead.base.sequence_seats import SequenceSeats
from fairlead.nodes.limits import NodeLimits
from fairlead.nodes.streams.sink import Sink

ModelState = Literal["stopped", "loading", "ready", "draining", "stopping", "failed"]


class GpuUse(NamedTuple):
    """The memory that a process takes of a GPU, which has `total_bytes`. `device` is named as "cuda:1"."""

    device: str
    taken_bytes: int
    total_bytes: int


class Node(Protocol):
    """A node as the gateway and the fleet use it."""

    @property
    def id(self) -> str:
        """The node's id, unique in the fleet."""

    @property
    def models(self) -> frozenset[str]:
        """Canonical names of the models it can generate with."""

    def generate(
        self, job: Job, into: Sink, *, grant: Grant | None = None, seats: SequenceSeats | None = None
    ) -> AbstractAsyncContextManager[None]:
        """Start the job; leaving the block in any way ends it and frees what it holds.

        The answer is put into the sink. If it is not streamed, it may be complete when the block is entered.

        `grant` is that of the job's seat; only engines use it, and require it. A node with
        `NodeLimits.by_sequence` starts those sequences that have one of the `seats`, and gives each seat back
        whose sequence has ended; without `seats` all start at once.

        Raises `NodeFailed` if the node is down, and `NodeFull` if it has no room; later failures are put into
        the sink, also a `StaleGrant`. After a `NodeFailed` another node may succeed; any other error ends the
        job.
        """


@runtime_checkable
class GrammarNode(Protocol):
    """A node that compiles the grammars of answers itself."""

    async def prepare(self, job: Job) -> None:
        """Have the grammar of the job compiled, if it is not, before the job takes a seat.

        Raises `InvalidRequest` if it is refused, and `NodeFailed` if the node is down.
        """


# Called by a node with its limits when it is up, or when these or its models have changed; with None before
# its jobs fail because it is down. Synchronous.
NodeReport = Callable[[Node, NodeLimits | None], None]
