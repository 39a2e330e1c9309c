"""The composition root: the only module that depends on all packages.

Fleet ⊃ dispatcher ⊃ HTTP. To shut down, `serve` returns: the listener drains, the contexts unwind, and the
child processes end with the fleet's nursery.
"""

import signal
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from random import Random
from typing import Protocol

import msgspec
import structlog
import trio

from fairlead.base.config import UNIX_PREFIX, Config, ConfigError
from fairlead.base.errors import FairleadError
from fairlead.base.runtime import interpreter
from fairlead.base.runtime.gc_tuning import freeze
from fairlead.base.supervision import FailureBoundary, keep_running, log_failure, unwrap
from fairlead.base.telemetry import logs
from fairlead.distributed.ray.launcher_process import refuse_without_ray
from fairlead.distributed.ray.running import run_cluster
from fairlead.generation.gateway import Gateway
from fairlead.generation.metrics.board import RequestBoard
from fairlead.generation.request_log import RequestLog, open_request_log
from fairlead.generation.services import Services
from fairlead.generation.timeline import RequestTimeline
from fairlead.generation.usage import UsageRecorder
from fairlead.router.dispatch.dispatcher import Dispatcher
from fairlead.router.fleet.fleet import Fleet
from fairlead.router.fleet.model_reading import read_model
from fairlead.router.fleet.node_registry import NodeRegistry
from fairlead.router.fleet.reload import ConfigSource, watch_config
from fairlead.router.quotas.budgets import Budgets, subjects_of
from fairlead.server.descriptors import limits_within_descriptors, raise_limit
from fairlead.server.listener.listener import address_of, bind, serve_http
from fairlead.server.routes.routes import Application
from fairlead.store.journal import UsageJournal
from fairlead.store.opening import kept_of, store_of
from fairlead.store.store import StoreKeeper, UsageWriter

logger = structlog.get_logger("fairlead.server.app")


class ServerObserver(Protocol):
    """Reports progress to the person at the terminal."""

    def loading(self, model: str, fraction: float | None, stage: str) -> None:
        """Report how far a model is loaded: 0…1; None: not known."""

    def ready(self, url: str, models: Sequence[str]) -> None:
        """Report that the server answers at this address and every model is loaded."""

    def failed(self, model: str, reason: str) -> None:
        """Report that the server cannot start; it ends after this."""

    def stopping(self) -> None:
        """Report that the server takes no more requests and finishes those it has."""


def run(config: Config, announcer: ServerObserver, source: ConfigSource | None = None) -> int:
    """Serve until SIGINT or SIGTERM; return the exit code: 0 success, 1 failure, 2 bad configuration."""
    interpreter.prepare()
    names = ", ".join(model.name for model in config.models)
    with logs.log_streams():
        logs.configure(json=config.log_json, level=config.log_level)
        raise_limit()
        try:
            with open_request_log(config) as request_log:
                trio.run(
                    partial(serve, config, announcer, source=source, request_log=request_log),
                    strict_exception_groups=True,
                )
        except (Exception, BaseExceptionGroup) as error:
            cause = unwrap(error)
            if isinstance(cause, FairleadError | ConfigError | OSError):
                announce(announcer.failed, names, str(cause))
                return 2 if isinstance(cause, ConfigError) else 1
            raise
    return 0


