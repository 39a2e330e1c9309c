"""A remote server as a node: jobs are relayed to it as their clients wrote them, if it speaks their dialect.

It is probed, and gets no work while its circuit breaker is open. Its running jobs go on meanwhile: each ends
by its own connection or limit, or with all others when probes find the server dead.
"""

import hashlib
import math
import ssl
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Literal

import structlog
import trio
from msgspec.structs import asdict, replace

from fairlead.base.config import ANSWER_BYTES, FiltersConfig, HealthConfig, NodeConfig, TimeoutsConfig
from fairlead.base.errors import FairleadError, NodeFailed
from fairlead.base.grant import Grant
from fairlead.base.job import Job, Relay
from fairlead.base.sequence_seats import SequenceSeats
from fairlead.nodes.http.client import LocalShortage, Upstream, UpstreamFailed, UpstreamTimeouts
from fairlead.nodes.limits import NodeLimits
from fairlead.nodes.node import NodeReport
from fairlead.nodes.processes.health import Breaker, Change, HealthCheck, Outcome, watch
from fairlead.nodes.running_relays import RunningRelays
from fairlead.nodes.server_probe import THIS_SERVER, ServerProbe, ServerReport
from fairlead.nodes.status import RemoteStatus
from fairlead.nodes.streams.relay import relay
from fairlead.nodes.streams.relay_sink import RelaySink
from fairlead.nodes.streams.sink import Sink

# A remote node reports no such limit. It refuses what it cannot take.
UNLIMITED_TOKENS = 2**31
SPARE_CONNECTIONS = 4
MODELS_LOGGED = 20
UNANSWERED = "it does not answer its probes"

logger = structlog.get_logger("fairlead.node")


