"""Anthropic's messages and their blocks in request bodies, and the same as chat templates read them."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from fairlead.dialects.body import invalid_field

# Claude Code begins its system prompt with this line, in which a hash changes from request to request. It is
# no instruction, and no cached prefix would fit the prompt with it.
BILLING_HEADER = "x-anthropic-billing-header:"


class TextBlock(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    """Text."""

    text: str


class SearchResultBlock(msgspec.Struct, frozen=True, tag_field="type", tag="search_result"):
    """A passage that the client has found. The model reads it as text; answers have no citations."""

    source: str
    title: str
    content: Annotated[list[TextBlock], Meta(max_length=4096)]

    @property
    def text(self) -> str:
        """The passage, behind its title and source."""
        return "\n".join([f"{self.title} ({self.source})", *(part.text for part in self.content)])


class ThinkingBlock(msgspec.Struct, frozen=True, tag_field="type", tag="thinking"):
    """The reasoning of an earlier answer. Any `signature` is accepted."""

    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(msgspec.Struct, frozen=True, tag_field="type", tag="redacted_thinking"):
    """Encrypted reasoning of another model, which is dropped."""

    data: str | None = None


class ToolUseBlock(msgspec.Struct, frozen=True, tag_field="type", tag="tool_use"):
    """A call in an earlier answer."""

    id: str
    name: str
    input: dict[str, Any]


class ToolReferenceBlock(msgspec.Struct, frozen=True, tag_field="type", tag="tool_reference"):
    """The name of a tool with `defer_loading`, which is given to the model from here on."""

    tool_name: str


ResultBlocks = Annotated[list[TextBlock | SearchResultBlock | ToolReferenceBlock], Meta(max_length=4096)]


class ToolResultBlock(msgspec.Struct, frozen=True, tag_field="type", tag="tool_result"):
    """The result of a call. That of a call with `is_error` begins with `Error: ` in the prompt."""

    tool_use_id: str
    content: str | ResultBlocks | None = None
    is_error: bool | None = None


class ChangedTool(msgspec.Struct, frozen=True, tag_field="type", tag="tool_reference"):
    """The name of one of the request's tools."""

    name: str


class ToolAdditionBlock(msgspec.Struct, frozen=True, tag_field="type", tag="tool_addition"):
    """Gives the model a tool, although that has `defer_loading`."""

    tool: ChangedTool


class ToolRemovalBlock(msgspec.Struct, frozen=True, tag_field="type", tag="tool_removal"):
    """Takes a tool from the model."""

    tool: ChangedTool


TextBlocks = Annotated[list[TextBlock], Meta(max_length=4096)]
SystemBlock = TextBlock | ToolAdditionBlock | ToolRemovalBlock
UserBlock = TextBlock | SearchResultBlock | ToolResultBlock
AssistantBlock = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock


class UserTurn(msgspec.Struct, frozen=True, tag_field="role", tag="user"):
    """A message of the user: text, and results of the calls before it."""

    content: str | Annotated[list[UserBlock], Meta(max_length=4096)]


class AssistantTurn(msgspec.Struct, frozen=True, tag_field="role", tag="assistant"):
    """An earlier answer. As the last message, it is the beginning of the answer, and may have only text."""

    content: str | Annotated[list[AssistantBlock], Meta(max_length=4096)]


class SystemTurn(msgspec.Struct, frozen=True, tag_field="role", tag="system"):
    """Instructions for the model; with `next_user_message`, they are left out after that message."""

    content: str | Annotated[list[SystemBlock], Meta(max_length=4096)] = ""
    clear_at: Literal["next_user_message", "never"] | None = None


Turn = UserTurn | AssistantTurn | SystemTurn
Turns = Annotated[list[Turn], Meta(min_length=1, max_length=16_384)]


class Conversation(NamedTuple):
    """`messages` as chat templates read them. `continuation`: the text with which the answer begins."""

    messages: list[dict[str, Any]]
    continuation: str


