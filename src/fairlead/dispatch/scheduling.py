"""What a scheduler is, in four small interfaces: events of jobs, of models, and of nodes; and questions.

A scheduler is told what happens and answers through `Effects`; `design.md` says what it must promise. The
dispatcher is the only caller of most of this, `Upkeep` of some events of models, `Outlook` of the questions.
All methods are synchronous, return at once and are called in one thread.
"""

from collections.abc import Callable, Collection, Mapping
from random import Random
from typing import Protocol

import msgspec

from fairlead.config import QueueConfig
from fairlead.dispatch.effects import Effects, SchedulerStatistics
from fairlead.dispatch.placement import Place
from fairlead.dispatch.ticket import Ticket, Wish
from fairlead.errors import FairleadError, QueueFull, QueueTimeout
from fairlead.job import Job
from fairlead.nodes.node import Node, NodeLimits
from fairlead.swap.policy import EvictionPolicy


class JobEvents(Protocol):
    """What happens to jobs, each of which has a ticket."""

    def submit(self, ticket: Ticket, *, too_long: QueueFull | None = None) -> None:
        """A job arrives; grant, queue or refuse it now. With `too_long`, refuse rather than queue it."""

    def first_delta(self, ticket: Ticket) -> None:
        """A job's answer has begun."""

    def charge(self, ticket: Ticket, cost: float) -> None:
        """A job has cost this much until now."""

    def finished(self, ticket: Ticket, *, cost: float) -> None:
        """A job is over, or its client is gone, in whatever state it was; it has cost this much."""

    def returned(self, ticket: Ticket) -> None:
        """A job's node failed: it may run on another."""

    def turned_away(self, ticket: Ticket) -> None:
        """A job's node had no room after all, and has none until `has_room`."""

    def has_room(self, place: Place) -> None:
        """A node that turned a job away may have room again."""

    def deadline(self, ticket: Ticket, error: QueueTimeout) -> None:
        """A job's time to wait is over."""

    def starved(self, ticket: Ticket) -> None:
        """A job has waited so long that its model should be loaded before others are used further."""


class ModelEvents(Protocol):
    """What happens to models that swaps load, and what is wanted of them."""

    def arrange(self, policy: EvictionPolicy, loadable: frozenset[str]) -> None:
        """Load these models from now on, and make room for them as the policy decides."""

    def prefer(self, priorities: Mapping[str, int]) -> None:
        """Load models with a higher number first; 0 for those without."""

    def forget(self, model: str, error: FairleadError | None = None) -> None:
        """A model is not served any more; what waits for it ends with the error, or `ModelNotFound`."""

    def wish(self, wish: Wish) -> None:
        """A model is wanted without a job."""

    def strengthen(self, wish: Wish) -> None:
        """The wish may evict other models from now on."""

    def wish_starved(self, wish: Wish) -> None:
        """As `starved`, for a wish."""

    def unload(self, model: str, error: FairleadError | None = None) -> None:
        """Stop a model when its jobs are over. With `error`, what waits for it ends with that."""

    def expired(self, place: Place, used: int) -> None:
        """A place has had no job for the time to live of its models, unless its `used` has changed."""

    def gone(self, models: frozenset[str]) -> None:
        """Nothing is left of the processes of these models."""

    def load_failed(self, node: Node, error: FairleadError) -> None:
        """A node could not load its models."""


class NodeEvents(Protocol):
    """What happens to nodes, and to the server as a whole."""

    def node_up(self, node: Node, limits: NodeLimits) -> None:
        """A node has seats."""

    def node_down(self, node: Node) -> None:
        """A node is gone, and its seats with it."""

    def seats_changed(self, node: Node, limits: NodeLimits) -> None:
        """A node has other limits than before."""

    def close(self, node_id: str) -> None:
        """Give a node elsewhere no more jobs, after a restart of it neither."""

    def reopen(self, node_id: str) -> None:
        """A node of this name may have jobs again when it comes up."""

    def drain(self) -> None:
        """The server is to stop: take no more jobs and refuse those that wait."""


class SchedulerQuestions(Protocol):
    """What can be asked of a scheduler; the answers change nothing."""

    def position(self, ticket: Ticket) -> int:
        """Return how many waiting jobs leave before this one."""

    def jobs_ahead(self, ticket: Ticket) -> list[Job]:
        """Return those jobs, in the order in which they leave."""

    def waiting_jobs(self) -> list[Job]:
        """Return all waiting jobs, in the order of their arrival."""

    def foretell(self, model: str, tenant: str, priority: int) -> list[Job] | None:
        """Return the jobs that would leave before one that came now; None if a seat is free for it."""

    def must_load(self, job: Job) -> bool:
        """Return whether the job's model would have to be loaded for it."""

    def place(self, node_id: str) -> Place | None:
        """Return the place of a node that is up."""

    def places(self) -> Collection[Place]:
        """Return the places of all nodes that are up."""

    def statistics(self) -> SchedulerStatistics:
        """Return the counts now."""


class JobScheduler(JobEvents, ModelEvents, NodeEvents, SchedulerQuestions, Protocol):
    """Decides on which node each job runs and which models are loaded. `Scheduler` is the default."""


class SchedulingOptions(msgspec.Struct, frozen=True):
    """What a scheduler is made with. `random` breaks ties.

    `rejects_loading`: no job waits for its model to be loaded.
    """

    queue: QueueConfig
    random: Random
    rejects_loading: bool = False


SchedulerFactory = Callable[[Effects, SchedulingOptions], JobScheduler]
