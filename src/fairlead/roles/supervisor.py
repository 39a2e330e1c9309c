"""The process that people start when a server has several fronts: it owns all others, and nothing else.

It starts the dispatcher, the fronts and the models' processes, starts again what ends, and takes everything
down with itself: each child ends with its connection to this process. Models' processes are its own children,
so that they and the answers that they generate outlive a dispatcher.
"""

import secrets
import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import structlog
import trio
from msgspec.structs import replace

from fairlead import interpreter
from fairlead.app import ServerObserver, announce, url_of, watch_signals
from fairlead.cluster.launcher_process import keep_launcher, refuse_without_ray
from fairlead.config import Config, ConfigError
from fairlead.descriptors import raise_limit
from fairlead.errors import FairleadError, LoadFailed
from fairlead.fleet.instance import Restarts
from fairlead.fleet.reload import ConfigSource, watch_config
from fairlead.http.listener import bind
from fairlead.roles import control
from fairlead.roles.child_process import ChildProcess
from fairlead.roles.owned_processes import OwnedProcesses
from fairlead.supervision import contain, keep_running
from fairlead.telemetry import logs

KEY_BYTES = 32
# A dispatcher that has run for this long is started again at once.
STEADY_S = 10.0

logger = structlog.get_logger("fairlead.supervisor")


def run(config: Config, announcer: ServerObserver, source: ConfigSource | None = None) -> int:
    """Serve until SIGINT or SIGTERM; return the exit code: 0 success, 1 failure, 2 bad configuration."""
    interpreter.prepare()
    with logs.log_streams():
        logs.configure(json=config.log_json, level=config.log_level)
        raise_limit()
        try:
            trio.run(partial(supervise, config, announcer, source=source), strict_exception_groups=True)
        except* (FairleadError, ConfigError, OSError) as group:
            cause: BaseException = group
            while isinstance(cause, BaseExceptionGroup):
                cause = cause.exceptions[0]
            announce(announcer.failed, ", ".join(model.name for model in config.models), str(cause))
            return_code = 2 if isinstance(cause, ConfigError) else 1
        else:
            return_code = 0
    return return_code


