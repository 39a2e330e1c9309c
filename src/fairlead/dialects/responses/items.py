"""The input of OpenAI's Responses API: its items, and the same as chat templates read messages.

A turn of the model is several items, but one message of a template: reasoning, text and calls, in this order.
"""

import base64
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from fairlead.base.errors import quoted
from fairlead.dialects.body import invalid_field
from fairlead.dialects.responses.tools import qualify

MAX_ITEMS = 16_384

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_TEXTS = frozenset({"input_text", "output_text", "text", "refusal"})
_COMPACTION = "fairlead1."
_SUMMARY = "A summary of the conversation so far:"
_REASONING_TEXTS = frozenset({"reasoning_text", "summary_text", "text"})


class InputPart(msgspec.Struct, frozen=True):
    """A piece of an item: text, a `refusal`, or an image. The error for other types names them.

    image_url: The address of an image, or `data:` with its content.
    detail: How closely other servers look at it.
    """

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    detail: str | None = None


InputParts = Annotated[list[InputPart], Meta(max_length=4096)]


class InputItem(msgspec.Struct, frozen=True):
    """An item of the input. Items of answers may be sent back as they are.

    type: `message`, `function_call`, `function_call_output`, `reasoning` or `compaction`; None: a message.
    role: Whose message it is.
    content: The text of a message or of reasoning.
    summary: A summary of reasoning, which stands for it if it has no text.
    call_id: The id of a call, or of the call that an output belongs to.
    name: The function of a call.
    namespace: The namespace of that function.
    arguments: The arguments of a call, as JSON in a string.
    output: The result of a call.
    encrypted_content: The content of a compaction; that of reasoning is ignored.
    """

    type: str | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | InputParts | None = None
    summary: InputParts | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    output: str | InputParts | None = None
    encrypted_content: str | None = None


Input = str | Annotated[list[InputItem], Meta(max_length=MAX_ITEMS)]


class InputMessages(NamedTuple):
    """Messages as chat templates read them, and the field of their first image; "": they have none."""

    messages: list[dict[str, Any]]
    image_field: str


def input_messages(
    instructions: str | None, history: Sequence[dict[str, Any]], given: Input | None
) -> InputMessages:
    """Return the messages of a request: `history` precedes the input.

    Raises `InvalidRequest`, which names the field.
    """
    conversation = _Conversation()
    if instructions is not None:
        conversation.messages.append({"role": "system", "content": instructions})
    for index, item in enumerate(_earlier(history)):
        conversation.add(item, f"previous_response_id.output[{index}]")
    if isinstance(given, str):
        conversation.messages.append({"role": "user", "content": given})
    for index, item in enumerate(given if isinstance(given, list) else ()):
        if history and item.type == "function_call_output" and item.call_id not in conversation.calls:
            raise invalid_field(f"input[{index}].call_id", f"there was no call {quoted(item.call_id or '')}")
        conversation.add(item, f"input[{index}]")
    if not given and not isinstance(given, str) and not history:
        raise invalid_field("input", "is missing" if given is None else "is empty")
    return InputMessages(conversation.messages, conversation.image_field)


def check_items(items: Sequence[InputItem], field: str) -> None:
    """Raise `InvalidRequest` for items that no input may have; `field` is where they are."""
    conversation = _Conversation()
    for index, item in enumerate(items):
        conversation.add(item, f"{field}[{index}]")


