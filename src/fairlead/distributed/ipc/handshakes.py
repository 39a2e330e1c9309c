"""The handshakes of a listening process: peers that are not authenticated yet share a small limit."""

import trio

from fairlead.distributed.ipc.handshake import HandshakeFailed, shake_hands

MAX_PENDING = 64


class PendingHandshakes:
    """The unfinished handshakes, at most `MAX_PENDING`: a new one ends the oldest.

    A peer that has the key is ready within milliseconds. So peers without it, however many connect and
    however slowly they send, neither keep others out nor use up the file descriptors.
    """

    def __init__(self, *, name: str, key: bytes | None) -> None:
        self._name = name
        self._key = key
        self._pending: dict[trio.CancelScope, None] = {}  # the oldest first

    def __len__(self) -> int:
        """Return the number of unfinished handshakes."""
        return len(self._pending)

    async def authenticate(self, stream: trio.abc.Stream) -> str:
        """Shake hands with a peer; return its name. Raises `HandshakeFailed`."""
        if len(self._pending) >= MAX_PENDING:
            oldest = next(iter(self._pending))
            del self._pending[oldest]
            oldest.cancel()
        with trio.CancelScope() as scope:
            self._pending[scope] = None
            try:
                return await shake_hands(stream, name=self._name, key=self._key, is_client=False)
            finally:
                self._pending.pop(scope, None)
        raise HandshakeFailed("too many connections have not finished their handshakes")
