"""The socket between rank 0 of a model and another rank: blocking, with one frame for each message."""

import socket
from typing import Generic, TypeVar

import msgspec

from fairlead import messages

READ_BYTES = 1 << 20


class StartRank(msgspec.Struct, frozen=True, array_like=True, tag="start"):
    """Load the part of rank `rank` of the model. The ranks find each other in the file `store`."""

    spec: messages.WorkerSpec
    rank: int
    store: str


class RankLoaded(msgspec.Struct, frozen=True, array_like=True, tag="loaded"):
    """The weights of this rank are loaded. It waits for the others in the store."""


class RankFailed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """This rank cannot load its part, for the reason in `message`."""

    message: str


FromRank = RankLoaded | RankFailed

Received = TypeVar("Received")


class RankGone(Exception):
    """The other process has closed its end of the socket, or died."""


class RankConnection(Generic[Received]):
    """Sends messages, and receives those that `decoder` decodes. All methods raise `RankGone`."""

    def __init__(self, connection: socket.socket, decoder: msgspec.msgpack.Decoder[Received]) -> None:
        self._connection = connection
        self._decoder = decoder
        self._splitter = messages.FrameSplitter()
        self._frames: list[bytes] = []

    def send(self, message: msgspec.Struct) -> None:
        """Send a message. Blocks while the other process is slow to read."""
        try:
            self._connection.sendall(messages.encode_frame(message))
        except OSError as error:
            raise RankGone from error

    def receive(self) -> Received:
        """Wait for the next message."""
        while not self._frames:
            try:
                data = self._connection.recv(READ_BYTES)
            except ConnectionError as error:
                raise RankGone from error
            if not data:
                raise RankGone
            self._frames.extend(self._splitter.feed(data))
        return self._decoder.decode(self._frames.pop(0))
