"""Fronts and dispatchers on different machines: processes that people start, or a cluster manager.

A dispatcher has no models of its own: its nodes are servers. Of several, the one that holds the lease leads;
the others listen only when they have got it. A dispatcher that has lost it ends, and is to be started again.
"""

import os
import secrets
import socket
import ssl
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import structlog
import trio

from fairlead.base.config import POSTGRES_PREFIXES, Config, ConfigError, DispatcherConfig
from fairlead.base.errors import FairleadError
from fairlead.base.runtime import interpreter
from fairlead.base.telemetry import logs
from fairlead.distributed.ipc.address import LinkAddress
from fairlead.distributed.ipc.handshake import read_key
from fairlead.distributed.lease import LeaseLost, make_lease
from fairlead.distributed.ray.launcher_process import refuse_without_ray
from fairlead.distributed.supervisor import control
from fairlead.generation.request_log import open_request_log
from fairlead.server.app import ServerObserver, announce, ignore_hangups, url_of, watch_signals
from fairlead.server.descriptors import raise_limit
from fairlead.server.processes.child import NoSupervisor
from fairlead.server.processes.dispatcher_role import DispatcherRole
from fairlead.server.processes.front_role import FrontRole, of_one_front

logger = structlog.get_logger("fairlead.dispatcher")


def run_dispatcher(config: Config, announcer: ServerObserver) -> int:
    """Be a dispatcher until a signal; return the exit code, which is 1 after the lease was lost."""
    return _run(config, announcer, partial(dispatch, config, announcer))


def run_front(config: Config, announcer: ServerObserver) -> int:
    """Be a front until a signal, and then until its jobs have ended; return the exit code."""
    return _run(config, announcer, partial(serve_front, config, announcer))


async def dispatch(
    config: Config,
    announcer: ServerObserver,
    *,
    task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Wait for the lease, then be the dispatcher. Calls `started()` with the epoch when fronts may connect.

    Raises `ConfigError` or `OSError` if it cannot start, and `LeaseLost`.
    """
    settings = config.dispatcher
    if settings.listen is None:
        raise ConfigError("dispatcher.listen: is missing: the address for fronts, tcp://HOST:PORT")
    _refuse_models(config)
    refuse_without_ray(config)
    key, tls = _key(settings), _server_tls(settings)
    # Without a lease there is one dispatcher. Each run of it should have a higher epoch than those before; if
    # the clock was set back, the epoch is raised when a front reports the one that it has seen.
    lease = make_lease(config.lease, os.environ, epoch=int(time.time()))
    link = NoSupervisor()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_end_at_signal, announcer, nursery.cancel_scope)
        nursery.start_soon(ignore_hangups)
        term = await nursery.start(lease.hold)
        start = control.RunDispatcher(control.pack(config), "", key, epoch=term.epoch, expected=None)
        address = LinkAddress.parse(settings.listen)
        role = DispatcherRole(
            link, start, address=address, tls=tls, may_send=term.is_valid, raise_epoch=term.raise_epoch
        )
        nursery.start_soon(role.run)
        await link.ready.wait()
        logger.info("leading", epoch=term.epoch, address=settings.listen)
        task_status.started(term.epoch)


async def serve_front(
    config: Config,
    announcer: ServerObserver,
    *,
    task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve HTTP until drained. Calls `started()` with the URL when it listens, perhaps before a dispatcher.

    Raises `ConfigError` or `OSError` if it cannot start.
    """
    settings = config.dispatcher
    if not settings.addresses:
        raise ConfigError("dispatcher.addresses: is missing: the addresses of dispatchers, tcp://HOST:PORT")
    _refuse_models(config)
    if config.responses.in_store and not (config.store or "").startswith(POSTGRES_PREFIXES):
        raise ConfigError("responses.inStore: needs PostgreSQL in `store`, which fronts can reach")
    name = f"{socket.gethostname()[:64]}-{os.getpid()}-{secrets.token_hex(4)}"
    start = control.RunFront(b"", "", _key(settings), name)
    link = NoSupervisor()
    addresses = [LinkAddress.parse(address) for address in settings.addresses]
    tls = _client_tls(settings)
    with open_request_log(config) as request_log:
        role = FrontRole(link, start, of_one_front(config), request_log, addresses=addresses, tls=tls)
        async with trio.open_nursery() as nursery:
            delay_s = config.limits.drain_delay_s
            nursery.start_soon(watch_signals, link.drain, announcer, link.stop, delay_s)
            nursery.start_soon(ignore_hangups)
            nursery.start_soon(_announce_front, link, role, announcer, task_status)
            await role.run()
            nursery.cancel_scope.cancel()


async def _announce_front(
    link: NoSupervisor, role: FrontRole, announcer: ServerObserver, task_status: trio.TaskStatus[str]
) -> None:
    await link.ready.wait()
    url = url_of(*role.address)
    announce(announcer.ready, url, [])
    task_status.started(url)


async def _end_at_signal(announcer: ServerObserver, scope: trio.CancelScope) -> None:
    """End at a signal. Fronts keep their jobs, and connect to the next dispatcher."""
    await watch_signals(lambda: None, announcer)
    scope.cancel()


def _run(config: Config, announcer: ServerObserver, serve: Callable[[], Awaitable[None]]) -> int:
    interpreter.prepare()
    with logs.log_streams():
        logs.configure(json=config.log_json, level=config.log_level)
        raise_limit()
        try:
            trio.run(serve, strict_exception_groups=True)
        except* (FairleadError, ConfigError, OSError, LeaseLost) as group:
            cause: BaseException = group
            while isinstance(cause, BaseExceptionGroup):
                cause = cause.exceptions[0]
            announce(announcer.failed, "", str(cause) or "the lease was lost")
            status = 2 if isinstance(cause, ConfigError) else 1
        else:
            status = 0
    return status


def _refuse_models(config: Config) -> None:
    if config.local_models:
        raise ConfigError("models: run them with `fairlead node`, and list these as nodes of the dispatcher")


def _key(settings: DispatcherConfig) -> bytes:
    assert settings.key_file is not None, "the configuration is checked"
    return read_key(Path(settings.key_file))


def _server_tls(settings: DispatcherConfig) -> ssl.SSLContext | None:
    if settings.tls_certificate is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(settings.tls_certificate, settings.tls_key)
    except OSError as error:
        raise ConfigError(f"dispatcher.tlsCertificate: {error}") from error
    return context


def _client_tls(settings: DispatcherConfig) -> ssl.SSLContext | None:
    if settings.tls_ca is None:
        return None
    try:
        return ssl.create_default_context(cafile=settings.tls_ca)
    except OSError as error:
        raise ConfigError(f"dispatcher.tlsCa: {error}") from error
