"""Fairlead as an ASGI application: under another server, inside another application, in tests (docs/asgi.md).

    hypercorn --worker-class trio fairlead.asgi:app

Fleet, dispatcher and routes exist during the application's lifespan. Without one, requests get status 503.
Quart handles all routes here. The other server handles signals, connections and everything below HTTP.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import structlog
import trio
from cyclopts import App, CycloptsError, Parameter
from quart_trio.testing import TrioTestApp

from fairlead.base.config import NO_OPERATOR, Config, ConfigError, lacks_operator
from fairlead.base.errors import Draining, FairleadError, NotStarted
from fairlead.base.runtime import interpreter
from fairlead.base.runtime.environment import remove_empty
from fairlead.base.runtime.gc_tuning import freeze
from fairlead.base.supervision import FailureBoundary, log_failure
from fairlead.base.telemetry import logs
from fairlead.generation.request_log import open_request_log
from fairlead.router.fleet.reload import ConfigSource
from fairlead.server.app import Composition
from fairlead.server.console.announcer import LogAnnouncer
from fairlead.server.console.configuration import source_of
from fairlead.server.console.options import File, Flag, Model, ServeOptions
from fairlead.server.descriptors import raise_limit
from fairlead.server.routes.errors import ErrorFormats, error_response
from fairlead.server.routes.route_table import ROUTES, dialects_of
from fairlead.server.routes.routes import Application

# The wait for cancelled requests: a server may shield its sends from cancellation.
CUT_OFF_S = 2.0
TEST_STARTUP_S = 60

logger = structlog.get_logger("fairlead.asgi")

Read = Callable[[], tuple[Config, ConfigSource | None]]

_NOT_STARTED = "Fairlead is not started: the server, or the outer application, must run its lifespan"
_NOT_TRIO = "Fairlead runs on Trio only, and this server does not: hypercorn --worker-class trio"


def create_app(
    config: Config | Path | str | None = None, *, watch_config: bool = False, standalone: bool = False
) -> "AsgiApp":
    """Return the application for a configuration, a file with one, or the environment's configuration.

    It is read when the lifespan starts. `watch_config`: the file is read again whenever it has changed.
    `standalone`: nothing else runs in this process, so its log, garbage collector and limit of open files are
    set as by `fairlead serve`. Raises `ConfigError` if there is no file to watch.
    """
    if config is None:
        return AsgiApp(_read_environment, standalone=standalone)
    if isinstance(config, Config):
        if watch_config:
            raise ConfigError("watch_config: needs a file")
        return AsgiApp(lambda: (config, None), standalone=standalone)
    read = partial(_read_file, Path(config), None, ServeOptions(), is_watched=watch_config)
    return AsgiApp(read, standalone=standalone)


class AsgiApp:
    """An ASGI application that owns a whole server except the listener. `read` returns its configuration.

    It can be started again after its lifespan has ended.
    """

    def __init__(self, read: Read, *, standalone: bool) -> None:
        self._read = read
        self._standalone = standalone
        self._is_taken = False
        self._has_ended = False
        self._composition: Composition | None = None
        self._quart: Application | None = None
        self._requests: set[trio.CancelScope] = set()
        self._all_ended = trio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Run the lifespan, or answer a request: ASGI 3."""
        if scope["type"] == "lifespan":
            await self._run_lifespan(receive, send)
        elif scope["type"] != "http":  # a WebSocket; there is no route for one
            await receive()
            await send({"type": "websocket.close", "code": 1000})
        elif self._quart is None:
            await _refuse(self._refusal(), scope, send)
        else:
            await self._answer(self._quart, scope, receive, send)

    @asynccontextmanager
    async def lifespan(self, _outer: object = None) -> AsyncIterator[None]:
        """Run the server during the block: for an outer application that does not forward its lifespan.

        Starlette accepts this method as its own `lifespan`. The block begins when preloading is over. At its
        end queued jobs are refused, and running ones have `limits.drain` to finish. Raises `ConfigError`,
        `OSError` or `CycloptsError` from the configuration, and `LoadFailed` in a group.
        """
        if self._is_taken:
            raise RuntimeError("this application runs already; each lifespan needs one of its own")
        self._is_taken, self._has_ended = True, False
        try:
            config, source = self._prepare()
            with open_request_log(config) as request_log:
                announcer = LogAnnouncer(key_needed=False)
                composition = Composition(config, announcer, source=source, request_log=request_log)
                await composition.prepare()
                async with self._serving(composition):
                    yield
                    await self._finish(config.limits.drain_s)
        finally:
            self._is_taken = False

    def drain(self) -> None:
        """Take no more jobs and refuse queued ones; running jobs continue. Without a lifespan, do nothing.

        For a server that is about to stop: the lifespan is notified only when it has stopped.
        """
        if self._composition is not None and not self._composition.draining.is_set():
            logger.info("stopping")
            self._composition.drain()

    def test_app(self, startup_timeout: float = TEST_STARTUP_S) -> Any:
        """Return Quart-Trio's context manager that runs the lifespan in a test. It has the `test_client`."""
        return TrioTestApp(self, startup_timeout, TEST_STARTUP_S)

    def test_client(self) -> Any:
        """Return Quart-Trio's test client; only while the lifespan runs."""
        if self._quart is None:
            raise RuntimeError("run the lifespan first: async with app.test_app() as running")
        return self._quart.test_client()

    # The lifespan ------------------------------------------------------------------------------------

    async def _run_lifespan(self, receive: Any, send: Any) -> None:
        await receive()
        if not trio.lowlevel.in_trio_run():
            await send({"type": "lifespan.startup.failed", "message": _NOT_TRIO})
            return
        has_started = False
        with FailureBoundary() as boundary:
            async with self.lifespan():
                has_started = True
                await send({"type": "lifespan.startup.complete"})
                await receive()
        if boundary.failure is None:
            await send({"type": "lifespan.shutdown.complete"})
        elif has_started:
            raise boundary.failure
        else:
            await send({"type": "lifespan.startup.failed", "message": _reason(boundary.failure)})

    def _prepare(self) -> tuple[Config, ConfigSource | None]:
        """Read the configuration and, if `standalone`, set up the process."""
        if self._standalone:
            interpreter.prepare()
            logs.configure(json=False)
            raise_limit()
        config, source = self._read()
        if self._standalone:
            logs.configure(json=config.log_json, level=config.log_level)
        if lacks_operator(config.api_keys):
            logger.warning(NO_OPERATOR)
        return config, source

    @asynccontextmanager
    async def _serving(self, composition: Composition) -> AsyncIterator[None]:
        """Answer requests during the block, which begins when preloading is over; then cancel the rest."""
        has_loaded = trio.Event()

        def loaded(models: object) -> None:
            if self._standalone:
                freeze()
            logger.info("ready", models=models)
            has_loaded.set()

        async with composition.running(loaded, bypasses_quart=False) as quart, trio.open_nursery() as nursery:
            quart.nursery = nursery
            await quart.startup()
            await has_loaded.wait()
            self._composition, self._quart = composition, quart
            try:
                yield
            finally:
                self._composition = self._quart = None
                self._has_ended = True
                await self._cut_off()
            await quart.shutdown()
            nursery.cancel_scope.cancel()

    async def _finish(self, drain_s: float) -> None:
        """Refuse new and queued jobs, and wait for the requests under way."""
        self.drain()
        with trio.move_on_after(drain_s):
            await self._until_all_ended()

    async def _cut_off(self) -> None:
        """Cancel the requests that are left, so that none waits for a fleet that has ended."""
        if self._requests:
            logger.warning("drain timed out", requests=len(self._requests))
        for request in self._requests:
            request.cancel()
        with trio.move_on_after(CUT_OFF_S, shield=True):
            await self._until_all_ended()

    async def _until_all_ended(self) -> None:
        while self._requests:
            self._all_ended = trio.Event()
            await self._all_ended.wait()

    # Requests ----------------------------------------------------------------------------------------

    async def _answer(self, quart: Application, scope: Any, receive: Any, send: Any) -> None:
        has_begun = False

        async def send_on(message: Any) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        with trio.CancelScope() as request:
            self._requests.add(request)
            try:
                await quart(scope, receive, send_on)
            finally:
                self._requests.remove(request)
                if not self._requests:
                    self._all_ended.set()
        # A response that has begun is left incomplete: the server then ends the connection.
        if request.cancelled_caught and not has_begun:
            await _refuse(self._refusal(), scope, send)

    def _refusal(self) -> FairleadError:
        """Return the error for requests that cannot be served now."""
        if not trio.lowlevel.in_trio_run():
            return NotStarted(_NOT_TRIO)
        return Draining("Fairlead has been shut down here") if self._has_ended else NotStarted(_NOT_STARTED)