def conversation(system: str | list[TextBlock] | None, turns: list[Turn]) -> Conversation:
    """Return the conversation that a request has. Raises `InvalidRequest`."""
    answered = len(turns)
    while answered and isinstance(turns[answered - 1], AssistantTurn):
        answered -= 1
    messages = list(_of_system(system or ""))
    last_user = max((at for at, turn in enumerate(turns) if isinstance(turn, UserTurn)), default=-1)
    for at, turn in enumerate(turns[:answered]):
        is_cleared = isinstance(turn, SystemTurn) and turn.clear_at == "next_user_message" and at < last_user
        if not is_cleared:
            messages += _of_turn(turn)
    begun = (_continued(turn, answered + index) for index, turn in enumerate(turns[answered:]))
    return Conversation(messages, "".join(begun))


def tool_changes(turns: Iterable[Turn]) -> dict[str, bool]:
    """Return whether the model has a tool, by the names of those that the messages give or take."""
    changes: dict[str, bool] = {}
    for block in (block for turn in turns if isinstance(turn.content, list) for block in turn.content):
        match block:
            case ToolResultBlock(content=list(parts)):
                names = (part.tool_name for part in parts if isinstance(part, ToolReferenceBlock))
                changes.update(dict.fromkeys(names, True))
            case ToolAdditionBlock(tool) | ToolRemovalBlock(tool):
                changes[tool.name] = isinstance(block, ToolAdditionBlock)
    return changes


def _of_turn(turn: Turn) -> Iterator[dict[str, Any]]:
    """Yield the messages of a turn: one, but for results, which are a message each."""
    match turn:
        case SystemTurn(content):
            yield from _of_system(content)
        case AssistantTurn(str(text)) | UserTurn(str(text)):
            yield {"role": str(turn.__struct_config__.tag), "content": text}
        case AssistantTurn(list(blocks)):
            yield _answer(blocks)
        case UserTurn(list(blocks)):
            yield from _of_user(blocks)


def _of_system(content: str | Sequence[SystemBlock]) -> Iterator[dict[str, Any]]:
    texts = (
        [content]
        if isinstance(content, str)
        else [block.text for block in content if isinstance(block, TextBlock)]
    )
    if texts and texts[0].startswith(BILLING_HEADER):
        rest = texts[0].partition("\n")[2].lstrip("\n")
        texts = [rest, *texts[1:]] if rest else texts[1:]
    if any(texts):
        yield {"role": "system", "content": _content(texts)}


def _of_user(blocks: list[UserBlock]) -> Iterator[dict[str, Any]]:
    texts: list[str] = []
    for block in blocks:
        if isinstance(block, TextBlock | SearchResultBlock):
            texts.append(block.text)
            continue
        if texts:
            yield {"role": "user", "content": _content(texts)}
            texts = []
        yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": _result(block)}
    if texts or not blocks:
        yield {"role": "user", "content": _content(texts)}


def _answer(blocks: list[AssistantBlock]) -> dict[str, Any]:
    texts = [block.text for block in blocks if isinstance(block, TextBlock)]
    message: dict[str, Any] = {"role": "assistant", "content": _content(texts)}
    thinking = "\n".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    if thinking:  # templates read one of the two
        message["reasoning_content"] = message["reasoning"] = thinking
    calls = [
        {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    return message | ({"tool_calls": calls} if calls else {})


def _result(block: ToolResultBlock) -> str | list[dict[str, str]]:
    content = block.content or ""
    texts = [content] if isinstance(content, str) else [_result_text(one) for one in content]
    if block.is_error:
        texts = [f"Error: {texts[0] if texts else ''}", *texts[1:]]
    return _content(texts)


def _result_text(block: TextBlock | SearchResultBlock | ToolReferenceBlock) -> str:
    if isinstance(block, ToolReferenceBlock):
        return f"The tool {block.tool_name} is available."
    return block.text


def _content(texts: list[str]) -> str | list[dict[str, str]]:
    """Return texts as the content of a message: several are parts, as in OpenAI's API."""
    if len(texts) <= 1:
        return "".join(texts)
    return [{"type": "text", "text": text} for text in texts]


def _continued(turn: Turn, index: int) -> str:
    """Return the text of the last answer, which the model continues."""
    if isinstance(turn.content, str):
        return turn.content
    for at, block in enumerate(turn.content):
        if not isinstance(block, TextBlock):
            reason = "the last message is the beginning of the answer, and may have only text"
            raise invalid_field(f"messages[{index}].content[{at}].type", reason)
    return "".join(block.text for block in turn.content if isinstance(block, TextBlock))
