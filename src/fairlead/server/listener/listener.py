"""The listener: accepts a bounded number of connections, and drains them on shutdown.

No client can end it: connections are isolated from each other (`connection`). On shutdown, listening stops
and idle connections end at once. Running responses have `limits.drain_s` to finish. Then all remaining
connections are closed, and `serve_http` returns. With `limits.drain_delay_s`, it listens to the end: the app
answers probes and refuses jobs, and these later connections are not waited for.

Independent of routes: it serves any ASGI app, and runs the app's lifespan. It uses Hypercorn's protocol and
lifespan, but not its accept loop, timers and logs.
"""

import errno
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any

import structlog
import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config as HypercornConfig
from hypercorn.trio.lifespan import Lifespan
from hypercorn.trio.worker_context import WorkerContext

from fairlead.base.config import UNIX_PREFIX, ConfigError, Limits
from fairlead.server.listener.accept_queue import AcceptedConnection, AcceptQueue
from fairlead.server.listener.callers import Callers, Sender
from fairlead.server.listener.connection import ServerConnection, linger
from fairlead.server.listener.protocol import Shared
from fairlead.server.listener.refusals import refusal
from fairlead.server.listener.unix_sockets import UNIX_PEER, CannotListen, listen_on_path

logger = structlog.get_logger("fairlead.server.listener")

BACKLOG = 2048
# Bounded, so that a burst of new clients does not delay the old ones.
ACCEPTS_PER_TURN = 64
STARTS_PER_TURN = 4
REFUSALS = 64  # clients over the limit that get a response at a time; the others are just closed
OUT_OF_DESCRIPTORS_S = 0.1

PORTS_TRIED = 16  # a port that is free on one address of the host may be taken on the next

# The kernel's buffer for a client that does not read; by default it grows to megabytes. A socket is writable
# only when a third of it is free again, so a small buffer makes the progress of a slow client visible.
SEND_BUFFER_BYTES = 256 * 1024

# A client on an unreachable machine is detected after about a minute.
_KEEP_ALIVE = (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))

Address = tuple[str, int]
Wait = Callable[[socket.socket], Awaitable[None]]

# Apps may return from their lifespan at once.
_without_lifespan = suppress(trio.ClosedResourceError, trio.BrokenResourceError)


def bind(host: str, port: int, *, is_shared: bool = False) -> list[socket.socket]:
    """Return listening sockets, one for each address of `host`. Port 0 picks a free one.

    `::` stands for all addresses of both families, `unix:PATH` for a Unix socket, which needs no port.
    With `is_shared`, other sockets of this user may be bound to the same port (SO_REUSEPORT), and these do
    not listen yet: of those that do, each gets a part of the connections.
    Raises `ConfigError` if there is no such host, and `CannotListen` if the address cannot be bound.
    """
    if host.startswith(UNIX_PREFIX):
        return [
            listen_on_path(
                host.removeprefix(UNIX_PREFIX), backlog=BACKLOG, send_buffer_bytes=SEND_BUFFER_BYTES
            )
        ]
    name = host.removeprefix("[").removesuffix("]")
    try:
        found = socket.getaddrinfo(name or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError, OverflowError) as error:
        raise ConfigError(f"host: cannot listen on {host!r}, port {port}: {error}") from error
    if name == "::":  # a socket for each family: one for both would show IPv4 addresses in the form of IPv6
        found.append((socket.AF_INET, socket.SOCK_STREAM, 0, "", ("0.0.0.0", port)))  # noqa: S104  # as asked for
    tries = 1 if port else PORTS_TRIED
    while True:
        try:
            return _listen_on_all(host, port, found, is_shared=is_shared)
        except OSError as error:
            tries -= 1
            if not tries or error.errno != errno.EADDRINUSE:
                raise


def address_of(sock: socket.socket) -> Address:
    """Return the host and the port that a socket is bound to: `unix:PATH` and 0 for a Unix socket."""
    name = sock.getsockname()
    return (f"{UNIX_PREFIX}{name}", 0) if sock.family == socket.AF_UNIX else (str(name[0]), int(name[1]))


