"""Listening on a Unix socket: a file that exists as long as the server listens.

A server that was killed leaves its file behind, and the next one replaces it. A file on which a server
listens is not replaced, and neither is any other kind of file.
"""

import errno
import os
import socket
import stat
from contextlib import suppress
from pathlib import Path

from fairlead.base.config import UNIX_PREFIX

# A peer without an address, as `accept` returns those of other families.
UNIX_PEER = ("", 0)
# The owner and the group may connect. The permissions of the folder can restrict this further.
MODE = 0o660


class CannotListen(OSError):
    """An address that cannot be bound; the message says what to do."""

    def __str__(self) -> str:
        return self.strerror or super().__str__()


class UnixListener(socket.socket):
    """A listening Unix socket. Closing it removes its file, unless another server has replaced that.

    Copies of it (`dup`, descriptors in other processes) remove nothing.
    """

    _path: str | None = None
    _identity: tuple[int, int] | None = None

    def bind_to(self, path: str) -> None:
        """Bind the socket to this path, where no file is. Raises `OSError`."""
        mask = os.umask(0o777 & ~MODE)
        try:
            self.bind(path)
        finally:
            os.umask(mask)
        # An absolute path, in case that the working directory changes.
        self._path, self._identity = str(Path(path).absolute()), _identity(path)

    def close(self) -> None:
        """Close the socket and remove its file."""
        path, self._path = self._path, None
        if path is not None:
            with suppress(OSError):
                if _identity(path) == self._identity:
                    os.unlink(path)  # noqa: PTH108  # a string, as the interpreter may be ending
        super().close()


def listen_on_path(path: str, *, backlog: int, send_buffer_bytes: int) -> UnixListener:
    """Return a listening socket at this path. Raises `CannotListen`."""
    sock = UnixListener(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_left_over(path)
        sock.bind_to(path)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
        sock.listen(backlog)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        if isinstance(error, CannotListen):
            raise
        raise CannotListen(error.errno, f"cannot listen on {path}: {error.strerror or error}") from error
    return sock


def _remove_left_over(path: str) -> None:
    """Remove the socket of a server that has ended. Raises `OSError` if there is a file that must stay."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise CannotListen(errno.EEXIST, f"cannot listen on {path}: it is a file of another kind")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as trial:
        trial.setblocking(False)  # with a full backlog, connecting would wait
        try:
            trial.connect(path)
        except ConnectionRefusedError:
            Path(path).unlink(missing_ok=True)
            return
        except BlockingIOError:
            pass
    raise CannotListen(
        errno.EADDRINUSE,
        f"another server listens on {path}, perhaps another Fairlead "
        f"(`fairlead ps --url {UNIX_PREFIX}{path}`): stop that one, or choose another path with --host",
    )


def _identity(path: str) -> tuple[int, int]:
    status = os.lstat(path)
    return status.st_dev, status.st_ino