async def supervise(
    config: Config,
    announcer: ServerObserver,
    *,
    source: ConfigSource | None = None,
    task_status: trio.TaskStatus["Supervisor"] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run all processes until a signal, and then until the fronts are drained.

    Calls `started()` when the fronts accept connections and preloading is over. Raises `ConfigError`,
    `LoadFailed` or `OSError` if the server cannot start.
    """
    refuse_without_ray(config)
    with ExitStack() as resources:
        port = _reserve(resources, config)
        directory = tempfile.mkdtemp(prefix="fairlead-")  # only this user can enter it
        resources.callback(shutil.rmtree, directory, ignore_errors=True)
        async with trio.open_nursery() as nursery:
            fixed = replace(config, port=port)
            supervisor = Supervisor(fixed, directory, announcer, nursery)
            delay_s = config.limits.drain_delay_s
            nursery.start_soon(watch_signals, supervisor.drain, announcer, supervisor.stop, delay_s)
            if source is not None:
                change = partial(supervisor.reload, port)
                nursery.start_soon(keep_running, "reloading", watch_config, source, config, change)
            await supervisor.run(partial(task_status.started, supervisor))
            nursery.cancel_scope.cancel()


class Supervisor:
    """All processes of one server. `config` has the port that the fronts share."""

    def __init__(
        self, config: Config, directory: str, announcer: ServerObserver, nursery: trio.Nursery
    ) -> None:
        self.url = url_of(config.host, config.port)
        self.dispatcher: ChildProcess | None = None
        self.fronts: dict[int, ChildProcess] = {}
        self.epoch = 0
        self._config = config
        self.directory = directory
        self._announcer = announcer
        self._nursery = nursery
        self._key = secrets.token_bytes(KEY_BYTES)
        self._processes: OwnedProcesses | None = None
        self.ready_fronts: set[int] = set()
        self._loaded: tuple[str, ...] | None = None
        self._is_draining = False
        self._drained = trio.Event()
        self._has_started = False
        self._failure: BaseException | None = None
        self._scope = trio.CancelScope()

    @property
    def processes(self) -> OwnedProcesses:
        """The models' processes."""
        assert self._processes is not None
        return self._processes

    async def run(self, started: Callable[[], None]) -> None:
        """Run until drained. Raises what makes the first start impossible."""
        self._started = started
        async with trio.open_nursery() as models:
            self._processes = OwnedProcesses(models, self._send_to_dispatcher)
            with self._scope:
                async with trio.open_nursery() as children:
                    children.start_soon(self._keep_dispatcher)
                    if (cluster := self._config.cluster) is not None:
                        launch = partial(keep_launcher, cluster, self.directory)
                        children.start_soon(keep_running, "cluster launcher", launch)
                    async with trio.open_nursery() as fronts:
                        for number in range(self._config.fronts):
                            fronts.start_soon(self._keep_front, number)
                    children.cancel_scope.cancel()
            self._processes.end_all()
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Report that the server is not ready any more, but take jobs."""
        for front in self.fronts.values():
            front.send(control.Stopping())

    def drain(self) -> None:
        """Take no more jobs, and end when those that run have ended."""
        self._is_draining = True
        self._send_to_dispatcher(control.Drain())
        for front in self.fronts.values():
            front.send(control.Drain())
        if not self._has_started:
            self._scope.cancel()

    async def reload(self, port: int, config: Config) -> None:
        """Apply another configuration in all processes."""
        self._config = replace(config, port=port)
        message = control.Reload(control.pack(self._config))
        self._send_to_dispatcher(message)
        for front in self.fronts.values():
            front.send(message)

    # Children ----------------------------------------------------------------------------------------

    async def _keep_dispatcher(self) -> None:
        restarts = Restarts()
        while True:
            self.epoch += 1
            began_at = trio.current_time()
            first = control.RunDispatcher(
                config=control.pack(self._config),
                directory=self.directory,
                key=self._key,
                epoch=self.epoch,
                expected=len(self.ready_fronts),
                running=self.processes.begin_epoch(self.epoch),
            )
            self.dispatcher = ChildProcess(f"dispatcher {self.epoch}", self._handle_dispatcher)
            await contain("dispatcher", self.dispatcher.run, first)
            if trio.current_time() - began_at < STEADY_S:
                await trio.sleep(restarts.next_backoff_s())
            else:
                restarts = Restarts()

    async def _keep_front(self, number: int) -> None:
        restarts, runs = Restarts(), 0
        while not self._is_draining:
            runs += 1
            name = f"front {number}.{runs}"
            began_at = trio.current_time()
            first = control.RunFront(control.pack(self._config), self.directory, self._key, name)
            self.fronts[number] = ChildProcess(name, partial(self._handle_front, number))
            await contain(name, self.fronts[number].run, first)
            del self.fronts[number]
            self.ready_fronts.discard(number)
            self._send_to_dispatcher(control.FrontEnded(name))
            restarts.ran(trio.current_time() - began_at)
            if not self._is_draining:
                await trio.sleep(restarts.next_backoff_s())

    def _send_to_dispatcher(self, message: control.ToChildRole) -> None:
        if self.dispatcher is not None:
            self.dispatcher.send(message)

    # Messages ----------------------------------------------------------------------------------------

    def _handle_dispatcher(self, message: control.ToSupervisor) -> None:
        match message:
            case control.StartProcess():
                self.processes.start(message)
            case control.EndProcess(name):
                self.processes.end(name)
            case control.ChangeHealth(name, health):
                self.processes.change_health(name, health)
            case control.LoadShown(model, fraction, stage):
                announce(self._announcer.loading, model, fraction, stage)
            case control.ModelsLoaded(models):
                self._loaded = models
                self._start_if_ready()
            case control.RoleReady():
                logger.info("dispatcher ready", epoch=self.epoch)
                if self._is_draining:
                    self._send_to_dispatcher(control.Drain())
            case control.CannotStart():
                self._cannot_start(message)

    def _handle_front(self, number: int, message: control.ToSupervisor) -> None:
        match message:
            case control.RoleReady():
                self.ready_fronts.add(number)
                self._start_if_ready()
                if self._is_draining:
                    self.fronts[number].send(control.Drain())
            case control.CannotStart():
                self._cannot_start(message)

    def _start_if_ready(self) -> None:
        is_ready = self._loaded is not None and len(self.ready_fronts) == self._config.fronts
        if is_ready and not self._has_started:
            self._has_started = True
            announce(self._announcer.ready, self.url, self._loaded)
            self._started()

    def _cannot_start(self, message: control.CannotStart) -> None:
        if self._has_started:
            logger.error("process cannot start", reason=message.reason)
            return
        kind = ConfigError if message.is_bad_config else LoadFailed
        self._failure = self._failure or kind(message.reason)
        self._scope.cancel()


def _reserve(resources: ExitStack, config: Config) -> int:
    """Reserve the port for the fronts; return it. Raises `CannotListen` if another program has it."""
    exclusive = bind(config.host, config.port)
    port: int = exclusive[0].getsockname()[1]
    for sock in exclusive:
        sock.close()
    for sock in bind(config.host, port, sharing="reserves"):
        resources.enter_context(sock)
    return port