async def serve_http(
    app: Callable[..., Any],
    sockets: Sequence[socket.socket],
    *,
    limits: Limits,
    shutdown: trio.Event,
    callers: Callers | None = None,
    wait: Wait | None = None,
    task_status: trio.TaskStatus[list[Address]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve an ASGI app on listening sockets until `shutdown` is set and all is drained. Close the sockets.

    app: the app. What its startup raises is raised here.
    sockets: the sockets.
    limits: the bounds of connections and requests.
    shutdown: ends the server.
    callers: finds who sends a request; None: each address is one caller.
    wait: returns when a socket may have a connection to accept; None: when it is readable.
    task_status: gets the bound addresses once the app has started.
    """
    config = _hypercorn_config(limits)
    state: dict[str, Any] = {}
    lifespan = Lifespan(ASGIWrapper(app), config, state)
    async with AsyncExitStack() as stack:
        for sock in sockets:
            stack.enter_context(sock)  # closed also if the app does not start
        nursery = await stack.enter_async_context(trio.open_nursery())
        await nursery.start(lifespan.handle_lifespan)
        with _without_lifespan:
            await lifespan.wait_for_startup()
        context = WorkerContext(None)
        shared = Shared(app, config, context, {**state, "limits": limits}, limits, callers or Callers())
        await Listener(shared, wait).run(sockets, shutdown, task_status)
        with _without_lifespan:
            await lifespan.wait_for_shutdown()
        nursery.cancel_scope.cancel()


class Listener:
    """The owner of all connections: accepts, refuses and drains them."""

    def __init__(self, shared: Shared, wait: Wait | None = None) -> None:
        self._shared = shared
        # Not a default argument: tests replace Trio's functions while they run.
        self._wait: Wait = wait or trio.lowlevel.wait_readable
        self._connections: set[ServerConnection] = set()
        self._arrivals = AcceptQueue()
        self._refusals = 0
        self._full = False

    async def run(
        self,
        sockets: Sequence[socket.socket],
        shutdown: trio.Event,
        task_status: trio.TaskStatus[list[Address]],
    ) -> None:
        """Listen until `shutdown`, then drain."""
        try:
            async with trio.open_nursery() as drain:
                async with trio.open_nursery() as connections:
                    async with trio.open_nursery() as accepting:
                        for sock in sockets:
                            accepting.start_soon(self._accept, sock, connections)
                        task_status.started([address_of(sock) for sock in sockets])
                        await shutdown.wait()
                        accepting.cancel_scope.cancel()
                    if not self._shared.limits.drain_delay_s:
                        self._close(sockets)
                    await self._shared.context.terminated.set()
                    for connection in self._connections:
                        connection.drain()
                    if self._shared.limits.drain_delay_s:
                        for sock in sockets:
                            drain.start_soon(self._accept, sock, drain)
                    drain.start_soon(self._end_drain, connections)
                drain.cancel_scope.cancel()
        finally:
            self._close(sockets)

    def _close(self, sockets: Sequence[socket.socket]) -> None:
        self._arrivals.close()
        for sock in sockets:
            if sock.fileno() != -1:
                trio.lowlevel.notify_closing(sock)
                sock.close()

    async def _end_drain(self, connections: trio.Nursery) -> None:
        await trio.sleep(self._shared.limits.drain_s)
        logger.warning("drain timed out", connections=len(self._connections))
        for connection in self._connections:
            connection.abort()
        connections.cancel_scope.cancel()

    async def _accept(self, listening: socket.socket, connections: trio.Nursery) -> None:
        while True:
            if self._arrivals:
                await trio.lowlevel.checkpoint()
            else:
                await self._wait(listening)
            try:
                for _ in range(ACCEPTS_PER_TURN):
                    sock, client = listening.accept()
                    sock.setblocking(False)
                    if listening.family == socket.AF_UNIX:
                        client = UNIX_PEER
                    self._admit(AcceptedConnection(sock, client), connections)
            except (BlockingIOError, ConnectionAbortedError):
                pass
            except (OSError, MemoryError) as error:
                # Out of descriptors or memory: retry, because connections that end release some.
                self._log_once("cannot accept connections", error=str(error) or type(error).__name__)
                await trio.sleep(OUT_OF_DESCRIPTORS_S)
            for _ in range(min(STARTS_PER_TURN, len(self._arrivals))):
                connection = ServerConnection(self._shared, *self._arrivals.pop())
                self._connections.add(connection)
                connections.start_soon(self._serve, connection)

    def _admit(self, arrival: AcceptedConnection, connections: trio.Nursery) -> None:
        if len(self._connections) + len(self._arrivals) < self._shared.limits.connections:
            self._full = False
            # The first one is started at once, so it need not be known who it is.
            peer = str(arrival.client[0])
            is_first = not self._arrivals
            caller = Sender(peer) if is_first else self._shared.callers.peek(arrival.sock, peer)
            self._arrivals.add(arrival, caller)
            return
        self._log_once("too many connections", limit=self._shared.limits.connections)
        if self._refusals < REFUSALS:
            self._refusals += 1
            connections.start_soon(self._refuse, arrival.sock)
        else:
            arrival.sock.close()

    def _log_once(self, event: str, **details: Any) -> None:
        """Log that the server is full, but not again until a connection was accepted."""
        if not self._full:
            self._full = True
            logger.warning(event, **details)

    async def _serve(self, connection: ServerConnection) -> None:
        try:
            await connection.run()
        finally:
            self._connections.remove(connection)

    async def _refuse(self, sock: socket.socket) -> None:
        try:
            with suppress(OSError):
                sock.send(refusal(503, "too many connections; try again later"))
                sock.shutdown(socket.SHUT_WR)
                await linger(sock)
        finally:
            self._refusals -= 1
            trio.lowlevel.notify_closing(sock)
            sock.close()


def _listen_on_all(host: str, port: int, found: Sequence[Any], *, is_shared: bool) -> list[socket.socket]:
    sockets: list[socket.socket] = []
    failure: OSError | None = None
    for family, _, _, _, address in dict.fromkeys(found):
        chosen = sockets[0].getsockname()[1] if sockets else port
        try:
            sockets.append(_listen(family, (address[0], chosen, *address[2:]), is_shared=is_shared))
        except OSError as error:
            failure = CannotListen(error.errno, _explain(host, chosen, error))
            if error.errno not in {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}:  # for example without IPv6
                break
    else:
        if sockets:
            return sockets
    for sock in sockets:
        sock.close()
    assert failure is not None
    raise failure


def _explain(host: str, port: int, error: OSError) -> str:
    if error.errno != errno.EADDRINUSE:
        return f"cannot listen on {host}, port {port}: {error.strerror}"
    return (
        f"port {port} of {host} is in use by another program, perhaps another Fairlead (`fairlead ps`): "
        "stop that one, or choose another port with --port"
    )


def _listen(family: int, address: tuple[Any, ...], *, is_shared: bool) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        # Accepted connections inherit these.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option, value in _KEEP_ALIVE:
            if hasattr(socket, option):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        sock.bind(address)
        if not is_shared:
            sock.listen(BACKLOG)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


def _hypercorn_config(limits: Limits) -> HypercornConfig:
    config = HypercornConfig()
    config.h11_max_incomplete_size = limits.header_bytes
    config.errorlog = None  # we log ourselves
    config.accesslog = None
    return config
