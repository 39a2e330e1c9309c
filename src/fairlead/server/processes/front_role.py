"""A front as a process of its own: HTTP, keys, text, and the connections to engines and other servers."""

import socket
from collections.abc import Sequence
from functools import partial
from math import ceil
from ssl import SSLContext
from typing import Any

import msgspec
import structlog
import trio
from msgspec.structs import replace

from fairlead.base.config import Config
from fairlead.base.errors import NoNode
from fairlead.base.runtime.gc_tuning import freeze
from fairlead.base.supervision import contain, keep_running
from fairlead.distributed.frontends.client import ANSWER_TIMEOUT_S, NO_ANSWER, DispatchClient
from fairlead.distributed.frontends.shared_board import RemoteBoard
from fairlead.distributed.frontends.shared_quotas import RemoteQuotas
from fairlead.distributed.frontends.shared_store import RemoteStore
from fairlead.distributed.ipc.address import LinkAddress, connect
from fairlead.distributed.ipc.handshake import shake_hands
from fairlead.distributed.supervisor import control
from fairlead.distributed.supervisor.fleet_state import FleetState
from fairlead.distributed.supervisor.fleet_view import FleetView
from fairlead.distributed.supervisor.front_nodes import FrontNodes
from fairlead.distributed.supervisor.shared_counts import CountsView
from fairlead.generation.gateway import Gateway
from fairlead.generation.request_log import RequestLog, open_request_log
from fairlead.generation.services import Services
from fairlead.generation.timeline import RequestTimeline
from fairlead.generation.usage import UsageRecorder
from fairlead.router.fleet.model_reading import read_model
from fairlead.server.descriptors import limits_within_descriptors
from fairlead.server.listener.listener import address_of, bind, serve_http
from fairlead.server.listener.shared_sockets import SharedSockets
from fairlead.server.processes.child import SupervisorLink
from fairlead.server.processes.dispatcher_role import SOCKET
from fairlead.server.routes.routes import Application
from fairlead.store.journal import UsageJournal
from fairlead.store.opening import kept_of
from fairlead.store.store import UsageWriter

COUNTS_INTERVAL_S = 1.0
# Paths that are served although no dispatcher has answered yet.
PROBES = frozenset({"/health", "/ping", "/ready", "/version"})

logger = structlog.get_logger("fairlead.distributed.frontends")


async def play(link: SupervisorLink, start: msgspec.Struct) -> None:
    """Serve until drained or cancelled.

    Raises `LoadFailed`, `ConfigError` or `OSError` if it cannot start.
    """
    assert isinstance(start, control.RunFront)
    config = of_one_front(control.unpack(start.config))
    with open_request_log(config) as request_log:
        await FrontRole(link, start, config, request_log).run()