class _Conversation:
    """Converts items to messages.

    `image_field` is the field of the first image. `_turn` is the model's last turn, while it may continue.
    """

    def __init__(self) -> None:
        self.image_field = ""
        self.messages: list[dict[str, Any]] = []
        self.calls: set[str | None] = set()
        self._turn: dict[str, Any] | None = None

    def add(self, item: InputItem, at: str) -> None:
        """Add an item; `at` is its path."""
        match item.type:
            case None | "message":
                self._add_message(item, at)
            case "reasoning":
                self._add_reasoning(item, at)
            case "function_call":
                self._add_call(item, at)
            case "function_call_output":
                self._add_output(item, at)
            case "compaction":
                self._add_compaction(item, at)
            case "item_reference":
                raise invalid_field(f"{at}.type", "references are not served; send the item itself")
            case other:
                raise invalid_field(f"{at}.type", f"items of type {quoted(other)} are not served")

    def _add_compaction(self, item: InputItem, at: str) -> None:
        path = f"{at}.encrypted_content"
        summary = _decode_summary(_required(item.encrypted_content, path), path)
        self._turn = None
        self.messages.append({"role": "assistant", "content": f"{_SUMMARY}\n{summary}"})

    def _add_message(self, item: InputItem, at: str) -> None:
        role = _ROLES[_required(item.role, f"{at}.role")]
        content = _required(item.content, f"{at}.content")
        images = () if role != "user" or isinstance(content, str) else _images(content, f"{at}.content")
        content = _content(content, f"{at}.content", dict(images))
        if images and not self.image_field:
            self.image_field = f"{at}.content[{images[0][0]}].type"
        if role != "assistant":
            self._turn = None
            self.messages.append({"role": role, "content": content})
        else:
            self._turn_before("content", "tool_calls")["content"] = content

    def _add_reasoning(self, item: InputItem, at: str) -> None:
        text = _reasoning(item.content, f"{at}.content") or _reasoning(item.summary, f"{at}.summary")
        if text:
            turn = self._turn_before("reasoning", "content", "tool_calls")
            turn["reasoning_content"] = turn["reasoning"] = text  # templates read one of the two

    def _add_call(self, item: InputItem, at: str) -> None:
        function = {
            "name": qualify(item.namespace, _required(item.name, f"{at}.name")),
            "arguments": _required(item.arguments, f"{at}.arguments"),
        }
        self.calls.add(item.call_id)
        call = {"id": _required(item.call_id, f"{at}.call_id"), "type": "function", "function": function}
        self._turn_before().setdefault("tool_calls", []).append(call)

    def _add_output(self, item: InputItem, at: str) -> None:
        self._turn = None
        content = _content(_required(item.output, f"{at}.output"), f"{at}.output")
        call_id = _required(item.call_id, f"{at}.call_id")
        self.messages.append({"role": "tool", "content": content, "tool_call_id": call_id})

    def _turn_before(self, *parts: str) -> dict[str, Any]:
        """Return the model's turn, which has none of these parts yet: a new one, if the last one has."""
        if self._turn is None or any(part in self._turn for part in parts):
            self._turn = {"role": "assistant"}
            self.messages.append(self._turn)
        return self._turn


def _earlier(history: Sequence[dict[str, Any]]) -> list[InputItem]:
    try:
        return msgspec.convert(list(history), list[InputItem])
    except msgspec.ValidationError as error:
        raise invalid_field("previous_response_id", f"its items cannot be continued: {error}") from error


def encode_summary(summary: str) -> str:
    """Return the content of a compaction with this summary."""
    return _COMPACTION + base64.urlsafe_b64encode(summary.encode()).decode()


def _decode_summary(content: str, field: str) -> str:
    try:
        if not content.startswith(_COMPACTION):
            raise ValueError(content[:1])
        return base64.b64decode(content.removeprefix(_COMPACTION), b"-_", validate=True).decode()
    except ValueError as error:
        raise invalid_field(field, "was not made by /v1/responses/compact of this server") from error


def _required(value: Any, field: str) -> Any:
    if value is None:
        raise invalid_field(field, "must be given for this type of item")
    return value


def _content(content: str | list[InputPart], field: str, images: Mapping[int, Any] | None = None) -> Any:
    """Return a message's content for templates; a single part is a text, as in most requests to chats.

    `images`: the parts that are images, by their places, as chats have them.
    """
    if isinstance(content, str):
        return content
    images = images or {}
    texts = _texts(content, field, _TEXTS, images)
    if len(texts) == 1 and not images:
        return texts[0]
    return [images.get(at) or {"type": "text", "text": text} for at, text in enumerate(texts)]


def _images(parts: list[InputPart], field: str) -> list[tuple[int, Any]]:
    """Return the images of a user's message as parts of a chat's message, each after its place."""
    found = []
    for index, part in enumerate(parts):
        if part.type == "input_image":
            if part.image_url is None:
                raise invalid_field(
                    f"{field}[{index}].image_url", "must be given: there are no files of images"
                )
            image = {"url": part.image_url} | ({} if part.detail is None else {"detail": part.detail})
            found.append((index, {"type": "image_url", "image_url": image}))
    return found


def _reasoning(content: str | list[InputPart] | None, field: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(_texts(content, field, _REASONING_TEXTS))


def _texts(
    parts: list[InputPart], field: str, types: frozenset[str], others: Collection[int] = ()
) -> list[str]:
    """Return the texts of parts; "" of those at `others`. Raises `InvalidRequest` for other types."""
    for index, part in enumerate(parts):
        if part.type not in types and index not in others:
            reason = f"parts of type {quoted(part.type)} are not served, only text"
            raise invalid_field(f"{field}[{index}].type", reason)
    written = [part.refusal if part.type == "refusal" else part.text for part in parts]
    for index, text in enumerate(written):
        if text is None and index not in others:
            member = "refusal" if parts[index].type == "refusal" else "text"
            raise invalid_field(f"{field}[{index}].{member}", "must be given")
    return [text or "" for text in written]
