"""The process that people start when a server has several fronts: it owns all others, and nothing else.

It starts the dispatcher, the fronts and the models' processes, starts again what ends, and takes everything
down with itself: each child ends with its connection to this process. Models' processes are its own children,
so that they and the answers that they generate outlive a dispatcher. It has the sockets on which fronts
listen, so that connections outlive a front as long as it has not accepted them.
"""

import secrets
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

import structlog
import trio
from msgspec.structs import replace

from fairlead.base.config import Config, ConfigError
from fairlead.base.errors import FairleadError, LoadFailed
from fairlead.base.runtime import interpreter
from fairlead.base.supervision import contain, keep_running
from fairlead.base.telemetry import logs
from fairlead.distributed.ray.launcher_process import keep_launcher, refuse_without_ray
from fairlead.distributed.supervisor import control
from fairlead.distributed.supervisor.child_process import ChildProcess
from fairlead.distributed.supervisor.owned_processes import OwnedProcesses
from fairlead.distributed.supervisor.restarts import CrashPauses, SharedPauses, TrustedConfig
from fairlead.nodes.processes.socket_folder import socket_folder
from fairlead.router.fleet.reload import ConfigSource, watch_config
from fairlead.server.app import ServerObserver, announce, ignore_hangups, url_of, watch_signals
from fairlead.server.descriptors import raise_limit
from fairlead.server.listener.listener import address_of, bind