async def _refuse(error: FairleadError, scope: Any, send: Any) -> None:
    """Send an error response, without the application's routes."""
    reply = error_response(error, ErrorFormats(dialects_of(ROUTES)).of(scope["path"]))
    assert isinstance(reply.body, bytes)
    headers = {**reply.headers, "Content-Length": str(len(reply.body))}
    encoded = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": encoded})
    await send({"type": "http.response.body", "body": reply.body})


def _reason(failure: BaseException) -> str:
    """Log why the lifespan cannot start, and return that for the server, which may not log it."""
    if isinstance(failure, FairleadError | ConfigError | CycloptsError | OSError):
        reason = str(failure)
        logger.error("cannot serve", reason=reason)
    else:
        reason = f"{type(failure).__name__}: {failure}"
        log_failure("cannot serve", failure)
    return reason


# Configuration ---------------------------------------------------------------------------------------


def _read_environment() -> tuple[Config, ConfigSource | None]:
    """Read the environment. Raises `CycloptsError`, `ConfigError` or `OSError`, naming the variable."""
    remove_empty()
    options: dict[str, Any] = {"exit_on_error": False, "print_error": False, "result_action": "return_value"}
    read: tuple[Config, ConfigSource | None] = _environment([], **options)
    return read


_environment = App("fairlead.asgi", help_flags=(), version_flags=())


@_environment.default
def _environment_settings(
    *,
    model: Annotated[Model | None, Parameter(env_var="FAIRLEAD_MODEL")] = None,
    config: Annotated[File | None, Parameter(env_var="FAIRLEAD_CONFIG")] = None,
    watch_config: Annotated[Flag, Parameter(env_var="FAIRLEAD_WATCH_CONFIG")] = False,
    options: ServeOptions = ServeOptions(),  # noqa: B008 - frozen
) -> tuple[Config, ConfigSource | None]:
    """Return the configuration, as `fairlead serve` makes it from the same variables and arguments."""
    if config is not None:
        return _read_file(config, model, options, is_watched=watch_config)
    if watch_config:
        raise ConfigError("FAIRLEAD_WATCH_CONFIG: needs FAIRLEAD_CONFIG")
    return options.config(model, Config(models=())), None


def _read_file(
    file: Path, model: str | None, options: ServeOptions, *, is_watched: bool
) -> tuple[Config, ConfigSource | None]:
    source = source_of(file, model, options, is_watched=is_watched, handles_signals=False)
    return source.read(None), source if is_watched else None


app = create_app(standalone=True)
