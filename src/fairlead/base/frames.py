"""Frames: how messages between processes are delimited. Each is msgpack behind its length, never pickle.

`FrameSocket` is an end of a connection in a program without an event loop. In a Trio program it is a
`link.connection.FrameLink`.
"""

import select
import socket
import struct
from collections.abc import Iterator
from typing import Generic, TypeVar

import msgspec

MAX_FRAME_BYTES = 64 * 1024 * 1024
READ_BYTES = 1 << 20
_LENGTH = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()

Received = TypeVar("Received")


def encode_frame(message: msgspec.Struct) -> bytes:
    """Return the message, prefixed with its length. A payload above `MAX_FRAME_BYTES` is a bug."""
    payload = _encoder.encode(message)
    assert len(payload) <= MAX_FRAME_BYTES
    return _LENGTH.pack(len(payload)) + payload


class FrameSplitter:
    """Splits a byte stream into frames of at most `max_bytes`. Buffers at most one incomplete frame."""

    def __init__(self, *, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self.max_bytes = max_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Add received bytes; yield each payload that is now complete."""
        self._buffer += data
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._buffer, start)
            if size > self.max_bytes:
                raise ValueError(f"a frame of {size} bytes, over the bound of {self.max_bytes}")
            end = start + _LENGTH.size + size
            if len(self._buffer) < end:
                break
            yield bytes(self._buffer[start + _LENGTH.size : end])
            start = end
        del self._buffer[:start]


class PeerGone(Exception):
    """The connection is over: closed by the other process, or to be closed for the reason in the message."""


class FrameSocket(Generic[Received]):
    """Sends messages, and receives those that `decoder` decodes. Methods raise `PeerGone`.

    `unsent_bytes`: None: `send` blocks while the other process is slow to read, at most for the timeout of
    the socket. A number: `send` does not block. What the socket does not accept is buffered, and sent by
    `flush`. A peer that leaves more than this unread is gone; one more frame of any size still fits.
    """

    def __init__(
        self,
        connection: socket.socket,
        decoder: msgspec.msgpack.Decoder[Received],
        *,
        unsent_bytes: int | None = None,
    ) -> None:
        if unsent_bytes is not None:
            connection.setblocking(False)
        self._connection = connection
        self._decoder = decoder
        self._unsent_bytes = unsent_bytes
        self._unsent = bytearray()
        self._splitter = FrameSplitter()
        self._received: list[Received] = []
        self._readable = select.poll()
        self._readable.register(connection, select.POLLIN)

    def fileno(self) -> int:
        """Return the file descriptor, for `poll`."""
        return self._connection.fileno()

    @property
    def has_received(self) -> bool:
        """Whether `read` returns at once, whatever the socket has."""
        return bool(self._received)

    @property
    def awaited(self) -> int:
        """The events to poll for."""
        return select.POLLIN | select.POLLOUT if self._unsent else select.POLLIN

    def receive(self) -> Received:
        """Wait for the next message, at most for the timeout of the socket."""
        while not self._received:
            self._receive()
        return self._received.pop(0)

    def read(self, *, wait_s: float | None) -> list[Received]:
        """Return the received messages, after waiting at most `wait_s`; None: until data arrives."""
        if not self._received and wait_s != 0:
            self._readable.poll(None if wait_s is None else 1000 * wait_s)
        self._receive(socket.MSG_DONTWAIT)
        received, self._received = self._received, []
        return received

    def send(self, message: msgspec.Struct) -> None:
        """Send a message, or buffer what the socket does not accept now."""
        bound = self._unsent_bytes
        if bound is not None and len(self._unsent) > bound:
            self.flush()  # it may have read since
            if len(self._unsent) > bound:
                raise PeerGone(f"it did not read {len(self._unsent)} bytes")
        self._unsent += encode_frame(message)
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
            raise _gone(error) from error

    def close(self) -> None:
        """Close the connection. What is buffered is lost."""
        self._connection.close()

    def _receive(self, flags: int = 0) -> None:
        """Read once, and keep the messages that are complete then."""
        try:
            data = self._connection.recv(READ_BYTES, flags)
        except BlockingIOError:
            return
        except OSError as error:
            raise _gone(error) from error
        if not data:
            raise PeerGone
        try:
            self._received.extend(map(self._decoder.decode, self._splitter.feed(data)))
        except (ValueError, msgspec.MsgspecError) as error:
            raise PeerGone(f"it sent an invalid message: {error}") from None


def _gone(error: OSError) -> PeerGone:
    return PeerGone("" if isinstance(error, ConnectionError) else str(error))
