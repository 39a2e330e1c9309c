"""The child's end of one front's connection: frames in both directions, without ever blocking."""

import contextlib
import os
import select
import socket
import stat
from pathlib import Path

from fairlead import messages

READ_BYTES = 1 << 20
# A front with more unread data than this does not read. One more frame of any size still fits.
UNSENT_BYTES = 4 << 20


class FrontGone(Exception):
    """The connection is over: closed by the front, or to be closed for the reason in the message."""


class FrontConnection:
    """One connection. `name` is the front's own, once it has attached. Methods raise `FrontGone`."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.name = "a front"
        self._connection = connection
        self._splitter = messages.FrameSplitter()
        self._unsent = bytearray()

    def fileno(self) -> int:
        """Return the file descriptor, for `poll`."""
        return self._connection.fileno()

    @property
    def awaited(self) -> int:
        """The events to poll for."""
        return select.POLLIN | select.POLLOUT if self._unsent else select.POLLIN

    def receive(self) -> list[bytes]:
        """Return the frames that are complete now."""
        try:
            data = self._connection.recv(READ_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            raise FrontGone from error
        if not data:
            raise FrontGone
        try:
            return list(self._splitter.feed(data))
        except ValueError as error:
            raise FrontGone(f"it sent {error}") from None

    def send(self, message: messages.ToFront) -> None:
        """Send a message, or buffer what the socket does not accept now."""
        if len(self._unsent) > UNSENT_BYTES:
            self.flush()  # it may have read since
        if len(self._unsent) > UNSENT_BYTES:
            raise FrontGone(f"it did not read {len(self._unsent)} bytes")
        self._unsent += messages.encode_frame(message)
        self.flush()

    def flush(self) -> None:
        """Send what is buffered, as far as the socket accepts it now."""
        try:
            while self._unsent:
                sent = self._connection.send(self._unsent)
                del self._unsent[:sent]
        except BlockingIOError:
            pass
        except OSError as error:
            raise FrontGone from error

    def close(self) -> None:
        """Close the connection. What is buffered is lost."""
        self._connection.close()


def bind(path: str) -> socket.socket:
    """Return a socket bound to `path`, which does not listen yet; only this user can connect to it.

    A socket that is there is replaced: its process has ended. Raises `OSError`.
    """
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(Path(path).lstat().st_mode):
            Path(path).unlink()
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    previous = os.umask(0o177)
    try:
        bound.bind(path)
    except BaseException:
        bound.close()
        raise
    finally:
        os.umask(previous)
    bound.setblocking(False)
    return bound