class RemoteNode:
    """Relays jobs to the server at `upstream`.

    `names` maps the models it is used for to its own names of them. None: its models are queried, and the
    names are the same. `seats` None: 1, or what a Fairlead reports. `health` None: only `came_up` and
    `went_down` change whether it is up, and `run` is not used. `filters` and `answer_bytes` are as for
    `relay`, and so are `dialects`, but a Fairlead speaks all. `evictable` is as in `NodeLimits`,
    `own_instance` and `check_endpoint` as in `ServerProbe`. `on_request` is called with the outcome of each
    request, and its tenant. A Fairlead gets tenants under hashes with `alias_key`, its API key.

    `was_probed` is set after the first probe, whatever its result. `deaths`: how often its probes have found
    that the server is dead, the latest time at `died_at`.
    """

    def __init__(
        self,
        node_id: str,
        upstream: Upstream,
        report: NodeReport,
        *,
        names: Mapping[str, str] | None = None,
        seats: int | None = None,
        filters: FiltersConfig | None = None,
        answer_bytes: int = ANSWER_BYTES,
        dialects: Collection[str] | None = None,
        health: HealthConfig | None = None,
        evictable: bool = False,
        own_instance: str | None = None,
        check_endpoint: str | None = None,
        on_request: Callable[[Outcome, str], None] = lambda _outcome, _tenant: None,
        alias_key: str | None = None,
    ) -> None:
        self.id = node_id
        self._set_models(frozenset(names or ()))
        self.was_probed = trio.Event()
        self._upstream = upstream
        self._report = report
        self._is_evictable = evictable
        self._names = None if names is None else dict(names)
        self._seats = seats
        self._dialects = dialects
        self._relay_job = partial(relay, upstream, filters=filters, answer_bytes=answer_bytes)
        self._alias_key = alias_key or ""
        self._health = None if health is None else HealthCheck(health)
        self._server = ServerProbe(
            node_id,
            upstream,
            requests_models=names is None,
            own_instance=own_instance,
            check_endpoint=check_endpoint,
        )
        self._list_problem: str | None = None
        self._logged_problem: str | None = None
        self._breaker = self._new_breaker()
        self._limits = self._limits_of(1)
        self._reported: Literal["up", "closed", "down"] = "down"  # closed: to new jobs
        self._is_healthy = False  # at its latest probe
        self._probe_problem: str | None = None
        self._on_request = on_request
        self.deaths = 0
        self.died_at = -math.inf
        self._relays = RunningRelays(node_id, self._exchange)
        self._ups = self._downs = 0

    @property
    def is_this_server(self) -> bool:
        """Whether the latest probe has found that it is this server itself."""
        return self._server.is_this_server

    @property
    def is_dead(self) -> bool:
        """Whether its probes have found that the server is dead."""
        return self._breaker.is_dead

    @property
    def dialects(self) -> Collection[str] | None:
        """The dialects that it speaks; None: all."""
        return None if self._server.is_fairlead else self._dialects

    async def run(self) -> None:
        """Probe the server until cancelled; report when it comes up or goes down.

        May be called again after it has raised, which only a bug can cause.
        """
        assert self._health is not None
        try:
            await watch(self._probe, self._probed, self._health)
        finally:
            self.was_probed.set()
            self._upstream.close()
            self.went_down(NodeFailed(f"{self.id} was taken out of service"))

    def generate(
        self,
        job: Job,
        into: Sink,
        *,
        grant: Grant | None = None,  # noqa: ARG002  its server has a queue of its own
        seats: SequenceSeats | None = None,  # noqa: ARG002  it runs all sequences of a job at once
    ) -> AbstractAsyncContextManager[None]:
        """Relay the job; leaving the block ends it. Raises `NodeFailed` if the node is down."""
        if not self._breaker.is_up:
            raise NodeFailed(f"{self.id} is down")
        if job.relay is None:
            raise NodeFailed(f"{self.id} takes requests only as clients write them")
        return self._relays.relay(job, job.relay, into)

    def change_health(self, health: HealthConfig) -> None:
        """Use another health check from now on."""
        assert self._health is not None
        self._health.change(health)
        self._breaker.failures = health.failures

    def change_check_endpoint(self, path: str | None) -> None:
        """Probe it at another path from now on; see `ServerProbe`."""
        self._server.use(path)

    def status(self) -> RemoteStatus:
        """Return the status that `GET /nodes` shows."""
        return RemoteStatus(
            id=self.id,
            is_up=self._breaker.is_up,
            is_fairlead=self._server.is_fairlead,
            models=self._sorted_models,
            seats=self._limits.seats,
            busy=len(self._relays),
            load=self._limits.load,
            connections=self._upstream.statistics(),
            ups=self._ups,
            downs=self._downs,
            problem=self._problem(),
        )

    # For callers with newer information than a probe --------------------------------------------------

    def close_if_idle(self) -> bool:
        """Close its connections if it runs no job; return whether it runs none."""
        if len(self._relays):
            return False
        self._upstream.close()
        return True

    def came_up(self) -> None:
        """Record that the server is up: it gets work from now on."""
        self._change(self._breaker.probed(succeeded=True), "probe succeeded")

    def went_down(self, error: FairleadError) -> None:
        """Record that the server is down: report that, then fail every job it runs with the error."""
        self._breaker = self._new_breaker()
        self._fail(error)

    def requested(self, outcome: Outcome, tenant: str) -> None:
        """Count a request of a tenant. It decides about new jobs only."""
        change = self._breaker.requested(outcome, tenant, at=trio.current_time())
        self._change(change, "its latest requests failed")

    def found_dead(self, error: FairleadError, *, at: float, silent_s: float) -> None:
        """Fail jobs that began before `at`, when another process's probes had got no answer.

        Some servers handle one request at a time. So nothing happens if it has sent any bytes in the last
        `silent_s` seconds.
        """
        if trio.current_time() - self._upstream.last_received_at >= silent_s:
            self._upstream.close()
            self._relays.fail_all(error, began_before=at)

    # One job -----------------------------------------------------------------------------------------

    async def _exchange(self, job: Job, request: Relay, sink: RelaySink) -> None:
        sink.on_progress = partial(self._count_request, "progressed", job.tenant)
        model = job.model if self._names is None else self._names.get(job.model, job.model)
        try:
            with sink.scope:
                dialects = self.dialects
                # Another Fairlead keeps tenants apart only if it is told of them.
                user = _alias_of(job.tenant, self._alias_key) if dialects is None else None
                await self._relay_job(job, request, sink, model=model, dialects=dialects, user=user)
                self._count_request("succeeded", job.tenant)
        except LocalShortage as error:
            sink.fail(error)  # not a failure of the node
        except UpstreamFailed as error:
            # The breaker first, so that no other job gets this seat.
            self._count_request("failed", job.tenant)
            sink.fail(error)
        except FairleadError as error:
            self._count_request("succeeded", job.tenant)  # it has answered
            sink.fail(error)

    def _count_request(self, outcome: Outcome, tenant: str) -> None:
        self.requested(outcome, tenant)
        self._on_request(outcome, tenant)

    def _close(self) -> None:
        """Report that the node gets no more jobs for now. It keeps those that it has, and their seats."""
        if self._reported == "up":
            self._report(self, replace(self._limits, seats=0))
            self._reported = "closed"

    def _fail(self, error: FairleadError) -> None:
        """Report that the node is down, then fail its jobs: none of them may get a seat on it again."""
        try:
            if self._reported != "down":
                self._report(self, None)
                self._reported = "down"
        finally:
            self._relays.fail_all(error)

    # Its health --------------------------------------------------------------------------------------

    async def _probe(self) -> bool:
        """Return whether the server answers; if so, refresh its models and limits."""
        try:
            report = await self._server.probe()
        except LocalShortage:
            return self._breaker.is_up  # no request was sent: its state stays
        except UpstreamFailed:
            return False
        if report is not None:
            self._apply(report)
        return report is not None

    def _apply(self, report: ServerReport) -> None:
        self._list_problem = report.problem
        before = (self.models, self._limits)
        if report.load is not None and report.load.seats:
            self._limits = self._limits_of(report.load.seats, load=report.load.load)
        else:
            self._limits = replace(self._limits, load=None)
        if report.models is not None and report.models != self.models:
            self._set_models(report.models)
        if self._breaker.is_up and before != (self.models, self._limits):
            self._report(self, self._limits)

    def _problem(self) -> str | None:
        if self._breaker.is_up:
            return self._list_problem
        if self.is_this_server:
            return THIS_SERVER
        if self._is_healthy:
            return "its latest requests failed"
        return self._probe_problem or UNANSWERED

    def _set_models(self, models: frozenset[str]) -> None:
        self.models = models
        # Kept sorted, because a snapshot of the fleet reads the list once for each model in it.
        self._sorted_models = tuple(sorted(models))

    def _probed(self, succeeded: bool) -> None:
        assert self._health is not None
        self.was_probed.set()
        received_lately = (
            trio.current_time() - self._upstream.last_received_at < self._health.config.interval_s
        )
        if not succeeded and not self._server.has_answered and received_lately and self._relays:
            return  # it is busy with other requests: some servers handle one at a time
        self._is_healthy, answered = succeeded, self._server.has_answered
        self._probe_problem = None if succeeded else self._server.problem
        self._log_problem(self._list_problem if succeeded else self._probe_problem)
        reason = "probe succeeded" if succeeded else f"failed its probes: {self._probe_problem}"
        self._change(self._breaker.probed(succeeded=succeeded, answered=answered), reason)
        # If the first report has raised:
        if self._breaker.is_dead and self._reported != "down":
            self._fail(NodeFailed(f"{self.id} is down"))
        elif not self._breaker.is_up:
            self._close()

    def _log_problem(self, problem: str | None) -> None:
        """Log why a probe has failed, or that it has succeeded again, if that is new."""
        if problem != self._logged_problem:
            self._logged_problem = problem
            if problem is None:
                logger.info("probe succeeded", node=self.id)
            else:
                logger.warning("probe failed", node=self.id, reason=problem)

    def _limits_of(self, reported_seats: int, *, load: float | None = None) -> NodeLimits:
        seats = self._seats or reported_seats
        self._upstream.resize(seats + SPARE_CONNECTIONS)
        return NodeLimits(
            seats=seats,
            max_model_len=UNLIMITED_TOKENS,
            load=load,
            evictable=self._is_evictable,
            needs_relay=True,
        )

    def _new_breaker(self) -> Breaker:
        return Breaker(math.inf if self._health is None else self._health.config.failures)

    def _change(self, change: Change | None, reason: str) -> None:
        self._ups += change == "up"
        self._downs += change in ("down", "dead") and self._reported == "up"
        if change == "up":
            models = [*self._sorted_models[:MODELS_LOGGED]]
            logger.info("node up", node=self.id, models=models, seats=self._limits.seats)
            self._reported = "up"
            self._report(self, self._limits)
        elif change is not None:
            logger.warning("node down", node=self.id, reason=reason, running=len(self._relays))
            self._upstream.close()
            if change == "dead":
                self.deaths += 1
                self.died_at = trio.current_time()
                self._fail(NodeFailed(f"{self.id} is down: {reason}"))
            else:
                self._close()


