"""Which orders of messages a chat template accepts, and how a chat is changed to have such an order.

Some templates refuse a system message that is not the first one, or drop it, and some refuse two messages
of a role in a row. Their chats get one system message, and one message for those in a row. Both are found by
rendering probes when a template is loaded.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]

_SEPARATOR = "\n\n"
_MERGED_ROLES = frozenset({"user", "assistant"})
_REASONING = ("reasoning_content", "reasoning")


@dataclass(frozen=True)
class MessageOrder:
    """What a template accepts: system messages anywhere, and messages of a role in a row."""

    has_late_system: bool
    has_repeated_roles: bool

    @classmethod
    def probe(cls, shows: Callable[[list[Message]], bool], text: str) -> "MessageOrder":
        """Return what a template accepts; `shows` is whether it renders `text` in these messages."""
        user, assistant = ({"role": role, "content": "a"} for role in ("user", "assistant"))
        system = {"role": "system", "content": "a"}
        return cls(
            shows([system, user, assistant, {**system, "content": text}, user]),
            shows([user, {**user, "content": text}])
            and shows([user, assistant, {**assistant, "content": text}]),
        )

    def fitted(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages in an order that the template accepts."""
        ordered = list(messages)
        if not self.has_late_system and any(_role(message) == "system" for message in ordered[1:]):
            systems = [message for message in ordered if _role(message) == "system"]
            others = [message for message in ordered if _role(message) != "system"]
            ordered = [_joined(systems), *others]
        return ordered if self.has_repeated_roles else _without_repeated_roles(ordered)


def _without_repeated_roles(messages: list[Message]) -> list[Message]:
    runs: list[list[Message]] = []
    for message in messages:
        role = _role(message)
        if runs and role in _MERGED_ROLES and _role(runs[-1][-1]) == role:
            runs[-1].append(message)
        else:
            runs.append([message])
    return [_joined(run) for run in runs]


def _joined(messages: list[Message]) -> Message:
    """Return one message with the contents, reasoning and calls of all."""
    if len(messages) == 1:
        return messages[0]
    merged: Message = {name: value for message in reversed(messages) for name, value in message.items()}
    merged["content"] = _content([message.get("content") for message in messages])
    for name in _REASONING:
        if texts := [message[name] for message in messages if message.get(name)]:
            merged[name] = _SEPARATOR.join(texts)
    if calls := [call for message in messages for call in message.get("tool_calls") or ()]:
        merged["tool_calls"] = calls
    return merged


def _content(contents: list[Any]) -> Any:
    """Return texts as one, with an empty line between two; lists of parts, and anything else, as a list."""
    given = [content for content in contents if content]
    if all(isinstance(content, str) for content in given):
        return _SEPARATOR.join(given)
    return [part for content in given for part in (content if isinstance(content, list) else [content])]


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, dict) else None
