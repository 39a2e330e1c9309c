"""An item of a response of OpenAI's Responses API, while it is written."""

from typing import Any

from msgspec.structs import replace

from fairlead.dialects.openai.common import encode
from fairlead.dialects.responses.shapes import (
    FunctionCallItem,
    ItemStatus,
    MessageItem,
    OutputItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
)

_DELTAS: dict[type[OutputItem], str] = {
    ReasoningItem: "reasoning_text",
    MessageItem: "output_text",
    FunctionCallItem: "function_call_arguments",
}


class OpenItem:
    """The item that is being written: its object as it was added, and its text so far."""

    def __init__(self, index: int, item: OutputItem) -> None:
        self.index = index
        self.item = item
        self.is_message = isinstance(item, MessageItem)
        self.pieces: list[str] = []
        self.logprobs: list[dict[str, Any]] = []
        self.place: dict[str, Any] = {"item_id": item.id, "output_index": index}
        if not isinstance(item, FunctionCallItem):
            self.place["content_index"] = 0
        # The events about its text begin with these words.
        self.kind = f"response.{_DELTAS[type(item)]}"
        # Only the text and the number differ from event to event, and there is one for every token.
        members = encode({"type": f"{self.kind}.delta", **self.place})[:-1]
        self.head = f"event: {self.kind}.delta\ndata: ".encode() + members + b',"delta":'

    def part(self, text: str) -> ReasoningText | OutputText:
        """Return the content part with this text. A call has none."""
        assert not isinstance(self.item, FunctionCallItem)
        return OutputText(text, [], self.logprobs) if self.is_message else ReasoningText(text)

    def end(self, status: ItemStatus) -> OutputItem:
        """Return the item as it is now, with this status."""
        text = "".join(self.pieces)
        if isinstance(self.item, FunctionCallItem):
            return replace(self.item, arguments=text, status=status)
        return replace(self.item, content=[self.part(text)], status=status)
