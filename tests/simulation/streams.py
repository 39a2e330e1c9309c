"""In-memory connections like TCP's: ordered bytes, latency, bounded buffers, half-close and reset."""

import errno
from collections.abc import Callable

import trio

from simulation.machine import Machine, Pollable, os_error

Address = tuple[str, int]
DEFAULT_BUFFER_BYTES = 64 * 1024


class End(Pollable):
    """One end of a connection; `peer` is the other end.

    Sent bytes are in the peer's `inbox` after `latency_s`. At most `buffer_bytes` bytes are in flight or
    unread. A send takes as many as fit; if `ragged`, a random part of these. `on_hangup` is called when a FIN
    or a reset arrives.
    """

    def __init__(self, machine: Machine, local: Address, remote: Address) -> None:
        super().__init__()
        self.machine = machine
        self.local = local
        self.remote = remote
        self.peer: End
        self.latency_s = 0.0
        self.buffer_bytes = DEFAULT_BUFFER_BYTES
        self.ragged = False
        self.inbox = bytearray()
        self.is_reset = False
        self.has_ended = False  # the peer's FIN has arrived
        self.is_shut = False  # a FIN was sent
        self.is_closed = False
        self.on_hangup: Callable[[], None] = lambda: None
        self._on_way = 0
        self._arrives_s = 0.0

    def __repr__(self) -> str:
        return f"<connection {self.local} to {self.remote}>"

    def is_ready(self, what: str) -> bool:
        """Return whether it is readable or writable. As on Linux, writable means that a third is free."""
        if what == "read":
            return bool(self.inbox) or self.has_ended or self.is_reset or self.is_closed
        return self.is_shut or self.is_reset or 3 * self._free() >= self.buffer_bytes

    # Without waiting ---------------------------------------------------------------------------------

    def receive_now(self, most: int, *, peek: bool = False) -> bytes:
        """Return received bytes; none at the end. Raises `BlockingIOError` or `ConnectionResetError`."""
        if self.inbox:
            data = bytes(self.inbox[:most])
            if not peek:
                del self.inbox[:most]
                self.peer.wake("write")
            return data
        if self.is_reset:
            raise os_error(errno.ECONNRESET)
        if self.has_ended:
            return b""
        raise os_error(errno.EAGAIN)

    def send_now(self, data: bytes) -> int:
        """Send what fits; return how much. Raises `BlockingIOError` or `BrokenPipeError`."""
        if self.is_shut or self.is_reset:
            raise os_error(errno.EPIPE)
        if self.peer.is_closed:
            self.machine.after(self.latency_s, self._was_reset)  # the peer's system answers with a reset
            return len(data)
        size = min(len(data), self._free())
        if not size:
            raise os_error(errno.EAGAIN)
        if self.ragged and size > 1:
            size = self.machine.random.randrange(1, size + 1)
        self._on_way += size
        piece = bytes(data[:size])
        self._later(lambda: self.peer._arrive(piece))
        return size

    def shut(self) -> None:
        """Send a FIN."""
        if not (self.is_shut or self.is_reset):
            self.is_shut = True
            self._later(self.peer._end)

    def reset(self) -> None:
        """Reset the connection."""
        if not self.is_closed:
            self.is_closed = self.is_shut = True
            self._later(self.peer._was_reset)

    def release(self) -> None:
        """Close it: with a reset if there are unread bytes, else with a FIN."""
        if self.is_closed:
            return
        if self.inbox:
            self.reset()
            return
        self.shut()
        self.is_closed = True

    # With waiting: for clients, other servers and child processes -------------------------------------

    async def receive(self, most: int = 1 << 16) -> bytes:
        """Wait for bytes; return none at the end. Raises `ConnectionResetError`."""
        while not self.is_ready("read"):
            await self._wait("read")
        if self.is_closed and not self.inbox:
            return b""
        return self.receive_now(most)

    async def send(self, data: bytes) -> None:
        """Send all of it. Raises `BrokenPipeError`."""
        while data:
            try:
                data = data[self.send_now(data) :]
            except BlockingIOError:
                await self._wait("write")

    async def _wait(self, what: str) -> None:
        try:
            await self.wait(what)
        except trio.ClosedResourceError:
            raise os_error(errno.ECONNRESET) from None

    # What arrives ------------------------------------------------------------------------------------

    def _free(self) -> int:
        return self.buffer_bytes - self._on_way - len(self.peer.inbox)

    def _later(self, action: Callable[[], None]) -> None:
        if not self.latency_s:
            action()
            return
        self._arrives_s = max(self._arrives_s, trio.current_time() + self.latency_s)
        self.machine.at(self._arrives_s, action)

    def _arrive(self, data: bytes) -> None:
        self.peer._on_way -= len(data)
        if self.is_closed:
            self.peer._was_reset()
        else:
            self.inbox += data
            self.wake("read")

    def _end(self) -> None:
        self.has_ended = True
        self.wake("read")
        self.on_hangup()

    def _was_reset(self) -> None:
        self.is_reset = True
        self.wake("read")
        self.wake("write")
        self.on_hangup()


def connected(
    machine: Machine,
    near: Address,
    far: Address,
    *,
    latency_s: float = 0.0,
    buffer_bytes: int = DEFAULT_BUFFER_BYTES,
) -> tuple[End, End]:
    """Return the two ends of a new connection."""
    ends = End(machine, near, far), End(machine, far, near)
    for end, peer in (ends, ends[::-1]):
        end.peer, end.latency_s, end.buffer_bytes = peer, latency_s, buffer_bytes
    return ends
