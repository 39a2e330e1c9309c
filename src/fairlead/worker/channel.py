"""The child's end of the parent's socket. Blocking, because a child does nothing without its parent."""

import select
import socket

from fairlead import messages

READ_BYTES = 1 << 20


class ParentGone(Exception):
    """The parent has closed its end of the socket, or died."""


class Channel:
    """Reads the parent's messages, and writes frames to it. All methods raise `ParentGone`."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._splitter = messages.FrameSplitter()
        self._readable = select.poll()
        self._readable.register(connection, select.POLLIN)
        self._received: list[bytes] = []  # with the spec, before the model was loaded

    def fileno(self) -> int:
        """Return the file descriptor, for `poll`."""
        return self._connection.fileno()

    @property
    def has_received(self) -> bool:
        """Whether `read` returns at once, whatever the socket has."""
        return bool(self._received)

    def read_spec(self) -> messages.WorkerSpec:
        """Wait for the first message."""
        while not self._received:
            self._received = self._receive(wait_s=None)
        return messages.spec_decoder.decode(self._received.pop(0))

    def read(self, *, wait_s: float | None) -> list[messages.ToChild]:
        """Return the received messages, after waiting at most `wait_s`; None: until data arrives."""
        payloads, self._received = self._received, []
        payloads += self._receive(wait_s=0.0 if payloads else wait_s)
        return [messages.to_child_decoder.decode(payload) for payload in payloads]

    def write(self, message: messages.ToParent) -> None:
        """Send a message. Blocks while the parent is slow to read."""
        try:
            self._connection.sendall(messages.encode_frame(message))
        except ConnectionError as error:
            raise ParentGone from error

    def _receive(self, *, wait_s: float | None) -> list[bytes]:
        if wait_s:
            self._readable.poll(1000 * wait_s)
        try:
            data = self._connection.recv(READ_BYTES, 0 if wait_s is None else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        except ConnectionError as error:
            raise ParentGone from error
        if not data:
            raise ParentGone
        return list(self._splitter.feed(data))
