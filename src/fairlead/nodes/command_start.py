"""What a command gets when it is started: a port of its own, and the key that its server will require."""

import os
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import trio
from msgspec.structs import replace

from fairlead.base.config import CommandConfig
from fairlead.base.config.command_keys import keys_in_file, keys_of, usable
from fairlead.base.errors import LoadFailed
from fairlead.nodes.processes import ports

# A daemon, such as Docker's, closes the port of a server shortly after the server has ended.
RELEASE_WAIT_S = 3.0
RELEASE_POLL_S = 0.1
LOOKUP_S = 2.0
KEY_FILE_BYTES = 64 * 1024


class CommandStart(NamedTuple):
    """A command that may be started now.

    config: with its port and its key.
    secrets: all keys that its server accepts, which are not to be shown.
    port: of its server.
    addresses: of its server, as far as they are this machine's; empty: it is elsewhere.
    """

    config: CommandConfig
    secrets: tuple[str, ...]
    port: int
    addresses: tuple[str, ...]


@asynccontextmanager
async def command_start(config: CommandConfig) -> AsyncIterator[CommandStart]:
    """Yield the command with a port that no other command gets during the block. Raises `LoadFailed`."""
    with ExitStack() as held:
        if config.port is not None:
            config = config.at_port(_hold_next(config.port, held))
        parts = urlsplit(config.proxy)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        addresses = await _local_addresses(parts.hostname or "")
        if addresses and port != config.port:
            await _hold(port, addresses, held)
        keys = await _keys_of(config)
        api_key = config.api_key or usable(keys)
        yield CommandStart(replace(config, api_key=api_key), keys, port, addresses)


def is_taken(port: int) -> str:
    """Return the reason why a command cannot be started, or is given up."""
    return f"port {port} is taken by another program"


def _hold_next(port: int, held: ExitStack) -> int:
    free = ports.hold_next(port)
    if free is None:
        raise LoadFailed(f"no port from {port} on is free")
    held.callback(ports.release, free)
    return free


async def _hold(port: int, addresses: tuple[str, ...], held: ExitStack) -> None:
    deadline = trio.current_time() + RELEASE_WAIT_S
    while not ports.hold(port, addresses):
        if trio.current_time() >= deadline:
            raise LoadFailed(is_taken(port))
        await trio.sleep(RELEASE_POLL_S)
    held.callback(ports.release, port)


async def _local_addresses(host: str) -> tuple[str, ...]:
    """Return the addresses of this machine that a host stands for."""
    if host == "localhost":
        return ports.LOOPBACK
    try:
        addresses = [str(ip_address(host))]
    except ValueError:
        addresses = []
        with trio.move_on_after(LOOKUP_S), suppress(OSError, UnicodeError):
            found = await trio.socket.getaddrinfo(host, None, type=trio.socket.SOCK_STREAM)
            addresses = list(dict.fromkeys(str(address[0]) for *_, address in found))
    return tuple(address for address in addresses if ports.is_local(address))


async def _keys_of(config: CommandConfig) -> tuple[str, ...]:
    """Return the keys that the command's server accepts, as far as they are known."""
    keys, file = keys_of(config.cmd, {**os.environ, **config.env})
    if file is not None:
        keys += await trio.to_thread.run_sync(_read_keys, file)
    return keys if config.api_key is None else (config.api_key, *keys)


def _read_keys(file: str) -> tuple[str, ...]:
    """Return the keys in a file; none if it cannot be read here, for it may be in a container."""
    with suppress(OSError, ValueError):
        path = Path(file)
        if path.is_file():
            with path.open("rb") as source:
                return keys_in_file(source.read(KEY_FILE_BYTES))
    return ()
