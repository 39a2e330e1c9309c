"""How transformers renders a conversation, and why ours may differ.

A template cannot take every conversation that a client may send. Ours is then what transformers renders of
another form of the conversation, one of `REWRITES`. `EXPECTED` lists the forms that each template needs, and
the conversations that it refuses, with the reason.

    python tests/language/text/transformers_rendering.py

writes the lists anew, and names what has no reason yet.
"""

import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, reduce
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from transformers.utils import chat_template_utils

sys.path.append(str(Path(__file__).parents[2]))

from fairlead.base.errors import InvalidRequest
from fairlead.dialects.openai import messages as openai_messages
from fairlead.dialects.openai.messages import template_messages, template_tools
from fairlead.language.text.chat_template import ChatTemplate
from language.text.conversations import CONVERSATIONS, Conversation, Message
from language.text.published_templates import FOLDER

SPECIAL = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>", "unk_token": "<|unk|>"}
EXPECTED = Path(__file__).with_name("transformers_differences.json")
NULL = "\0null"
"""Stands for null, which transformers would drop."""
_MARK = "id0000000"
"""Nine letters in place of an id, of which a test cannot know the digest; see `_matches`."""


class Rewrite(NamedTuple):
    """Another form of a conversation. `reason`: why it is better than what transformers does."""

    apply: Callable[[Conversation], Conversation]
    reason: str


# The forms ----------------------------------------------------------------------------------------------


def each(change: Callable[[Message], Message]) -> Callable[[Conversation], Conversation]:
    """Return the rewriting that changes each message alone."""
    return lambda chat: chat._replace(messages=[change(message) for message in chat.messages])


def with_role(old: str, new: str) -> Callable[[Conversation], Conversation]:
    return each(lambda message: {**message, "role": new} if message["role"] == old else message)


