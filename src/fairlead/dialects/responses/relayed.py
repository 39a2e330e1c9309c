"""What another server has written of a response, so that our engine can continue it with the same ids."""

from typing import Any

import msgspec

from fairlead.base.formats.server_sent_events import event_data, split_events
from fairlead.base.reported import decoded

Item = dict[str, Any]


class _Event(msgspec.Struct, gc=False):
    type: str = ""
    sequence_number: int | None = None
    delta: str | None = None
    item: Item | None = None
    response: Item | None = None


_decode = msgspec.json.Decoder(_Event).decode


class RelayedBeginning:
    """The state of a stream after events of another server, which may lack any member.

    `output` has the items that are complete. `message`: the one that is not, with its `text` so far; None if
    there is none, or it is of another kind, which our engine cannot continue.
    """

    def __init__(self) -> None:
        self.response_id: str | None = None
        self.events = 0
        self.output: list[Any] = []  # objects as the other server has sent them
        self.message: Item | None = None
        self.texts: list[str] = []

    def read(self, events: bytes) -> None:
        """Read events that were sent to the client."""
        for raw in split_events(events):
            data = event_data(raw)
            event = decoded(_decode, data) if data is not None else None
            if event is not None:
                self._read(event)

    def _read(self, event: _Event) -> None:
        self.events = self.events + 1 if event.sequence_number is None else event.sequence_number + 1
        if event.response is not None and isinstance(event.response.get("id"), str):
            self.response_id = event.response["id"]
        match event.type:
            case "response.output_item.added":
                is_message = event.item is not None and event.item.get("type") == "message"
                self.message, self.texts = event.item if is_message else None, []
            case "response.output_text.delta":
                self.texts.append(event.delta or "")
            case "response.output_item.done":
                self.message = None
                if event.item is not None:
                    self.output.append(event.item)
