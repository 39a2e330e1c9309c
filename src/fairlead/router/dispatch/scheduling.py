"""The interface of a scheduler: events of jobs, of models and of nodes, and queries.

A scheduler receives events and answers through `Effects`; `design.md` lists what it must guarantee. The
dispatcher and its parts report what happens to jobs, the fleet what happens to models and nodes. All methods
are synchronous, return at once and are called in one thread. They name nodes and models by their ids.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from random import Random
from typing import Protocol

import msgspec

from fairlead.base.config import QueueConfig
from fairlead.base.errors import FairleadError, NodesFull, QueueFull
from fairlead.nodes.limits import NodeLimits
from fairlead.router.dispatch.effects import Effects, NodeCounts, PausedModel, SchedulerStatistics
from fairlead.router.dispatch.held_sequences import ALL_AT_ONCE, HeldSequences
from fairlead.router.dispatch.job_spec import JobSpec
from fairlead.router.dispatch.node_state import NodeState
from fairlead.router.dispatch.tenant_counters import TenantCounters
from fairlead.router.dispatch.ticket import LoadRequest, Ticket
from fairlead.router.dispatch.wait_survey import QueueOrder
from fairlead.router.swap.policy import EvictionPolicy


class JobEvents(Protocol):
    """Events of jobs, each of which has a ticket."""

    def submit(self, ticket: Ticket, *, too_long: QueueFull | None = None) -> None:
        """Grant, queue or refuse a new job now. With `too_long`, refuse it with that rather than queue it."""

    def restore(
        self, ticket: Ticket, node_id: str, held: HeldSequences = ALL_AT_ONCE, *, charged: float = 0.0
    ) -> None:
        """Give a new job the seats that it holds already, without an effect. The node may come up later.

        An earlier scheduler has charged this much for it, which is in the tenant's counter.
        """

    def restore_counters(self, excess: Mapping[str, float]) -> None:
        """Record how much more service than a new tenant others have received, from an earlier scheduler."""

    def sequence_ended(self, ticket: Ticket, index: int) -> None:
        """Record that a sequence has ended, and gives its seat back before its job ends."""

    def ripened(self, ticket: Ticket, index: int) -> None:
        """Record that a sequence has run for a quantum, so that it may be suspended."""

    def seats_rested(self, node_id: str, number: int) -> None:
        """Record that a quantum has passed since `Effects.seats_freed` was called with these arguments."""

    def first_delta(self, ticket: Ticket) -> None:
        """Record that a job's answer has begun."""

    def charge(self, ticket: Ticket, cost: float) -> None:
        """Charge what a job has cost until now."""

    def finished(self, ticket: Ticket, *, cost: float) -> None:
        """End a job in whatever state, also after a disconnect; it has cost this much."""

    def requeued(self, ticket: Ticket) -> None:
        """Requeue a job after its node failed: before all others of its class, for another node if one is up.

        It is charged once and keeps its first deadline. The node is the last to get jobs until `recovered`.
        """

    def unsuited(self, ticket: Ticket) -> None:
        """Do as `requeued`, after its node refused it because of its own key or set-up.

        It never goes there again. With `NoOtherNode` it ends if all nodes that could run it have refused it.
        """

    def stale(self, ticket: Ticket) -> None:
        """Do as `requeued`, although its node has not failed: the grant was not valid there."""

    def node_failed(self, ticket: Ticket) -> None:
        """Record that a job has failed at its node; it is not queued again."""

    def recovered(self, node_id: str) -> None:
        """Record that a node has not failed for a while."""

    def rejected_by_node(
        self, ticket: Ticket, named_s: float | None = None, *, is_limit: bool = False
    ) -> None:
        """Requeue a job after its node refused it as full.

        Other jobs for its model wait, too, until the scheduler's `Effects.pause` is over; then one tries.

        named_s: the time for which the node reports this; None: it names none.
        is_limit: it answered 429.
        """

    def resume(self, pause: PausedModel) -> None:
        """Let one job try a model of a node after a pause."""

    def deadline(self, ticket: Ticket, error: FairleadError) -> None:
        """Record that a job's time to wait is over."""

    def starved(self, ticket: Ticket) -> None:
        """Record that a job has waited so long that its model takes precedence over others."""