def text_of(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    return "\n".join(part["text"] for part in content)


def parts_as_text(message: Message) -> Message:
    return {**message, "content": text_of(message.get("content"))}


def text_as_parts(message: Message) -> Message:
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": [{"type": "text", "text": content}]}
    return message


def null_as_empty(message: Message) -> Message:
    return message if message.get("content") is not None else {**message, "content": ""}


def null_beside_calls(message: Message) -> Message:
    return (
        {**message, "content": NULL} if message.get("tool_calls") and not message.get("content") else message
    )


def reasoning_by_all_names(message: Message) -> Message:
    names = ("reasoning_content", "reasoning", "thinking")
    found = next((message[name] for name in names if message.get(name)), None)
    return message if found is None else message | dict.fromkeys(names, found)


def refusal_as_text(message: Message) -> Message:
    if (refusal := message.get("refusal")) is None:
        return message
    kept = {name: value for name, value in message.items() if name != "refusal"}
    return {**kept, "content": message["content"] or refusal}


def without_empty_calls(message: Message) -> Message:
    return {name: value for name, value in message.items() if name != "tool_calls" or value}


def function_call_as_tool_call(message: Message) -> Message:
    kept = {name: value for name, value in message.items() if name != "function_call"}
    if "function_call" in message:
        return {
            **kept,
            "tool_calls": [{"id": _MARK, "type": "function", "function": message["function_call"]}],
        }
    return kept if message["role"] != "function" else {**kept, "role": "tool", "tool_call_id": _MARK}


def joined(messages: Sequence[Message]) -> Message:
    """Return one message with the texts, or the parts, and the calls of all."""
    given = [content for one in messages if (content := one.get("content")) not in (None, "", NULL)]
    if any(isinstance(content, list) for content in given):
        content: Any = [part for one in given for part in text_as_parts({"content": one})["content"]]
    else:
        content = "\n\n".join(given)
    made = reduce(lambda one, other: {**other, **one}, messages) | {"content": content}
    found = [call for message in messages for call in message.get("tool_calls") or ()]
    return made | ({"tool_calls": found} if found else {})


def one_system_message(chat: Conversation) -> Conversation:
    systems = [message for message in chat.messages if message["role"] == "system"]
    others = [message for message in chat.messages if message["role"] != "system"]
    return chat._replace(messages=[*([joined(systems)] if systems else ()), *others])


def system_in_the_question(chat: Conversation) -> Conversation:
    if chat.messages[0]["role"] != "system":
        return chat
    first, *others = chat.messages
    first = {**first, "role": "user"}
    if others and others[0]["role"] == "user":
        first, *others = [joined([first, others[0]]), *others[1:]]
    return chat._replace(messages=[first, *others])


def question_added(chat: Conversation) -> Conversation:
    """Add an empty question after the system messages, unless the next message is one."""
    at = next((at for at, one in enumerate(chat.messages) if one["role"] != "system"), len(chat.messages))
    if at < len(chat.messages) and chat.messages[at]["role"] == "user":
        return chat
    return chat._replace(messages=[*chat.messages[:at], {"role": "user", "content": ""}, *chat.messages[at:]])


def merged_neighbours(chat: Conversation) -> Conversation:
    runs: list[list[Message]] = []
    for message in chat.messages:
        if runs and message["role"] in ("user", "assistant") and runs[-1][-1]["role"] == message["role"]:
            runs[-1].append(message)
        else:
            runs.append([message])
    return chat._replace(messages=[joined(run) if len(run) > 1 else run[0] for run in runs])


def turns_closed(chat: Conversation) -> Conversation:
    """Add an empty answer to each turn that ends with a call or its result."""
    made: list[Message] = []
    for message in chat.messages:
        if made and message["role"] == "user" and (made[-1]["role"] == "tool" or "tool_calls" in made[-1]):
            made.append({"role": "assistant", "content": ""})
        made.append(message)
    return chat._replace(messages=made)


def blank(text: str) -> Callable[[Conversation], Conversation]:
    """Return the rewriting that gives an answer without text and calls this text."""
    return each(
        lambda one: (
            one
            if one["role"] != "assistant"
            or one.get("tool_calls")
            or one.get("content") not in (None, "", NULL)
            else {**one, "content": text}
        )
    )


def result_as_question(message: Message) -> Message:
    return message if message["role"] != "tool" else {"role": "user", "content": message["content"]}


def loose_results_as_questions(chat: Conversation) -> Conversation:
    """Write results without a call before them as questions."""
    made: list[Message] = []
    known: set[Any] = set()
    for message in chat.messages:
        if message["role"] == "tool":
            made.append(message if message["tool_call_id"] in known else result_as_question(message))
            continue
        known = {call["id"] for call in message.get("tool_calls") or ()}
        made.append(message)
    return chat._replace(messages=made)


def text_before_calls(chat: Conversation) -> Conversation:
    made: list[Message] = []
    for message in chat.messages:
        has_both = bool(message.get("tool_calls")) and message.get("content") not in (None, "", NULL)
        if has_both:
            made.append({"role": "assistant", "content": message["content"]})
        made.append({**message, "content": ""} if has_both else message)
    return chat._replace(messages=made)


def text_after_reasoning(message: Message) -> Message:
    reasoning, content = message.get("reasoning_content"), text_of(message.get("content"))
    if not message.get("tool_calls") or not reasoning or content in (None, "", NULL):
        return message
    return {**message, "reasoning_content": f"{reasoning}\n\n{content}", "content": ""}


def one_call_a_message(chat: Conversation) -> Conversation:
    """Split messages with several calls, each followed by its result."""
    made: list[Message] = []
    results = {message.get("tool_call_id"): message for message in chat.messages if message["role"] == "tool"}
    for message in chat.messages:
        if message["role"] == "tool":
            continue
        calls = message.get("tool_calls") or ()
        if not calls:
            made.append(message)
        for at, call in enumerate(calls):
            # The text and the reasoning come before the first call.
            head = message if not at else {"role": "assistant", "content": message.get("content") and ""}
            made.append({**head, "tool_calls": [call]})
            if call["id"] in results:
                made.append(results[call["id"]])
    return chat._replace(messages=made)


def changed_calls(change: Callable[[Message], Message]) -> Callable[[Conversation], Conversation]:
    def change_calls(message: Message) -> Message:
        calls = message.get("tool_calls")
        return {**message, "tool_calls": [change(call) for call in calls]} if calls else message

    return each(change_calls)


def argument_object(call: Message) -> Message:
    """Return the call with an object of arguments: empty for none; what is no object is its only member."""
    arguments = parsed(call["function"]["arguments"])
    if not isinstance(arguments, dict):
        arguments = {"arguments": arguments} if arguments else {}
    return {**call, "function": {**call["function"], "arguments": arguments}}


def argument_text(call: Message) -> Message:
    arguments = argument_object(call)["function"]["arguments"]
    return {**call, "function": {**call["function"], "arguments": json.dumps(arguments, ensure_ascii=False)}}


def parsed(arguments: Any) -> Any:
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments


def named_results(chat: Conversation) -> Conversation:
    names: dict[Any, str] = {}
    for message in chat.messages:
        names |= {call.get("id"): call["function"]["name"] for call in message.get("tool_calls") or ()}
    return each(
        lambda one: (
            {"name": names[one["tool_call_id"]], **one}
            if one["role"] == "tool" and one["tool_call_id"] in names
            else one
        )
    )(chat)


def short_ids(chat: Conversation) -> Conversation:
    marks: dict[Any, str] = {}

    def short(id_: Any) -> str:
        return marks.setdefault(id_, f"id{len(marks) + 1:07}")

    made = changed_calls(lambda call: {**call, "id": short(call.get("id"))})(chat)
    return each(
        lambda message: (
            message | {"tool_call_id": short(message.get("tool_call_id"))}
            if message["role"] == "tool"
            else message
        )
    )(made)


def with_member(name: str, default: Any) -> Callable[[Conversation], Conversation]:
    """Return the rewriting that gives a member to each tool that lacks it."""

    def add(chat: Conversation) -> Conversation:
        tools = [
            {**tool, "function": tool["function"] | {name: tool["function"].get(name, default)}}
            for tool in chat.tools or ()
        ]
        return chat._replace(tools=tools or None)

    return add


def described_parameters(chat: Conversation) -> Conversation:
    def described(tool: Message) -> Message:
        schema = tool["function"].get("parameters") or {}
        members = {name: {"description": "", **one} for name, one in schema.get("properties", {}).items()}
        return {**tool, "function": {**tool["function"], "parameters": {**schema, "properties": members}}}

    return chat._replace(tools=[described(tool) for tool in chat.tools or ()] or None)


REWRITES: Mapping[str, Rewrite] = {
    "developer": Rewrite(
        with_role("developer", "system"),
        "The role developer is the system message of OpenAI's newer models; the template does not know it.",
    ),
    "function": Rewrite(
        each(function_call_as_tool_call),
        "function_call and the role function are the earlier form of tool_calls and the role tool.",
    ),
    "refusal": Rewrite(each(refusal_as_text), "A refusal is the text of the answer; the template drops it."),
    "calls": Rewrite(
        each(without_empty_calls), "An empty list of calls is no call; the template fails, or writes one."
    ),
    "results": Rewrite(each(result_as_question), "The template drops results; here they are questions."),
    "loose results": Rewrite(
        loose_results_as_questions, "The template refuses or drops results without a call before them."
    ),
    "system": Rewrite(
        one_system_message,
        "The template drops or refuses a system message that is not the first; here all are one.",
    ),
    "no system": Rewrite(
        system_in_the_question, "The template has no system role; the text begins the first question."
    ),
    "question": Rewrite(question_added, "The template fails without a question at the beginning."),
    "neighbours": Rewrite(
        merged_neighbours, "The template refuses two messages of a role in a row; here they are one."
    ),
    "closed": Rewrite(
        turns_closed, "The template refuses a question after a call or a result; an empty answer is between."
    ),
    "text apart": Rewrite(text_before_calls, "The template drops the text beside a call, or the call."),
    "one call": Rewrite(one_call_a_message, "The template refuses a message with several calls."),
    "joined": Rewrite(
        each(text_after_reasoning), "The template refuses a call with both a text and reasoning."
    ),
    "parts": Rewrite(
        each(parts_as_text),
        "The template drops parts, fails for them, or writes Python's notation of the list.",
    ),
    "lists": Rewrite(each(text_as_parts), "The template reads lists of parts only."),
    "null": Rewrite(
        each(null_beside_calls),
        "The template shows a call after null only, and not after an empty text; transformers drops null.",
    ),
    "empty": Rewrite(
        each(null_as_empty), "The template fails for a message without content, or writes None."
    ),
    "space": Rewrite(blank(" "), "The template refuses an empty answer; here it is a space."),
    "ellipsis": Rewrite(blank("…"), "The template refuses an empty answer, and one of white space."),
    "reasoning": Rewrite(
        each(reasoning_by_all_names), "The template reads a name of reasoning that transformers does not set."
    ),
    "arguments": Rewrite(
        changed_calls(argument_object), "The template fails for arguments that are no object."
    ),
    "argument text": Rewrite(
        changed_calls(argument_text), "The template writes the JSON text of arguments as it is."
    ),
    "names": Rewrite(
        named_results, "Clients leave out the name of a result; the template writes it, or an empty one."
    ),
    "ids": Rewrite(short_ids, "The template takes ids of nine letters only, or fails without an id."),
    "description": Rewrite(
        with_member("description", ""), "The description of a tool is optional; the template fails without."
    ),
    "schema": Rewrite(
        with_member("parameters", {"type": "object", "properties": {}}),
        "The parameters of a tool are optional; the template fails without.",
    ),
    "parameters": Rewrite(
        described_parameters, "The description of a parameter is optional; the template fails without."
    ),
}


# Rendering ----------------------------------------------------------------------------------------------

# A template that wants variables of its own, as its makers pass them.
VARIABLES = {
    "fireworks-ai-llama-3-firefunction-v2": {"functions": "[]", "datetime": "2026-11-28"},
}


def chats_for(template: str, chats: Mapping[str, Conversation] = CONVERSATIONS) -> dict[str, Conversation]:
    """Return the conversations that a template may get: one called tool_use is used with tools only."""
    more = VARIABLES.get(template, {})
    return {
        name: chat._replace(variables={**more, **chat.variables})
        for name, chat in chats.items()
        if chat.tools or not template.endswith("tool_use")
    }


def rendered_by_transformers(source: str, chat: Conversation) -> str:
    """Return the text. Raises any error for what the template does not take.

    Arguments of calls are objects, as transformers demands, unless the template takes their JSON only.
    """
    try:
        return _rendered(source, changed_calls(_with_object)(chat))
    except Exception:  # noqa: BLE001  an expression in a template can raise anything
        return _rendered(source, chat)


def _with_object(call: Message) -> Message:
    return {**call, "function": {**call["function"], "arguments": parsed(call["function"]["arguments"])}}


def _rendered(source: str, chat: Conversation) -> str:
    messages = [
        {**message, "content": None} if message.get("content") == NULL else message
        for message in chat_template_utils._normalize_chat_messages(chat.messages)
    ]
    (text,), _ = chat_template_utils.render_jinja_template(
        conversations=[messages],
        tools=chat.tools,
        chat_template=source,
        add_generation_prompt=True,
        **SPECIAL,
        **chat.variables,
    )
    return text


@lru_cache(1)
def template_of(source: str) -> ChatTemplate:
    return ChatTemplate(source, special_tokens=SPECIAL)


def rendered_by_us(source: str, chat: Conversation) -> str:
    """Return the text of a request to /v1/chat/completions. Raises `InvalidRequest` if it is refused."""
    messages, tools = decoded(chat)
    return str(template_of(source).render(messages, tools=tools, **chat.variables))


def decoded(chat: Conversation) -> tuple[list[Message], list[Message]]:
    """Return the messages and the tools of a request. Raises `InvalidRequest` if it is refused."""
    try:
        messages = msgspec.convert(chat.messages, list[openai_messages.Message])
        tools = msgspec.convert(chat.tools, list[openai_messages.Tool] | None)
    except msgspec.ValidationError as error:
        raise InvalidRequest(str(error)) from error
    return template_messages(messages), template_tools(tools) or []


def rewritten(chat: Conversation, names: Sequence[str]) -> Conversation:
    return reduce(lambda made, name: REWRITES[name].apply(made), names, chat)


_MOST_FORMS = 5  # of one conversation
_AFTER_OTHERS = (
    "results",
    "loose results",
    "names",
    "no system",
    "neighbours",
    "closed",
    "null",
    "empty",
    "space",
    "ellipsis",
)


def explanation(source: str, chat: Conversation, ours: str, names: Sequence[str]) -> tuple[str, ...] | None:
    """Return the fewest of the forms `names` with which transformers renders our text; None if none do."""
    effective = [name for name in names if rewritten(chat, [name]) != chat]
    # A form may have an effect only after another: two questions that a late system message separated.
    effective += [name for name in _AFTER_OTHERS if name in names and name not in effective]
    effective.sort(key=list(REWRITES).index)
    for count in range(min(len(effective), _MOST_FORMS) + 1):
        for chosen in combinations(effective, count):
            try:
                expected = rendered_by_transformers(source, rewritten(chat, chosen))
            except Exception:  # noqa: BLE001  the template does not take this form
                continue
            if _matches(expected, ours):
                return chosen
    return None


def _matches(expected: str, text: str) -> bool:
    """Return whether two texts are equal, where each id that a test has marked stands for nine letters."""
    if expected == text:
        return True
    marks: dict[str, str] = {}

    def group(match: re.Match[str]) -> str:
        if match[0] in marks:
            return f"(?P={marks[match[0]]})"
        marks[match[0]] = f"g{len(marks)}"
        return f"(?P<{marks[match[0]]}>[a-zA-Z0-9]{{9}})"

    if not re.search(r"id\d{7}", expected):
        return False
    return re.fullmatch(re.sub(r"id\d{7}", group, re.escape(expected)), text) is not None


# What is expected ---------------------------------------------------------------------------------------


class Listed(msgspec.Struct):
    """One reason, and the conversations by template for which it holds."""

    reason: str
    templates: dict[str, list[str]]


class Differences(msgspec.Struct):
    """The file `EXPECTED`.

    `forms`: the forms that each template needs.
    `refused`: what is refused, and why it cannot be written in any form.
    `faults`: what is refused or written otherwise, and should not be.
    """

    forms: dict[str, list[str]] = {}
    refused: list[Listed] = []
    faults: list[Listed] = []

    @classmethod
    def read(cls) -> "Differences":
        return msgspec.json.decode(EXPECTED.read_bytes(), type=cls)

    def listed(self, template: str) -> dict[str, str]:
        """Return the conversations that are refused or at fault, with the reason."""
        return {
            name: one.reason
            for one in (*self.refused, *self.faults)
            for name in one.templates.get(template, ())
        }


class Comparison(msgspec.Struct):
    """What came of one template: forms that were needed, and conversations refused or unexplained."""

    needed: set[str]
    refused: dict[str, str]
    unexplained: list[str]


def compare(source: str, names: Sequence[str], chats: Mapping[str, Conversation]) -> Comparison:
    """Render the conversations by ours and by transformers; `names`: the forms that may be needed."""
    found = Comparison(set(), {}, [])
    for name, chat in chats.items():
        try:
            ours = rendered_by_us(source, chat)
        except InvalidRequest as error:
            found.refused[name] = error.message
            continue
        if (forms := explanation(source, chat, ours, names)) is None:
            found.unexplained.append(name)
        else:
            found.needed.update(forms)
    return found


def write() -> int:
    """Write the lists anew; return the number of conversations that have no reason."""
    old = Differences.read() if EXPECTED.exists() else Differences()
    forms: dict[str, list[str]] = {}
    seen: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    missing = 0
    for path in sorted(FOLDER.glob("*.jinja")):
        found = compare(path.read_text(encoding="utf-8"), list(REWRITES), chats_for(path.stem))
        if found.needed:
            forms[path.stem] = sorted(found.needed, key=list(REWRITES).index)
        listed = old.listed(path.stem)
        for name in [*found.refused, *found.unexplained]:
            if name in listed:
                seen[listed[name]][path.stem].append(name)
                continue
            missing += 1
            sys.stderr.write(f"{path.stem}: {name}: {found.refused.get(name, 'differs')}\n")
    kept = [
        [Listed(one.reason, seen[one.reason]) for one in part if one.reason in seen]
        for part in (old.refused, old.faults)
    ]
    text = msgspec.json.encode(Differences(forms, *kept))
    EXPECTED.write_bytes(_folded(msgspec.json.format(text, indent=1).decode()).encode())
    return missing


def _folded(text: str) -> str:
    """Return JSON with each list of strings on one line."""
    return re.sub(r'\[\s*((?:"[^"]*",?\s*)+)\]', lambda match: f"[{' '.join(match[1].split())}]", text) + "\n"


if __name__ == "__main__":
    sys.exit(write() > 0)
