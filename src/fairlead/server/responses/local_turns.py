"""The latest response of one WebSocket, which its next message may continue although it is not kept."""

import msgspec

from fairlead.server.responses.items import Turn

LOCAL_BYTES = 256 * 1024
"""The most bytes of a conversation that a connection remembers. A longer one is forgotten."""


class _Status(msgspec.Struct):
    status: str


_decode_status = msgspec.json.Decoder(_Status).decode


class LocalTurns:
    """The turns of one conversation, each its input and its response object; `response_id` is the last."""

    def __init__(self) -> None:
        self.response_id: str | None = None
        self.turns: list[Turn] = []

    def has(self, response_id: str | None) -> bool:
        """Return whether this response is the latest one of the connection."""
        return response_id is not None and response_id == self.response_id

    def clear(self) -> None:
        """Forget the conversation."""
        self.response_id, self.turns = None, []

    def keep(self, response_id: str, before: list[Turn], given: bytes, document: bytes) -> None:
        """Remember a response after those before it; forget all if it has failed."""
        turns = [*before, (given, document)]
        size = sum(len(part) for turn in turns for part in turn)
        if size > LOCAL_BYTES or _decode_status(document).status not in ("completed", "incomplete"):
            self.clear()
        else:
            self.response_id, self.turns = response_id, turns
