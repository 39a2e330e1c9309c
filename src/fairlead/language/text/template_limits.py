"""What a chat template cannot take, and how a conversation is written so that it can.

Templates refuse or drop what their authors did not think of: a system message, two calls in one message, a
call's id of another length, two messages of a role in a row, a tool without a description. `template_probes`
finds that when a template is loaded. `TemplateLimits.rewrite` then writes each conversation in the form that
the template takes, and leaves the rest as the client has sent it.

    one_call           assistant calls a, b · result a · result b
                     → assistant calls a · result a · assistant calls b · result b
    system "never"     system "be brief" · user "hello"
                     → user "be brief", an empty line, "hello"
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal

from fairlead._cext.jsoncount import count
from fairlead.base.errors import InvalidRequest
from fairlead.language.structured.instructions import argument_object, json_or_text

Message = dict[str, Any]
Tools = Sequence[Message]

MAX_ARGUMENT_VALUES = 128 * 1024
"""Maximum number of JSON values in the arguments of all tool calls of a chat."""

_SEPARATOR = "\n\n"
_REASONING = ("reasoning_content", "reasoning", "thinking")
_SHORT_ID = re.compile("[A-Za-z0-9]{9}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateLimits:
    """What a template cannot take. The defaults are those of a template that takes everything.

    Attributes:
        parts_as_text: Roles whose content must be a text. Parts of it are joined by line breaks.
        text_as_parts: Roles whose content must be a list of parts.
        system: Where system messages may be. `first`: they become one at the beginning. `never`: the
            beginning of the first user message.
        user: Whether a user message is needed: `always`, `with_tools`, or as the `first` one after system
            messages. If there is none, an empty one is added.
        merges_neighbours: Two messages of a role in a row become one.
        closes_turns: An empty answer is added to a turn that ends with a call or a result.
        blank_answer: The content of an answer that has none, and no calls.
        null_content: The content of a message with calls only is null. Otherwise it is an empty text.
        encodes_arguments: Arguments are JSON text, not objects.
        one_call: A message has one call, and the call's result follows.
        short_ids: Ids of calls have nine letters and digits. Others are replaced by their hash.
        results: Where results may be. `after_calls`: those without a call before them become user messages.
            `never`: all do.
        text_apart: The text of a message with calls is a message of its own, before it.
        joins_reasoning: A message with calls has a text or reasoning. If it has both, the text follows the
            reasoning.
        tool_members: What each tool needs: `description`, `parameters`, `properties` (a description of each
            parameter), `types` (one type of each parameter), `objects` (`additionalProperties` of parameters
            that are objects). Absent ones are empty.
        tool_list: Tools are a list even if there are none.
    """

    parts_as_text: frozenset[str] = frozenset()
    text_as_parts: frozenset[str] = frozenset()
    system: Literal["anywhere", "first", "never"] = "anywhere"
    user: Literal["optional", "with_tools", "always", "first"] = "optional"
    merges_neighbours: bool = False
    closes_turns: bool = False
    blank_answer: str = ""
    null_content: bool = False
    encodes_arguments: bool = False
    one_call: bool = False
    short_ids: bool = False
    results: Literal["anywhere", "after_calls", "never"] = "anywhere"
    text_apart: bool = False
    joins_reasoning: bool = False
    tool_members: frozenset[str] = frozenset()
    tool_list: bool = False

    def rewrite(self, messages: Sequence[Message], tools: Tools | None) -> tuple[list[Message], Tools | None]:
        """Return the conversation as the template takes it. Changes none of the given objects.

        Raises `InvalidRequest` for content that is neither text nor parts of text, and for too many
        arguments.
        """
        written = normalized(messages, encoded=self.encodes_arguments)
        if self.results != "anywhere":
            written = list(_with_results_as_text(written, after_calls=self.results == "after_calls"))
        if self.system != "anywhere":
            written = _with_one_system(written, has_system=self.system == "first")
        if self._needs_user(written, has_tools=bool(tools)):
            at = next((at for at, one in enumerate(written) if one.get("role") != "system"), len(written))
            written.insert(at, {"role": "user", "content": ""})
        if self.merges_neighbours:
            written = _without_neighbours(written)
        if self.closes_turns:
            written = list(_with_closed_turns(written))
        if self.text_apart:
            written = list(_with_text_apart(written))
        if self.one_call:
            written = list(_with_one_call(written))
        for message in written:
            self._fit(message)
        return written, self._fitted_tools(tools)

    def described(self) -> list[str]:
        """Return what is rewritten, a phrase each."""
        phrases = {
            "system messages are moved to the beginning": self.system == "first",
            "system messages become the beginning of the first user message": self.system == "never",
            "an empty user message is added where there is none": self.user != "optional",
            "messages of a role in a row are merged": self.merges_neighbours,
            "unfinished turns are closed": self.closes_turns,
            "calls are written one a message": self.one_call,
            "ids of calls are shortened to nine letters": self.short_ids,
            "results without a call become user messages": self.results == "after_calls",
            "results become user messages": self.results == "never",
            "text beside calls is a message of its own": self.text_apart,
            "text beside calls follows the reasoning": self.joins_reasoning,
            "tools get an empty description": "description" in self.tool_members,
            "tools get empty parameters": "parameters" in self.tool_members,
            "parameters of tools get an empty description": "properties" in self.tool_members,
            "parameters that are objects get empty additionalProperties": "objects" in self.tool_members,
            "parameters of tools keep the first of several types": "types" in self.tool_members,
        }
        return [phrase for phrase, is_rewritten in phrases.items() if is_rewritten]

    def _needs_user(self, messages: list[Message], *, has_tools: bool) -> bool:
        if self.user == "optional" or (self.user == "with_tools" and not has_tools):
            return False
        roles = [message.get("role") for message in messages]
        if self.user == "first":
            return next((role for role in roles if role != "system"), None) != "user"
        return "user" not in roles

    def _fit(self, message: Message) -> None:
        """Give a message, which is changed, the content and the ids that the template takes."""
        role, content, calls = message.get("role"), message.get("content"), message.get("tool_calls")
        if self.joins_reasoning and calls and content and _REASONING[0] in message:
            joined = _SEPARATOR.join([message[_REASONING[0]], *_texts(content)])
            message.update(dict.fromkeys(_REASONING, joined))
            content = None
        if not content:
            if role == "assistant":
                content = (None if self.null_content else "") if calls else self.blank_answer
            else:
                content = ""
        if isinstance(content, str):
            if role in self.text_as_parts:
                content = [{"type": "text", "text": content}]
        elif content is not None:
            texts = _texts(content)
            as_text = role in self.parts_as_text
            content = "\n".join(texts) if as_text else [{"type": "text", "text": text} for text in texts]
        message["content"] = content
        if self.short_ids:
            for call in calls or ():
                call["id"] = _short_id(call["id"])
            if "tool_call_id" in message:
                message["tool_call_id"] = _short_id(message["tool_call_id"])

    def _fitted_tools(self, tools: Tools | None) -> Tools | None:
        if not tools:
            return [] if self.tool_list else None
        if not self.tool_members:
            return tools
        return [_with_members(tool, self.tool_members) for tool in tools]


# Normal form -----------------------------------------------------------------------------------------


def normalized(messages: Sequence[Message], *, encoded: bool = False) -> list[Message]:
    """Return copies of the messages in the one form that templates are given.

    Members that are null and empty lists of calls are left out; content that is null is an empty text. Calls
    have an id, and arguments that are an object, or its JSON text if `encoded`. Results have the id and the
    name of their call. Reasoning has each of the names that templates read. Raises `InvalidRequest` if the
    arguments are too many.
    """
    _check_arguments(messages)
    written: list[Message] = []
    waiting: list[Message] = []  # calls of the last answer that have no result yet
    number = 0
    for message in messages:
        fields = {"content": "", **{name: value for name, value in message.items() if value is not None}}
        written.append(fields)
        if fields.get("role") == "tool":
            _name_result(fields, waiting)
            fields.setdefault("tool_call_id", _new_id(number))  # templates read it without asking
            continue
        if calls := fields.pop("tool_calls", None):
            calls = [_call(call, number + at, encoded) for at, call in enumerate(calls)]
            fields["tool_calls"] = calls
            number += len(calls)
            waiting = list(calls)
        reasoning = next((fields[name] for name in _REASONING if fields.get(name)), None)
        if reasoning is not None:
            fields.update(dict.fromkeys(_REASONING, reasoning))
    return written


def _call(call: Message, number: int, encoded: bool) -> Message:
    function = call["function"]
    arguments: Any = function.get("arguments")
    if not encoded:
        arguments = argument_object(arguments)
    elif not (
        isinstance(arguments, str) and isinstance(json_or_text(arguments), dict)
    ):  # keep the model's blanks
        arguments = json.dumps(argument_object(arguments), ensure_ascii=False)
    return {
        **call,
        "id": call.get("id") or _new_id(number),
        "type": call.get("type") or "function",
        "function": {**function, "arguments": arguments},
    }


def _new_id(number: int) -> str:
    return f"call{number:05d}"


def _name_result(result: Message, waiting: list[Message]) -> None:
    """Give a result, which is changed, the id and name of its call, which no longer waits."""
    call_id, name = result.get("tool_call_id"), result.get("name")
    for at, call in enumerate(waiting):
        if call["id"] == call_id or (call_id is None and name in (None, call["function"]["name"])):
            result["tool_call_id"] = call["id"]
            result.setdefault("name", call["function"]["name"])
            del waiting[at]
            return


def _check_arguments(messages: Sequence[Message]) -> None:
    """Raise `InvalidRequest` if parsing the arguments of all tool calls would make too many objects."""
    texts = [
        text
        for message in messages
        for call in message.get("tool_calls") or ()
        if isinstance(text := (call.get("function") or {}).get("arguments"), str)
    ]
    if 2 * sum(map(len, texts)) <= MAX_ARGUMENT_VALUES:  # a text has at most two values per character
        return
    values = sum(count(text.encode(errors="surrogatepass")).values for text in texts)
    if values > MAX_ARGUMENT_VALUES:
        raise InvalidRequest(
            f"the arguments of tool calls have {values} JSON values; they may have {MAX_ARGUMENT_VALUES}",
            param="messages",
        )


# Rewriting -------------------------------------------------------------------------------------------


def _with_results_as_text(messages: list[Message], *, after_calls: bool) -> Iterator[Message]:
    """Yield the messages, with results as user messages; if `after_calls`, only those without a call."""
    ids: set[str] = set()
    loose: list[Message] = []
    for message in messages:
        if message.get("role") != "tool":
            yield from loose
            loose = []
            ids = {call["id"] for call in message.get("tool_calls") or ()} if after_calls else ids
            yield message
        elif message["tool_call_id"] in ids:
            yield message
        else:
            loose.append({"role": "user", "content": message["content"]})  # after the results of calls
    yield from loose


def _with_one_system(messages: list[Message], *, has_system: bool) -> list[Message]:
    """Return the messages with all system messages as one, or as the beginning of the first user message."""
    systems = [message for message in messages if message.get("role") == "system"]
    if not systems or (has_system and len(systems) == 1 and systems[0] is messages[0]):
        return messages
    others = [message for message in messages if message.get("role") != "system"]
    if has_system:
        return [_joined(systems), *others]
    first: Message = {"role": "user", "content": _joined(systems).get("content")}
    if others and others[0].get("role") == "user":
        return [_joined([first, others[0]]), *others[1:]]
    return [first, *others]


def _without_neighbours(messages: list[Message]) -> list[Message]:
    runs: list[list[Message]] = []
    for message in messages:
        role = message.get("role")
        if runs and role in ("user", "assistant") and runs[-1][-1].get("role") == role:
            runs[-1].append(message)
        else:
            runs.append([message])
    return [_joined(run) for run in runs]


def _with_closed_turns(messages: list[Message]) -> Iterator[Message]:
    """Yield the messages, with an empty answer before a user message that follows a call or a result."""
    before: Message = {}
    for message in messages:
        if message.get("role") == "user" and (before.get("role") == "tool" or "tool_calls" in before):
            yield {"role": "assistant"}
        yield message
        before = message


def _with_text_apart(messages: list[Message]) -> Iterator[Message]:
    for message in messages:
        if message.get("content") and "tool_calls" in message:
            yield {"role": "assistant", "content": message["content"]}
            yield {**message, "content": None}
        else:
            yield message


def _with_one_call(messages: list[Message]) -> Iterator[Message]:
    """Yield the messages with each call in a message of its own, which its result follows."""
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            yield message
            continue
        results: list[Message] = []
        while at < len(messages) and messages[at].get("role") == "tool":
            results.append(messages[at])
            at += 1
        for number, call in enumerate(calls):
            yield (
                {**message, "tool_calls": [call]}
                if number == 0
                else {"role": "assistant", "tool_calls": [call]}
            )
            found = next((one for one in results if one.get("tool_call_id") == call["id"]), None)
            if found is not None:
                results.remove(found)
                yield found
        yield from results


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


def _texts(parts: Any) -> list[str]:
    """Return the texts of a message's content. Raises `InvalidRequest` for a part of another type."""
    if isinstance(parts, str):
        return [parts]
    if not isinstance(parts, list):
        raise InvalidRequest("a message's content must be a string or a list of parts", param="messages")
    texts = []
    for part in parts:
        match part:
            case str(text) | {"type": "text", "text": str(text)}:
                texts.append(text)
            case _:
                raise InvalidRequest("this model accepts text only, in parts of type text", param="messages")
    return texts


