"""A server elsewhere as a node: jobs are relayed to it as their clients wrote them.

It is probed, and gets no work while its breaker is open. One that is itself Fairlead (its `GET /running` says
so) tells its models, seats and load.
"""

import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Protocol

import msgspec
import structlog
import trio

from fairlead.config import FiltersConfig, HealthConfig, NodeConfig, TimeoutsConfig
from fairlead.errors import FairleadError, NodeFailed
from fairlead.job import Delta, Job, Relay
from fairlead.nodes.health import Breaker, Change, watch
from fairlead.nodes.listing import LISTING, RUNNING, RemoteStatus, Running, decoded
from fairlead.nodes.node import Node, NodeLimits, NodeListener
from fairlead.nodes.relay import relay
from fairlead.nodes.sink import Room, Sink
from fairlead.nodes.upstream import Upstream, UpstreamFailed, UpstreamTimeouts

# What a node does not say is no limit of ours: it refuses what it cannot take itself.
UNLIMITED_TOKENS = 2**31
SPARE_CONNECTIONS = 4
LISTING_BYTES = 8 * 1024 * 1024
# A node that has sent everything but the body's end mark gets this long, so that its connection can stay.
LEAVE_WAIT_S = 0.02

logger = structlog.get_logger("fairlead.node")


class RemoteListener(NodeListener, Protocol):
    """Is told, besides, when a node has other models or seats than before."""

    def seats_changed(self, node: Node, limits: NodeLimits) -> None:
        """The node has these limits now, and its `models` may have changed."""


class RemoteNode:
    """Relays jobs to the server at `upstream`.

    `names` maps the models it is used for to its own names of them; None: it is asked, and has the same
    names. `seats` None: 1, or what a Fairlead reports. `health` None: nothing but `came_up` and `went_down`
    says whether it is there, and `run` is not used. `face` is the node of which the listener is told, if this
    one is only part of it.
    """

    def __init__(
        self,
        node_id: str,
        upstream: Upstream,
        listener: RemoteListener,
        *,
        names: Mapping[str, str] | None = None,
        seats: int | None = None,
        filters: FiltersConfig | None = None,
        health: HealthConfig | None = None,
        face: Node | None = None,
    ) -> None:
        self.id = node_id
        self.models = frozenset(names or ())
        self._upstream = upstream
        self._listener = listener
        self._face: Node = face or self
        self._names = None if names is None else dict(names)
        self._seats = seats
        self._filters = filters
        self._health = health
        self._breaker = self._new_breaker()
        self._limits = self._limits_of(1)
        self._probe_path = "/health"
        self._is_fairlead = False
        self._probe_answered = False
        self._running: set[_Attempt] = set()
        self._ups = self._downs = 0

    async def run(self) -> None:
        """Probe the server until cancelled; tell the listener when it comes and goes. Never raises."""
        assert self._health is not None
        try:
            await watch(self._probe, self._probed, self._health)
        finally:
            self.went_down(NodeFailed(f"{self.id} was taken out of service"))
            self._upstream.close()

    @asynccontextmanager
    async def generate(self, job: Job, into: Sink) -> AsyncIterator[None]:
        """Relay the job; leaving the block ends it. `NodeFailed` when the node is down."""
        if not self._breaker.is_up:
            raise NodeFailed(f"{self.id} is down")
        if job.relay is None:
            raise NodeFailed(f"{self.id} takes requests only as clients write them")
        attempt = _Attempt(into)
        raised: Exception | None = None
        self._running.add(attempt)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._relay, job, job.relay, attempt)
                try:
                    yield
                    await attempt.left()
                except Exception as error:  # noqa: BLE001  # it goes on as itself, not in a nursery's group
                    raised = error
                nursery.cancel_scope.cancel()
        finally:
            self._running.discard(attempt)
        if raised is not None:
            raise raised

    def status(self) -> RemoteStatus:
        """Return the picture `GET /nodes` shows."""
        return RemoteStatus(
            id=self.id,
            is_up=self._breaker.is_up,
            is_fairlead=self._is_fairlead,
            models=tuple(sorted(self.models)),
            seats=self._limits.seats,
            busy=len(self._running),
            load=self._limits.load,
            connections=self._upstream.statistics(),
            ups=self._ups,
            downs=self._downs,
        )

    # For whoever knows more than a probe could ---------------------------------------------------------

    def came_up(self) -> None:
        """The server is there: it gets work from now on."""
        self._change(self._breaker.probed(well=True), "probed well")

    def went_down(self, error: FairleadError) -> None:
        """The server is gone: the listener is told, then every job it runs fails with the error."""
        if self._breaker.is_up:
            self._breaker = self._new_breaker()
            self._listener.node_down(self._face)
        self._fail_running(error)

    # One job -----------------------------------------------------------------------------------------

    async def _relay(self, job: Job, asked: Relay, attempt: "_Attempt") -> None:
        model = job.model if self._names is None else self._names.get(job.model, job.model)
        try:
            with attempt.scope:
                await relay(self._upstream, job, asked, attempt, model=model, filters=self._filters)
                self._breaker.requested(well=True)
        except UpstreamFailed as error:
            # First the breaker, so that nobody gets this seat before it is known to be bad.
            self._running.discard(attempt)  # its own error says more than that of all others
            self._change(self._breaker.requested(well=False), error.message)
            attempt.fail(error)
        except FairleadError as error:
            self._breaker.requested(well=True)
            attempt.fail(error)
        attempt.over.set()

    def _fail_running(self, error: FairleadError) -> None:
        for attempt in list(self._running):
            attempt.fail(error)
            attempt.scope.cancel()

    # Its health --------------------------------------------------------------------------------------

    async def _probe(self) -> bool:
        """Whether the server answers; if so, what it has is up to date."""
        self._upstream.close_stale()
        self._probe_answered = False
        try:
            if not await self._is_healthy():
                return False
            if not self._breaker.is_up:
                self._is_fairlead = True  # perhaps; what comes back may be another program
            await self._look()
        except UpstreamFailed:
            return False
        return True

    async def _is_healthy(self) -> bool:
        status, _ = await self._get(self._probe_path)
        if status in (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED, HTTPStatus.NOT_IMPLEMENTED):
            other = "/v1/models" if self._probe_path == "/health" else "/health"
            self._probe_path = other
            status, _ = await self._get(other)
        return HTTPStatus.OK <= status < HTTPStatus.MULTIPLE_CHOICES

    async def _look(self) -> None:
        """Ask for models, seats and load, as far as we are to ask."""
        before = (self.models, self._limits)
        running: list[Running] | None = None
        if self._is_fairlead:
            running = decoded(await self._get("/running"), RUNNING)
            self._is_fairlead = running is not None
        if running:
            seats = sum(entry.seats for entry in running)
            taken = sum(entry.sequences + entry.waiting for entry in running)
            self._limits = self._limits_of(max(1, seats), load=taken / max(1, seats))
        else:
            self._limits = msgspec.structs.replace(self._limits, load=None)
        if self._names is None:
            listing = decoded(await self._get("/v1/models"), LISTING)
            if listing is not None:
                self.models = frozenset(listed.id for listed in listing.data)
        if self._breaker.is_up and before != (self.models, self._limits):
            self._listener.seats_changed(self._face, self._limits)

    async def _get(self, path: str) -> tuple[int, bytes]:
        async with self._upstream.exchange("GET", path) as answer:
            self._probe_answered = True
            return answer.head.status, await answer.read_all(LISTING_BYTES)

    def _probed(self, well: bool) -> None:
        assert self._health is not None
        heard_lately = trio.current_time() - self._upstream.last_heard < self._health.interval_s
        if not well and not self._probe_answered and heard_lately and self._running:
            return  # it is busy answering others: some servers do one thing at a time
        self._change(self._breaker.probed(well=well), "failed its probes" if not well else "probed well")

    def _limits_of(self, reported_seats: int, *, load: float | None = None) -> NodeLimits:
        seats = self._seats or reported_seats
        self._upstream.resize(seats + SPARE_CONNECTIONS)
        is_ours = self._face is not self
        return NodeLimits(
            seats=seats,
            max_model_len=UNLIMITED_TOKENS,
            load=load,
            evictable=is_ours,
            needs_relay=True,
        )

    def _new_breaker(self) -> Breaker:
        return Breaker(math.inf if self._health is None else self._health.failures)

    def _change(self, change: Change | None, reason: str) -> None:
        self._ups += change == "up"
        self._downs += change == "down"
        if change == "up":
            logger.info("node up", node=self.id, models=sorted(self.models), seats=self._limits.seats)
            self._listener.node_up(self._face, self._limits)
        elif change == "down":
            logger.warning("node down", node=self.id, reason=reason)
            self._upstream.close()
            self._listener.node_down(self._face)
            self._fail_running(NodeFailed(f"{self.id} is down: {reason}"))


