"""Addresses of processes: `unix:PATH` on this machine, `tcp://HOST:PORT` elsewhere."""

import os
import ssl
import stat
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import trio

from fairlead.base.config import ConfigError

CONNECT_TIMEOUT_S = 5.0
BACKLOG = 128


class LinkAddress(NamedTuple):
    """A Unix socket's `path`; or, if that is empty, a TCP port of a host."""

    path: str = ""
    host: str = ""
    port: int = 0

    @classmethod
    def parse(cls, text: str) -> "LinkAddress":
        """Return the address. Raises `ConfigError`."""
        if text.startswith("unix:") and len(text) > len("unix:"):
            return cls(path=text.removeprefix("unix:"))
        host, _, port = text.removeprefix("tcp://").rpartition(":")
        if text.startswith("tcp://") and host and port.isascii() and port.isdigit() and int(port) < 65536:
            return cls(host=host.removeprefix("[").removesuffix("]"), port=int(port))
        raise ConfigError(f"{text!r}: must be unix:PATH or tcp://HOST:PORT")

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}"


async def connect(address: LinkAddress, tls: ssl.SSLContext | None = None) -> trio.abc.Stream:
    """Return a connection, encrypted if there is a context. Raises `OSError`, also if TLS fails."""
    try:
        with trio.fail_after(CONNECT_TIMEOUT_S):
            if address.path:
                return await trio.open_unix_socket(address.path)
            stream = await trio.open_tcp_stream(address.host, address.port)
            return stream if tls is None else await _encrypted(stream, tls, address.host)
    except trio.TooSlowError:
        raise OSError(f"{address}: no answer within {CONNECT_TIMEOUT_S:g} s") from None
    except trio.BrokenResourceError as error:
        raise OSError(f"{address}: {error.__cause__ or error}") from error


async def listen(
    address: LinkAddress, tls: ssl.SSLContext | None = None
) -> list[trio.abc.Listener[trio.abc.Stream]]:
    """Return listeners. Only this user may connect to a Unix socket; that of an ended process is replaced.

    Raises `OSError`.
    """
    if not address.path:
        listeners = await trio.open_tcp_listeners(address.port, host=address.host, backlog=BACKLOG)
        if tls is None:
            return [*listeners]
        return [trio.SSLListener(listener, tls) for listener in listeners]
    _remove_socket(Path(address.path))
    sock = trio.socket.socket(trio.socket.AF_UNIX, trio.socket.SOCK_STREAM)
    try:
        mask = os.umask(0o177)
        try:
            await sock.bind(address.path)
        finally:
            os.umask(mask)
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return [trio.SocketListener(sock)]


async def _encrypted(stream: trio.SocketStream, tls: ssl.SSLContext, host: str) -> trio.abc.Stream:
    encrypted = trio.SSLStream(stream, tls, server_hostname=host)
    try:
        await encrypted.do_handshake()
    except BaseException:
        await trio.aclose_forcefully(stream)
        raise
    return encrypted


def _remove_socket(path: Path) -> None:
    """Remove the socket of an ended process. A file of another kind stays, so that binding fails."""
    with suppress(FileNotFoundError):
        if stat.S_ISSOCK(path.lstat().st_mode):
            path.unlink()