def _short_id(call_id: str) -> str:
    """Return an id of nine letters and digits: always the same one for an id, so that cached prefixes fit."""
    if _SHORT_ID.fullmatch(call_id):
        return call_id
    return blake2b(call_id.encode(errors="surrogatepass"), digest_size=5).hexdigest()[:9]


def _with_members(tool: Message, members: frozenset[str]) -> Message:
    function = dict(tool.get("function") or {})
    if "description" in members and function.get("description") is None:
        function["description"] = ""
    if "parameters" in members:
        function["parameters"] = {"type": "object", "properties": {}} | (function.get("parameters") or {})
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    if isinstance(properties, dict) and members & {"properties", "types", "objects"}:
        fitted = {name: _fitted_property(value, members) for name, value in properties.items()}
        function["parameters"] = {**function["parameters"], "properties": fitted}
    return {**tool, "function": function}


def _fitted_property(schema: Any, members: frozenset[str]) -> Any:
    if not isinstance(schema, dict):
        return schema
    written = {"description": "", **schema} if "properties" in members else dict(schema)
    types = schema.get("type")
    if "objects" in members and types == "object":
        written.setdefault("additionalProperties", {})
    if "types" in members and (types == "null" or isinstance(types, list)):
        first = next((name for name in types if name != "null"), None) if types != "null" else None
        written = {name: value for name, value in written.items() if name != "type"}
        written |= {} if first is None else {"type": first}
    return written