def of_one_front(config: Config) -> Config:
    """Return the configuration of one of several fronts: each has its part of the limits.

    Responses are kept only in the store: in this front's memory another one would not find them.
    """
    limits, responses = config.limits, config.responses
    return replace(
        config,
        limits=replace(
            limits,
            connections=ceil(limits.connections / config.fronts),
            bodies_bytes=max(limits.body_bytes, limits.bodies_bytes // config.fronts),
            uploads_bytes=max(limits.upload_bytes, limits.uploads_bytes // config.fronts),
            answers_bytes=ceil(limits.answers_bytes / config.fronts),
        ),
        responses=replace(responses, store=responses.store and responses.in_store and config.has_store),
    )


class FrontRole:
    """The parts of a front's process.

    link: the connection to the supervisor.
    start: what the supervisor has ordered.
    config: the settings.
    request_log: records each job at its end.
    addresses: those of dispatchers; it connects to the one that leads.
    tls: the context for them; None: plain.
    """

    def __init__(
        self,
        link: SupervisorLink,
        start: control.RunFront,
        config: Config,
        request_log: RequestLog,
        *,
        addresses: Sequence[LinkAddress] = (),
        tls: SSLContext | None = None,
    ) -> None:
        self._link = link
        self._start = start
        self._config = config
        self._request_log = request_log
        self.address: tuple[str, int] = ("", 0)
        self._draining = trio.Event()
        self._is_stopping = False
        self._waiting: set[trio.CancelScope] = set()  # requests that came before a dispatcher
        self._tls = tls
        addresses = addresses or (LinkAddress(path=f"{start.directory}/{SOCKET}"),)
        self._client = DispatchClient([partial(self._connect, at) for at in addresses], config.queue)
        self._quotas = RemoteQuotas(self._client, timeout_s=config.queue.timeout_s)
        self._counts = CountsView(self._client)
        self._board = RemoteBoard(self._client)
        self._store = RemoteStore(self._client)
        self._usage = UsageWriter(UsageJournal())
        self._recorder: UsageRecorder | None = None

    async def run(self) -> None:
        """Serve until drained."""
        config = self._config
        async with trio.open_nursery() as nursery:
            read = partial(read_model, on_progress=lambda *_progress: None)
            view = FleetView(config, self._client, read)
            nodes = FrontNodes(
                self._start.name,
                view.catalog,
                nursery,
                view.refresh,
                on_request=partial(self._client.tell, "node_requested"),
            )
            view.on_change = partial(self._update, nodes)
            await view.prepare()
            gateway = Gateway(
                self._client,
                nodes,
                request_timeout_s=config.request_timeout_s,
                on_finished=partial(self._record, view),
            )
            app = Application(self._services(view, gateway))
            self._counts.own = app.counts
            self._store.on_keys.append(app.change_stored_keys)
            if config.has_store:
                self._recorder = UsageRecorder(
                    self._usage,
                    price_of=view.catalog.price_of,
                    budgets=lambda: view.catalog.config.budgets,
                    team_of=app.team_of,
                )
                nursery.start_soon(keep_running, "usage", self._usage.run, self._store.write)
            sockets = self._open_sockets()
            self._link.serve(partial(self._handle, view, app, sockets, nursery))
            nursery.start_soon(keep_running, "request log", self._request_log.run)
            nursery.start_soon(self._client.run)
            nursery.start_soon(keep_running, "state of the fleet", view.run)
            nursery.start_soon(keep_running, "counts", self._report_counts)
            nursery.start_soon(keep_running, "ended requests", self._board.run)
            freeze()
            sockets.listen()
            self.address = address_of(sockets.all[0])
            self._link.send(control.RoleReady())
            await serve_http(
                partial(self._serve, view, app),
                sockets.all,
                limits=limits_within_descriptors(config),
                shutdown=self._draining,
                callers=app.callers,
                wait=sockets.wait_for_connection,
            )
            if self._recorder is not None:
                await self._usage.finish(self._store.write)
            nursery.cancel_scope.cancel()

    def _open_sockets(self) -> SharedSockets:
        """Return the sockets of the supervisor, or else sockets of this front alone."""
        start = self._start
        if not start.descriptors:
            return SharedSockets([bind(self._config.host, self._config.port)], 0)
        inherited = [[socket.socket(fileno=each) for each in some] for some in start.descriptors]
        for sock in (sock for sockets in inherited for sock in sockets):
            sock.set_inheritable(False)
            sock.setblocking(False)
        return SharedSockets(inherited, start.number)

    async def _serve(self, view: FleetView, app: Application, scope: Any, receive: Any, send: Any) -> None:
        """Serve a request. All but probes wait until a dispatcher has answered, but not for ever.

        A connection whose client leaves meanwhile counts until then.
        """
        if scope["type"] == "http" and not view.has_state.is_set() and scope["path"] not in PROBES:
            wait_s = self._config.queue.timeout_s if scope["method"] == "POST" else ANSWER_TIMEOUT_S
            with trio.move_on_after(0 if self._draining.is_set() else wait_s) as waiting:
                self._waiting.add(waiting)
                try:
                    await view.has_state.wait()
                finally:
                    self._waiting.remove(waiting)
            if not view.has_state.is_set():
                await app.generation_routes.refuse(NoNode(NO_ANSWER), scope, receive, send)
                return
        await app(scope, receive, send)

    async def _report_counts(self) -> None:
        while True:
            await self._counts.refresh()
            await trio.sleep(COUNTS_INTERVAL_S)

    async def _refresh(self, view: FleetView) -> None:
        await self._counts.refresh()
        await view.refresh()

    def _update(self, nodes: FrontNodes, state: FleetState) -> None:
        nodes.update(state)
        self._quotas.update(state.usage)

    def _services(self, view: FleetView, gateway: Gateway) -> Services:
        return Services(
            config=self._config,
            gateway=gateway,
            fleet=view,
            models=view.catalog.texts,
            aliases=view.catalog.aliases,
            selectors=view.catalog.selectors,
            ready=lambda: view.is_ready,
            problems=lambda: view.problems,
            estimate=partial(self._client.ask, "estimate"),
            queue_statistics=lambda: view.queue,
            draining=self._draining.is_set,
            stopping=lambda: self._is_stopping,
            refresh=partial(self._refresh, view),
            quotas=self._quotas,
            counts=self._counts.totals,
            fronts=self._config.fronts,
            store=self._store if self._config.has_store else None,
            journal=self._usage.journal.statistics,
            board=self._board,
            kept=kept_of(self._config),
        )

    def _handle(
        self,
        view: FleetView,
        app: Application,
        sockets: SharedSockets,
        nursery: trio.Nursery,
        message: control.ToChildRole,
    ) -> None:
        match message:
            case control.StandIn(absent):
                sockets.stand_in(absent)
            case control.Stopping():
                self._is_stopping = True
            case control.Drain():
                self._draining.set()
                for waiting in self._waiting:
                    waiting.cancel()
            case control.Reload(packed):
                nursery.start_soon(
                    contain, "reload", self._reload, view, app, of_one_front(control.unpack(packed))
                )

    async def _reload(self, view: FleetView, app: Application, config: Config) -> None:
        await view.reload(config)
        app.change_keys(config.api_keys, config.teams)

    def _record(self, view: FleetView, timeline: RequestTimeline) -> None:
        self._board.record(timeline)
        self._request_log.add(timeline, view.load_times(timeline.job.model))
        if self._recorder is not None:
            self._recorder.add(timeline)

    async def _connect(self, address: LinkAddress) -> trio.abc.Stream:
        stream = await connect(address, self._tls)
        try:
            await shake_hands(stream, name=self._start.name, key=self._start.key, is_client=True)
        except BaseException:
            await trio.aclose_forcefully(stream)
            raise
        return stream
