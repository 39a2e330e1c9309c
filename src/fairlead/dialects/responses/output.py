"""An item of a response of OpenAI's Responses API, while it is written."""

from typing import Any

from fairlead.dialects.openai.common import encode

Item = dict[str, Any]


class OpenItem:
    """The item that is being written: its object as it was added, and its text so far."""

    def __init__(self, index: int, item: Item, content: Item | None, delta: str) -> None:
        self.index = index
        self.item = item
        self.content = content
        self.is_message = item["type"] == "message"
        self.pieces: list[str] = []
        self.logprobs: list[dict[str, Any]] = []
        place = {"item_id": item["id"], "output_index": index}
        self.place = place if content is None else {**place, "content_index": 0}
        # Only the text and the number differ from event to event, and there is one for every token.
        kind = f"response.{delta}.delta"
        members = encode({"type": kind, **self.place})[:-1]
        self.head = f"event: {kind}\ndata: ".encode() + members + b',"delta":'

    def part(self, text: str) -> Item | None:
        """Return the content part with this text; None for a call, which has none."""
        if self.content is None:
            return None
        return {**self.content, "text": text} | ({"logprobs": self.logprobs} if self.is_message else {})

    def ended(self, status: str) -> Item:
        """Return the item as it is now."""
        text = "".join(self.pieces)
        filled = {"arguments": text} if self.content is None else {"content": [self.part(text)]}
        return {**self.item, **filled, "status": status}