def remote_node(
    config: NodeConfig,
    report: NodeReport,
    health: HealthConfig,
    own_instance: str | None = None,
    *,
    may_be_restricted: bool = True,
) -> RemoteNode:
    """Return the node that the configuration describes.

    `own_instance` is as for `RemoteNode`, and `may_be_restricted` as for `Upstream`.
    """
    names = None
    if config.models is not None:
        names = {model: config.model_names.get(model, model) for model in config.models}
    upstream = Upstream(
        config.url,
        name=config.id,
        api_path=config.api_path,
        api_key=config.api_key,
        speaks_messages="messages" in config.dialects,
        timeouts=upstream_timeouts(config.timeouts),
        tls=node_tls(config),
        may_be_restricted=may_be_restricted,
    )
    # 1 is the default: then the seats that a Fairlead reports are used instead.
    seats = config.seats if config.seats > 1 else None
    return RemoteNode(
        config.id,
        upstream,
        report,
        names=names,
        seats=seats,
        filters=config.filters,
        answer_bytes=config.answer_bytes,
        dialects=config.dialects,
        health=config.health_check or health,
        own_instance=own_instance,
        check_endpoint=config.check_endpoint,
        alias_key=config.api_key,
    )


def node_tls(config: NodeConfig) -> ssl.SSLContext | None:
    """Return the TLS settings of a node with authorities of its own; None: the default ones."""
    return None if config.ca_file is None else ssl.create_default_context(cafile=config.ca_file)


def upstream_timeouts(config: TimeoutsConfig) -> UpstreamTimeouts:
    """Return the timeouts, with infinity for those that are not limited."""
    return UpstreamTimeouts(**{name: limit_s or math.inf for name, limit_s in asdict(config).items()})


def _alias_of(tenant: str, key: str) -> str:
    """Return a name of a tenant for another server, which is valid in a header and does not reveal it."""
    encoded = tenant.encode(errors="surrogatepass")
    return hashlib.blake2b(encoded, key=hashlib.sha256(key.encode()).digest(), digest_size=16).hexdigest()