KEY_BYTES = 32

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

    config: the settings.
    announcer: tells the user about the server's states.
    source: reads the configuration again on a reload; None: it has no source.
    task_status: called when the fronts accept connections and preloading is over.

    Raises `ConfigError`, `LoadFailed` or `OSError` if the server cannot start.
    """
    refuse_without_ray(config)
    with ExitStack() as resources:
        sockets = _reserve(resources, config)
        port = address_of(sockets[0][0])[1]
        directory = resources.enter_context(socket_folder())
        async with trio.open_nursery() as nursery:
            fixed = replace(config, port=port)
            supervisor = Supervisor(fixed, directory, sockets, announcer, nursery)
            delay_s = config.limits.drain_delay_s
            nursery.start_soon(watch_signals, supervisor.drain, announcer, supervisor.stop, delay_s)
            if source is None:
                nursery.start_soon(ignore_hangups)
            else:
                change = partial(supervisor.reload, port)
                nursery.start_soon(keep_running, "reloading", watch_config, source, config, change)
            await supervisor.run(partial(task_status.started, supervisor))
            nursery.cancel_scope.cancel()


class Supervisor:
    """All processes of one server.

    config: the settings, with the port that the fronts share.
    directory: where the processes listen for each other.
    sockets: bound to the port: those of each front, by number.
    announcer: tells the user about the server's states.
    nursery: has the tasks that watch the processes.
    """

    def __init__(
        self,
        config: Config,
        directory: str,
        sockets: Sequence[Sequence[socket.socket]],
        announcer: ServerObserver,
        nursery: trio.Nursery,
    ) -> None:
        self.url = url_of(config.host, config.port)
        self.dispatcher: ChildProcess | None = None
        self.fronts: dict[int, ChildProcess] = {}
        self.epoch = 0
        self._config = config
        self._dispatcher_config = TrustedConfig(control.pack(config))
        self._front_config = TrustedConfig(control.pack(config))
        self._front_pauses = SharedPauses(config.fronts)
        self._sockets = sockets
        self._descriptors = tuple(tuple(sock.fileno() for sock in some) for some in sockets)
        self._front_runs = 0
        self._next_front = self._make_front()
        self.directory = directory
        self._announcer = announcer
        self._nursery = nursery
        self._key = secrets.token_bytes(KEY_BYTES)
        self._processes: OwnedProcesses | None = None
        self.ready_fronts: set[int] = set()
        self._loaded: tuple[str, ...] | None = None
        self._is_draining = False
        self._first_dispatcher_ready = trio.Event()
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
                    self._children = children
                    try:
                        async with trio.open_nursery() as fronts:
                            for number in range(self._config.fronts):
                                fronts.start_soon(self._keep_front, number)
                        children.cancel_scope.cancel()
                    finally:
                        await self._next_front.discard()
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
        # Fronts have descriptors of their own, and close them when they do not listen any more.
        for sock in (sock for sockets in self._sockets for sock in sockets):
            sock.close()
        self._next_front.kill()
        self._send_to_dispatcher(control.Drain())
        for front in self.fronts.values():
            front.send(control.Drain())
        if not self._has_started:
            self._scope.cancel()

    async def reload(self, port: int, config: Config) -> None:
        """Apply another configuration in all processes."""
        self._config = replace(config, port=port)
        message = control.Reload(control.pack(self._config))
        self._dispatcher_config.change(message.config)
        self._front_config.change(message.config)
        self._send_to_dispatcher(message)
        for front in self.fronts.values():
            front.send(message)

    # Children ----------------------------------------------------------------------------------------

    async def _keep_dispatcher(self) -> None:
        pauses, prepared = CrashPauses(), self._make_dispatcher(1)
        while True:
            self.epoch += 1
            began_at = trio.current_time()
            first = control.RunDispatcher(
                config=self._dispatcher_config.next(),
                directory=self.directory,
                key=self._key,
                epoch=self.epoch,
                expected=tuple(self.fronts[number].name for number in self.ready_fronts),
                running=self.processes.begin_epoch(self.epoch),
            )
            self.dispatcher = prepared
            prepared = self._make_dispatcher(self.epoch + 1)
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(contain, "next dispatcher", self._prepare, prepared)
                    await contain("dispatcher", self.dispatcher.run, first)
                    nursery.cancel_scope.cancel()
                if self.dispatcher.was_ready:
                    self._dispatcher_config.became_ready(first.config)
                else:
                    self._dispatcher_config.was_not_ready(first.config)
                await trio.sleep(pauses.after(trio.current_time() - began_at))
            except BaseException:
                await prepared.discard()
                raise

    def _make_dispatcher(self, epoch: int) -> ChildProcess:
        dispatcher = ChildProcess(f"dispatcher {epoch}")
        dispatcher.handle = self._handle_dispatcher
        return dispatcher

    async def _prepare(self, child: ChildProcess) -> None:
        """Start the next dispatcher's process, which then waits until it is needed.

        While there is no dispatcher jobs wait, and importing its modules would take most of that time. At the
        start of the server, all others are started first.
        """
        await self._first_dispatcher_ready.wait()
        await child.prepare()

    async def _keep_front(self, number: int) -> None:
        pauses = CrashPauses()
        while not self._is_draining:
            began_at = trio.current_time()
            front = self.fronts[number] = self._take_front()
            config = self._front_config.next()
            front.handle = partial(self._handle_front, number, config)
            first = control.RunFront(config, self.directory, self._key, front.name, number, self._descriptors)
            await contain(front.name, front.run, first)
            del self.fronts[number]
            self.ready_fronts.discard(number)
            self._stand_in()
            self._send_to_dispatcher(control.FrontEnded(front.name))
            if not front.was_ready:
                self._front_config.was_not_ready(config)
            ran_s = trio.current_time() - began_at
            if not self._is_draining:
                await self._front_pauses.wait(pauses.after(ran_s), ran_s)

    def _make_front(self) -> ChildProcess:
        self._front_runs += 1
        return ChildProcess(f"front {self._front_runs}", descriptors=sum(self._descriptors, ()))

    def _take_front(self) -> ChildProcess:
        """Return a front that is not used yet, and start the process of the next one once the server runs."""
        front, self._next_front = self._next_front, self._make_front()
        if self._has_started and not self._is_draining:
            self._children.start_soon(contain, "next front", self._next_front.prepare)
        return front

    def _stand_in(self) -> None:
        """Let the fronts that are there accept the connections of the others."""
        absent = tuple(set(range(self._config.fronts)) - self.ready_fronts)
        for number in self.ready_fronts:
            self.fronts[number].send(control.StandIn(absent))

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
                self._first_dispatcher_ready.set()
                if self._is_draining:
                    self._send_to_dispatcher(control.Drain())
            case control.CannotStart():
                self._cannot_start(self.dispatcher, message)

    def _handle_front(self, number: int, config: bytes, message: control.ToSupervisor) -> None:
        match message:
            case control.RoleReady():
                self._front_config.became_ready(config)
                self.ready_fronts.add(number)
                self._stand_in()
                self._start_if_ready()
                if self._is_draining:
                    self.fronts[number].send(control.Drain())
            case control.CannotStart():
                self._cannot_start(self.fronts[number], message)

    def _start_if_ready(self) -> None:
        is_ready = self._loaded is not None and len(self.ready_fronts) == self._config.fronts
        if is_ready and not self._has_started:
            self._has_started = True
            announce(self._announcer.ready, self.url, self._loaded)
            self._started()
            # From now on, processes wait to take the places of a dispatcher and a front that end.
            self._children.start_soon(contain, "next front", self._next_front.prepare)

    def _cannot_start(self, child: ChildProcess | None, message: control.CannotStart) -> None:
        """End the server if it has not started; later, only this process, so that it is started again."""
        if self._has_started:
            assert child is not None
            logger.error("process cannot start", process=child.name, reason=message.reason)
            child.end()
            return
        kind = ConfigError if message.is_bad_config else LoadFailed
        self._failure = self._failure or kind(message.reason)
        self._scope.cancel()


def _reserve(resources: ExitStack, config: Config) -> list[list[socket.socket]]:
    """Return sockets for each front, all bound to one port. They do not listen yet.

    A Unix socket is the same for all fronts, and listens already: its connections wait for a front. Raises
    `CannotListen` if another program has the port.
    """
    exclusive = bind(config.host, config.port)
    if exclusive[0].family == socket.AF_UNIX:
        (first,) = map(resources.enter_context, exclusive)
        copies = (resources.enter_context(first.dup()) for _ in range(config.fronts - 1))
        return [[first], *([copy] for copy in copies)]
    port = address_of(exclusive[0])[1]
    for sock in exclusive:
        sock.close()
    found = [bind(config.host, port, is_shared=True) for _ in range(config.fronts)]
    for sock in (sock for sockets in found for sock in sockets):
        resources.enter_context(sock)
    return found
