"""A client's end of the socket to an engine's process: messages in both directions."""

import contextlib
import socket
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec
import trio

from fairlead import messages
from fairlead.supervision import described

READ_BYTES = 1 << 18

Received = TypeVar("Received")


class EngineConnection(Generic[Received]):
    """Sends synchronously, and receives the messages that have arrived, which `decoder` decodes.

    What the socket does not accept at once is buffered, and sent by `run`. `on_problem` is
    called with the reason for which this end closes the connection.
    """

    def __init__(
        self,
        connection: socket.socket,
        on_problem: Callable[[str], None],
        decoder: msgspec.msgpack.Decoder[Received],
    ) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._on_problem = on_problem
        self._decoder = decoder
        self._splitter = messages.FrameSplitter()
        self._unsent = bytearray()
        self._unsent_added = trio.lowlevel.ParkingLot()

    def send(self, message: messages.WorkerSpec | messages.ToChild | messages.FrontToChild) -> None:
        """Send at once if the socket accepts it, else buffer it. The number of seats bounds the buffer."""
        others_wait = bool(self._unsent)
        self._unsent += messages.encode_frame(message)
        if not others_wait:
            self._flush()

    async def run(self) -> None:
        """Send what is buffered, until cancelled."""
        while True:
            if not self._unsent:
                await self._unsent_added.park()
            await trio.lowlevel.wait_writable(self._socket)
            self._flush()

    async def receive(self) -> list[Received] | None:
        """Wait for data; return its complete messages, of which there may be none.

        Returns None once the engine has closed the connection, or has sent an invalid message.
        """
        await trio.lowlevel.wait_readable(self._socket)
        try:
            data = self._socket.recv(READ_BYTES)
        except BlockingIOError:
            return []
        except ConnectionError:
            return None
        if not data:
            return None
        try:
            return [self._decoder.decode(frame) for frame in self._splitter.feed(data)]
        except (ValueError, msgspec.MsgspecError) as error:
            self._on_problem(f"it sent an invalid message: {error}")
            return None

    def shut_down(self) -> None:
        """End the connection in both directions, if it has not ended."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _flush(self) -> None:
        try:
            while self._unsent:
                sent = self._socket.send(self._unsent)
                del self._unsent[:sent]
        except BlockingIOError:
            self._unsent_added.unpark()
        except OSError as error:
            # An engine that is still there would wait for the lost data. So the connection is ended.
            if not isinstance(error, ConnectionError):
                self._on_problem(f"it cannot be written to: {described(error)}")
            self._unsent.clear()
            self.shut_down()
