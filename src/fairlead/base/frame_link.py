"""One connection between two processes: typed messages in both directions, in length-prefixed frames.

Sending is synchronous: a message is buffered, and `run` writes what has accumulated, in one call. A peer that
does not read never delays its sender; the connection ends when the buffer is full.
"""

from collections.abc import Awaitable, Callable
from math import inf
from typing import Generic, TypeVar

import msgspec
import structlog
import trio

from fairlead.base.frames import MAX_FRAME_BYTES, FrameSplitter, encode_frame
from fairlead.base.supervision import described

READ_BYTES = 1 << 18
UNSENT_BYTES = 64 * 1024 * 1024

Received = TypeVar("Received")

logger = structlog.get_logger("fairlead.distributed.ipc")


class FrameLink(Generic[Received]):
    """A connection with a peer, `name` in the log. `decoder` decodes its messages.

    `problem`: why this process has ended the connection; empty if it has not.
    `may_send` is called before each write: once it returns False, the connection ends, and nothing that was
    buffered is written. It also ends after `silence_s` without data. At most `unsent_bytes` are buffered,
    and a frame has at most `max_frame_bytes`.
    """

    def __init__(
        self,
        stream: trio.abc.Stream,
        decoder: msgspec.msgpack.Decoder[Received],
        *,
        name: str = "peer",
        may_send: Callable[[], bool] = lambda: True,
        silence_s: float = inf,
        unsent_bytes: int = UNSENT_BYTES,
        max_frame_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        self.name = name
        self.problem = ""
        self._stream = stream
        self._decoder = decoder
        self._may_send = may_send
        self._silence_s = silence_s
        self._unsent_bytes = unsent_bytes
        self._splitter = FrameSplitter(max_bytes=max_frame_bytes)
        self._unsent = bytearray()
        self._added = trio.Event()
        self._scope = trio.CancelScope()
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        """Whether it has ended, or will end."""
        return self._is_closed

    def send(self, message: msgspec.Struct) -> None:
        """Send a message. It is dropped if the connection has ended."""
        if self._is_closed:
            return
        if not self._unsent:
            self._added.set()
        self._unsent += encode_frame(message)
        if len(self._unsent) > self._unsent_bytes:
            self._note_problem("it does not read")
            self.close()

    def close(self) -> None:
        """End the connection: `run` returns, and nothing more is sent or received."""
        self._is_closed = True
        self._unsent.clear()
        self._scope.cancel()

    async def run(self, handle: Callable[[Received], Awaitable[None] | None]) -> None:
        """Exchange messages until either side closes the connection; `handle` each one.

        What `handle` returns is awaited before the next message is handled.
        """
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._write)
                    await self._read(handle)
                    nursery.cancel_scope.cancel()
        finally:
            self.close()
            await trio.aclose_forcefully(self._stream)

    async def _receive(self) -> list[Received] | None:
        """Wait for data; return its complete messages. None: the peer closed, is silent, or sent bad data."""
        data = b""
        try:
            with trio.move_on_after(self._silence_s) as silence:
                data = bytes(await self._stream.receive_some(READ_BYTES))
            if silence.cancelled_caught:
                self._note_problem("it is silent")
            if not data:
                return None
            return [self._decoder.decode(frame) for frame in self._splitter.feed(data)]
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return None
        except (ValueError, msgspec.MsgspecError) as error:
            self._note_problem(f"it sent an invalid message: {error}")
            return None

    async def _read(self, handle: Callable[[Received], Awaitable[None] | None]) -> None:
        while (received := await self._receive()) is not None:
            for message in received:
                if (handling := handle(message)) is not None:
                    await handling
                if self._is_closed:
                    return

    async def _write(self) -> None:
        while True:
            await self._added.wait()
            self._added = trio.Event()
            if not await self._write_once():
                self.close()
                return

    async def _write_once(self) -> bool:
        while self._unsent:
            if not self._may_send():
                return False
            data, self._unsent = self._unsent, bytearray()
            try:
                await self._stream.send_all(data)
            except trio.ClosedResourceError:
                return False
            except trio.BrokenResourceError as error:
                if isinstance(cause := error.__cause__, OSError) and not isinstance(cause, ConnectionError):
                    self._note_problem(f"it cannot be written to: {described(cause)}")
                return False
        return True

    def _note_problem(self, problem: str) -> None:
        self.problem = self.problem or problem
        logger.warning("connection closed", peer=self.name, reason=problem)