async def serve(
    config: Config,
    announcer: ServerObserver,
    *,
    source: ConfigSource | None = None,
    request_log: RequestLog | None = None,
    task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Bind, load, serve, drain. Call `started()` with the server's address when preloading is over.

    config: the settings.
    announcer: what tells the user about the server's states.
    source: what reads the configuration again on a reload; None: it has no source.
    request_log: what records each job at its end; None: nothing does.
    task_status: gets the server's address.

    The listener answers when the models' files have been fetched from a hub, before the models are loaded.
    Until they are, `/health` succeeds, `/ready` does not, and jobs are queued. Raises `ConfigError`,
    `LoadFailed` or `OSError` if it cannot start.
    """
    with ExitStack() as listening:
        sockets = [listening.enter_context(sock) for sock in bind(config.host, config.port)]
        url = url_of(*address_of(sockets[0]))
        composition = Composition(config, announcer, source=source, request_log=request_log)
        await composition.prepare()

        def loaded(models: Sequence[str]) -> None:
            freeze()
            announce(announcer.ready, url, models)
            task_status.started(url)

        async with trio.open_nursery() as signals:
            delay_s = config.limits.drain_delay_s
            signals.start_soon(watch_signals, composition.drain, announcer, composition.stop, delay_s)
            if source is None:
                signals.start_soon(ignore_hangups)
            async with composition.running(loaded) as app:
                await serve_http(
                    app,
                    sockets,
                    limits=limits_within_descriptors(config),
                    shutdown=composition.draining,
                    callers=app.callers,
                )
            signals.cancel_scope.cancel()


class Composition:
    """The parts of a server except the listener: fleet ⊃ dispatcher ⊃ the ASGI application.

    config: the settings.
    announcer: what tells the user about the server's states.
    source: what reads the configuration again on a reload; None: it has no source.
    request_log: what records each job at its end; None: nothing does.
    make_fleet: makes the fleet; tests replace it.
    random: the numbers that spread load and retries; None: random ones.

    Call `prepare` first, then `running`. `draining` is set when no more jobs are taken.
    """

    def __init__(
        self,
        config: Config,
        announcer: ServerObserver,
        *,
        source: ConfigSource | None = None,
        request_log: RequestLog | None = None,
        make_fleet: Callable[..., Fleet] = Fleet,
        random: Random | None = None,
    ) -> None:
        self.draining = trio.Event()
        self._is_stopping = False
        self._config = config
        self._source = source
        self.dispatcher = Dispatcher(
            config.queue,
            random=random,
            rejects_loading=config.while_loading == "reject",
            scheduler=config.scheduler,
        )
        self.nodes = NodeRegistry(self.dispatcher.scheduler)
        self.fleet = make_fleet(
            config,
            self.dispatcher,
            self.nodes,
            read=partial(read_model, on_progress=announcer.loading),
            on_progress=announcer.loading,
        )
        self._request_log = request_log
        self._budgets = Budgets()
        self._usage = UsageWriter(UsageJournal())
        self._recorder: UsageRecorder | None = None
        store = store_of(config)
        self._keeper = None if store is None else StoreKeeper(store)
        self._board = RequestBoard(self.dispatcher.open_jobs)
        self._kept = kept_of(config)
        self.gateway = Gateway(
            self.dispatcher, self.nodes, request_timeout_s=config.request_timeout_s, on_finished=self._record
        )

    def _record(self, timeline: RequestTimeline) -> None:
        self._board.record(timeline)
        if self._request_log is not None:
            self._request_log.add(timeline, self.fleet.load_times(timeline.job.model))
        if self._recorder is not None:
            self._recorder.add(timeline)

    async def prepare(self) -> None:
        """Read, or fetch from a hub, what must be known of every model.

        Raises `LoadFailed`, or `ConfigError` without Ray for a cluster.
        """
        refuse_without_ray(self._config)
        await self.fleet.prepare()

    def stop(self) -> None:
        """Report that the server is not ready any more, but take jobs."""
        self._is_stopping = True

    def drain(self) -> None:
        """Take no more jobs and refuse queued ones. Running jobs continue."""
        self.dispatcher.scheduler.drain()
        self.draining.set()

    @asynccontextmanager
    async def running(
        self, loaded: Callable[[Sequence[str]], None], *, bypasses_quart: bool = True
    ) -> AsyncIterator[Application]:
        """Run everything during the block; yield the application, to be served with its lifespan.

        Calls `loaded` with the names of all models that are not faulty when preloading is over.
        `bypasses_quart` is as for `Application`. At the end of the block the models' processes end. Raises
        `LoadFailed` in a group.
        """
        app = Application(self._services(), bypasses_quart=bypasses_quart)
        keeper = self._keeper
        if keeper is not None:
            keeper.on_keys.append(app.change_stored_keys)
            keeper.on_spent = self._budgets.restore
            keeper.subjects = lambda: subjects_of(
                app.api_keys, self.fleet.catalog.config.budgets, keeper.keys.budgets if keeper.keys else ()
            )
            self._recorder = UsageRecorder(
                self._usage,
                price_of=self.fleet.catalog.price_of,
                budgets=lambda: self.fleet.catalog.config.budgets,
                team_of=app.team_of,
            )

        async def load() -> None:
            async with trio.open_nursery() as fleet:
                await fleet.start(self.fleet.run)
                faulty = self.fleet.catalog.faults
                loaded([status.model for status in self.fleet.models() if status.model not in faulty])

        async def change(latest: Config) -> None:
            await self.fleet.reload(latest)
            app.change_keys(latest.api_keys, latest.teams)

        async with trio.open_nursery() as beside:
            if self._request_log is not None:
                beside.start_soon(keep_running, "request log", self._request_log.run)
            if keeper is not None:
                beside.start_soon(keep_running, "store", keeper.run)
                beside.start_soon(keep_running, "usage", self._usage.run, keeper.write)
            if self._source is not None:
                beside.start_soon(keep_running, "reloading", watch_config, self._source, self._config, change)
            async with trio.open_nursery() as nodes:
                nodes.start_soon(self.dispatcher.run)
                nodes.start_soon(load)
                if self._config.cluster is not None:
                    nodes.start_soon(
                        keep_running,
                        "cluster",
                        run_cluster,
                        self._config.cluster,
                        self.fleet,
                        self.dispatcher,
                    )
                yield app
                nodes.cancel_scope.cancel()
            if keeper is not None:
                await self._usage.finish(keeper.write)
            beside.cancel_scope.cancel()

    def _services(self) -> Services:
        config, dispatcher, fleet = self._config, self.dispatcher, self.fleet
        return Services(
            config=config,
            gateway=self.gateway,
            fleet=fleet,
            models=fleet.catalog.texts,
            aliases=fleet.catalog.aliases,
            selectors=fleet.catalog.selectors,
            ready=lambda: fleet.is_ready,
            problems=lambda: fleet.problems,
            estimate=dispatcher.estimate,
            queue_statistics=lambda: msgspec.structs.asdict(dispatcher.statistics()),
            draining=self.draining.is_set,
            stopping=lambda: self._is_stopping,
            budgets=self._budgets,
            store=self._keeper,
            journal=self._usage.journal.statistics,
            board=self._board,
            kept=self._kept,
        )


def url_of(host: str, port: int) -> str:
    """Return the address of a server for its clients; that of a Unix socket is `unix:PATH`."""
    if host.startswith(UNIX_PREFIX):
        return host
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def watch_signals(
    drain: Callable[[], None],
    announcer: ServerObserver,
    stop: Callable[[], None] = lambda: None,
    delay_s: float = 0.0,
) -> None:
    """Call `stop` at the first signal, and `drain` after a delay.

    drain: ends the server when its requests are done.
    announcer: what tells the user.
    stop: takes the server out of rotation: `/ready` fails from then on.
    delay_s: the seconds between the two.

    A second signal ends the process at once, by the default action.
    """
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for number in signals:
            stop()
            if not delay_s:
                drain()
            logger.info("stopping", signal=signal.Signals(number).name)
            announce(announcer.stopping)
            break
    if delay_s:
        await trio.sleep(delay_s)
        drain()


async def ignore_hangups() -> None:
    """Log each SIGHUP until cancelled, for a server that reads no configuration again."""
    is_main = threading.current_thread() is threading.main_thread()  # only it can receive signals
    if not is_main or not hasattr(signal, "SIGHUP"):  # Windows
        return
    with trio.open_signal_receiver(signal.SIGHUP) as signals:
        async for _ in signals:
            logger.warning("signal ignored: no configuration is read again", signal="SIGHUP")


def announce(announce: Callable[..., None], *details: object) -> None:
    """Write to the terminal. A failure, as of a closed terminal or a full disk, is only logged."""
    with FailureBoundary() as boundary:
        announce(*details)
    if boundary.failure is not None:
        log_failure("announcement failed", boundary.failure)
