"""Reads the configuration again while the server runs: on SIGHUP, or whenever its file has changed.

An invalid file changes nothing, and the log says why, by file, line and key. Independent of models and keys:
the composition root applies a new configuration.
"""

import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import structlog
import trio

from fairlead.base.config import NO_OPERATOR, Config, ConfigError, lacks_operator
from fairlead.base.config.spelling import spelled
from fairlead.base.errors import FairleadError
from fairlead.base.supervision import FailureBoundary, log_failure

POLL_INTERVAL_S = 1.0

# Settings that a running server cannot change. It reports those that differ, and keeps the old values.
FIXED = (
    *(
        "host",
        "port",
        "fronts",
        "dispatcher",
        "lease",
        "cluster",
        "allowed_hosts",
        "trusted_proxies",
        "cors",
        "queue",
        "limits",
        "request_timeout_s",
    ),
    *("while_loading", "scheduler", "log_json", "log_level", "tenant_names", "otlp_endpoint", "upstream"),
    *("responses", "flow_control", "store", "usage_days", "batches"),
)

logger = structlog.get_logger("fairlead.router.fleet.reload")

Change = Callable[[Config], Awaitable[object]]


class ConfigSource(NamedTuple):
    """Where the configuration came from.

    file: its file.
    read: reads it again, given the configuration in force, if there is one. Blocks. Raises `ConfigError`
        and `OSError`.
    is_watched: read it whenever the file changes.
    handles_signals: read it on SIGHUP, which is only possible if no other ASGI server runs this process.
    """

    file: Path
    read: Callable[[Config | None], Config]
    is_watched: bool = False
    handles_signals: bool = True


async def watch_config(source: ConfigSource, config: Config, change: Change) -> None:
    """Until cancelled, call `change` with each new configuration of the source; `config` is in force now.

    `change` gets a configuration without differences in settings that need a restart. It raises a
    `FairleadError` if the configuration is valid but cannot be applied.
    """
    requested = trio.Event()
    started = config

    async def reload_on_request() -> None:
        nonlocal requested, config
        while True:
            await requested.wait()
            requested = trio.Event()
            config = await _reread(source, started, config, change)

    def request_reload() -> None:
        requested.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(reload_on_request)
        if source.handles_signals:
            nursery.start_soon(_watch_signals, request_reload)
        if source.is_watched:
            nursery.start_soon(_watch, source.file, request_reload)


async def _reread(source: ConfigSource, started: Config, config: Config, change: Change) -> Config:
    """Read and apply the configuration, keeping settings that need a restart; return the last valid one."""
    latest = config
    with FailureBoundary() as boundary:
        # A reload is rare and its file small; a thread keeps a slow disk from delaying streams.
        latest = await trio.to_thread.run_sync(source.read, config)
        # Validated again: an API key of a priority class that only a restart adds is an error.
        await change(msgspec.structs.replace(latest, **{name: getattr(started, name) for name in FIXED}))
    if boundary.failure is not None:
        _log_failure(source.file, boundary.failure)
        return config
    if lacks_operator(latest.api_keys) and not lacks_operator(config.api_keys):
        logger.warning(NO_OPERATOR)
    # Reported once, when they change, and not when the file returns to what is in force.
    changed = set(_fixed(config, latest))
    if fixed := [setting for setting in _fixed(started, latest) if setting in changed]:
        logger.warning("these settings need a restart", settings=fixed)
    return latest


def _log_failure(file: Path, failure: BaseException) -> None:
    if not isinstance(failure, ConfigError | FairleadError | OSError):
        log_failure("configuration not reloaded", failure, file=str(file))
        return
    # The log has the file: the system's message needs neither its name nor an error number.
    message = failure.strerror if isinstance(failure, OSError) and failure.strerror else str(failure)
    for reason in message.splitlines():
        logger.error("configuration not reloaded", file=str(file), reason=reason)


def _fixed(config: Config, other: Config) -> Iterator[str]:
    """Yield the fixed settings that differ, spelled as in a file: `port`, `queue.capacity`."""
    for name in FIXED:
        before, after = getattr(config, name), getattr(other, name)
        if before == after:
            continue
        if not isinstance(before, msgspec.Struct):
            yield spelled(name)
            continue
        for field in before.__struct_fields__:
            if getattr(before, field) != getattr(after, field):
                yield f"{spelled(name)}.{spelled(field)}"


async def _watch_signals(request_reload: Callable[[], None]) -> None:
    if not hasattr(signal, "SIGHUP"):  # Windows
        return
    with trio.open_signal_receiver(signal.SIGHUP) as signals:
        async for _ in signals:
            request_reload()


async def _watch(file: Path, request_reload: Callable[[], None]) -> None:
    """Call `request_reload` when a change is complete: an editor may write a file in several steps."""
    known = seen = _signature(file)
    while True:
        await trio.sleep(POLL_INTERVAL_S)
        before, seen = seen, _signature(file)
        if seen not in (known, None) and seen == before:
            known = seen
            request_reload()


def _signature(file: Path) -> tuple[int, int, int] | None:
    """Return a value that differs after any change; None while there is no such file."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