class _Attempt:
    """A job's way to its sink. It ends with `fail`: a task may have more in hand when its node goes down."""

    __slots__ = ("_into", "_is_over", "over", "scope")

    def __init__(self, into: Sink) -> None:
        self.scope = trio.CancelScope()
        self.over = trio.Event()
        self._into = into
        self._is_over = False

    def put(self, delta: Delta) -> None:
        if not self._is_over:
            self._into.put(delta)

    def room(self) -> Room | None:
        return self._into.room()

    def fail(self, error: FairleadError) -> None:
        if not self._is_over:
            self._is_over = True
            self._into.fail(error)

    async def left(self) -> None:
        """Wait a moment for the task to come to its own end."""
        if not self.over.is_set():
            with trio.move_on_after(LEAVE_WAIT_S):
                await self.over.wait()


def remote_node(config: NodeConfig, listener: RemoteListener, health: HealthConfig) -> RemoteNode:
    """Return the node that the configuration describes."""
    names = None
    if config.models is not None:
        names = {model: config.model_names.get(model, model) for model in config.models}
    upstream = Upstream(
        config.url,
        name=config.id,
        api_key=config.api_key,
        timeouts=upstream_timeouts(config.timeouts),
    )
    # One seat is what everybody has who says nothing: a Fairlead knows better.
    seats = config.seats if config.seats > 1 else None
    return RemoteNode(
        config.id, upstream, listener, names=names, seats=seats, filters=config.filters, health=health
    )


def upstream_timeouts(config: TimeoutsConfig) -> UpstreamTimeouts:
    """Return the times with infinity for what is not to be limited."""
    endless = float("inf")
    return UpstreamTimeouts(
        connect_s=config.connect_s or endless,
        first_byte_s=config.first_byte_s or endless,
        between_bytes_s=config.between_bytes_s or endless,
        idle_s=config.idle_s or endless,
    )