class ModelEvents(Protocol):
    """Events of models that swaps load, and requests for them."""

    def configure_models(self, policy: EvictionPolicy, loadable: frozenset[str]) -> None:
        """Load these models from now on, and evict others for them as the policy decides."""

    def prioritize(self, priorities: Mapping[str, int]) -> None:
        """Load requested models with a higher number first; a model without a number has 0."""

    def remove_model(self, model: str, error: FairleadError | None = None) -> None:
        """Stop serving a model; what waits for it ends with the error, or with `ModelNotFound`."""

    def request_load(self, request: LoadRequest) -> None:
        """Request a model without a job."""

    def allow_eviction(self, request: LoadRequest) -> None:
        """Allow a load request to evict other models from now on."""

    def load_starved(self, request: LoadRequest) -> None:
        """Do as `starved`, for a load request."""

    def unload(self, model: str, error: FairleadError | None = None) -> None:
        """Stop a local model when its jobs have finished.

        With `error`, what waits for it ends with that: a load request, and the jobs that no other node can
        run. Otherwise the jobs wait for its next load.
        """

    def expired(self, node_id: str, used: int) -> None:
        """Unload a node's idle models after their time to live, unless its `used` has changed."""

    def stopped(self, models: frozenset[str]) -> None:
        """Record that no processes of these models are left."""

    def load_failed(self, models: frozenset[str], error: FairleadError) -> None:
        """Record that these models could not be loaded."""


class NodeEvents(Protocol):
    """Events of nodes, and of the server as a whole."""

    def node_up(self, node_id: str, models: frozenset[str], limits: NodeLimits) -> None:
        """Add a node that has these models, and its seats."""

    def node_down(self, node_id: str) -> None:
        """Remove a node and its seats."""

    def seats_changed(self, node_id: str, models: frozenset[str], limits: NodeLimits) -> None:
        """Replace a node's models and limits."""

    def close_node(self, node_id: str) -> None:
        """Give a remote node no more jobs, not even after it restarts; `node_closed` follows."""

    def reopen_node(self, node_id: str) -> None:
        """Allow a node of this name to get jobs the next time it comes up."""

    def drain(self) -> None:
        """Prepare to stop: accept no more jobs and refuse those that wait."""


class SchedulerQueries(Protocol):
    """Queries of a scheduler; they change nothing."""

    def full_error(self, job: JobSpec) -> NodesFull | None:
        """Return the error of a job that waits because all nodes that could run it are full; None if not."""

    def counters(self, lines: Iterable[str]) -> TenantCounters:
        """Return the service that the tenants of these lines have received, for a later scheduler."""

    def is_served(self, model: str) -> bool:
        """Return whether a node has the model, or a swap could load it."""

    def position(self, ticket: Ticket) -> int:
        """Return how many waiting jobs leave before this one."""

    def jobs_ahead(self, ticket: Ticket) -> list[JobSpec]:
        """Return those jobs, in the order in which they leave."""

    def waiting_jobs(self) -> list[JobSpec]:
        """Return all waiting jobs, in order of arrival."""

    def waiting(self) -> int:
        """Return the number of waiting jobs."""

    def queue_order(self) -> QueueOrder:
        """Return all waiting jobs in the order in which they leave, and where newcomers would be."""

    def has_free_seat(self, model: str, seats: int = 1) -> bool:
        """Return whether a node with the model has free seats for a job that takes so many."""

    def has_wide_jobs(self) -> bool:
        """Return whether a job waits that takes several seats."""

    def jobs_ahead_of_newcomer(
        self, model: str, line: str, priority: int, seats: int = 1
    ) -> list[JobSpec] | None:
        """Return the jobs that would leave before one that arrived now; None if its seats are free.

        `line` is that of its tenant (`JobSpec.line`).
        """

    def must_load(self, job: JobSpec) -> bool:
        """Return whether the job's model would have to be loaded for it."""

    def nodes(self) -> Collection[NodeState]:
        """Return the state of each node that is up; only the scheduler may change it."""

    def node_counts(self, node_id: str) -> NodeCounts | None:
        """Return the counts of a node; None if it is not up."""

    def statistics(self) -> SchedulerStatistics:
        """Return the current counts."""


class JobScheduler(JobEvents, ModelEvents, NodeEvents, SchedulerQueries, Protocol):
    """Decides on which node each job runs and which models are loaded. `Scheduler` is the default."""


class SchedulingOptions(msgspec.Struct, frozen=True):
    """The options of a scheduler. `random` breaks ties.

    `rejects_loading`: refuse a job rather than queue it if its model is not loaded.
    """

    queue: QueueConfig
    random: Random
    rejects_loading: bool = False


SchedulerFactory = Callable[[Effects, SchedulingOptions], JobScheduler]
