"""Renders a chat to text with the model's Jinja template.

Renders the same text as transformers' `apply_chat_template`. Every failure in rendering is an
`InvalidRequest`. Handles tokens only by their spelling: see `control_tokens`.

The form of message content that a template accepts is detected when it is loaded, by rendering a probe. If it
renders the text of `[{"type": "text", "text": ...}]`, and not the list's notation, it gets lists. Any other
template gets the texts joined by line breaks. A template that accepts only lists gets strings as lists.
`message_order` probes what orders of messages it accepts.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError

from fairlead._cext.jsoncount import count
from fairlead.errors import InvalidRequest, LoadFailed
from fairlead.text.control_tokens import ControlTokens
from fairlead.text.files import Templates, TokenizerConfig, read_json, read_special_tokens, read_text
from fairlead.text.message_order import MessageOrder
from fairlead.text.sandbox import Refusal, environment
from fairlead.text.template_text import concat, literal

MAX_RENDERED_CHARS = 64 * 1024 * 1024
MAX_ARGUMENT_VALUES = 128 * 1024
"""Maximum number of JSON values in the arguments of all tool calls of a chat."""
_MAX_REASON_CHARS = 500
_PROBE = "fairlead probe"
# Some templates make a control token of the role: '<|' + message.role + '|>'. A client can only choose one of
# these, so they count as the template's.
_ROLES = {role: literal(role) for role in ("system", "developer", "user", "assistant", "tool")}

Message = dict[str, Any]


class ChatTemplate:
    """Renders messages. `tool_source` is used instead of `source` when there are tools.

    `source` is kept to be shown. `literals` are the template's own text and the strings in its expressions.

    Raises `jinja2.TemplateError` for a template that is not Jinja; `load` names the file.
    """

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str] | None = None,
        tool_source: str | None = None,
    ) -> None:
        self.source = source
        self._template = environment.from_string(source)
        self._tool_template = environment.from_string(tool_source) if tool_source else self._template
        self._special_tokens = {name: literal(token) for name, token in (special_tokens or {}).items()}
        self.literals = frozenset(_literals(source)) | frozenset(_literals(tool_source or ""))
        self._accepts_parts = self._shows([{"type": "text", "text": _PROBE}])
        self._accepts_strings = self._shows(_PROBE) or not self._accepts_parts
        self._order = MessageOrder.probe(self._shows_messages, _PROBE)
        # Some templates concatenate the arguments of calls, and fail for objects.
        self._needs_encoded_arguments = not self._shows_call({"a": _PROBE}) and self._shows_call(_PROBE)

    @classmethod
    def load(cls, directory: Path) -> "ChatTemplate | None":
        """Return the directory's template, None if it has none. Raises `LoadFailed`, which names the file.

        As in transformers, chat_template.jinja has precedence over tokenizer_config.json, and that over
        chat_template.json.
        """
        for path, templates in _candidates(directory):
            named = _by_name(templates)
            source = named.get("default") or next(iter(named.values()), None)
            if source is None:
                continue
            try:
                return cls(
                    source,
                    special_tokens=read_special_tokens(directory),
                    tool_source=named.get("tool_use"),
                )
            except jinja2.TemplateSyntaxError as error:
                raise LoadFailed(f"{path}: chat template, line {error.lineno}: {error.message}") from error
            except (jinja2.TemplateError, RecursionError) as error:
                raise LoadFailed(f"{path}: chat template: {error}") from error
        return None

    def render(
        self,
        messages: Sequence[Message],
        control: ControlTokens | None = None,
        /,
        *,
        tools: Sequence[Message] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Return the chat as text; with `add_generation_prompt` it ends where the model's answer begins.

        `variables` are further template variables ("enable_thinking"), which cannot replace the other
        arguments. With `control`, the text has breaks in control tokens that are not the template's. Without,
        it is a `TemplateText`, or a `str` if the template wrote none of it. Raises `InvalidRequest` if the
        template refuses the messages, fails, or never ends.
        """
        template = self._tool_template if tools else self._template
        try:
            _check_arguments(messages)
            names = {
                **self._special_tokens,
                "documents": None,
                **variables,
                "messages": [self._prepared(message) for message in self._order.fitted(messages)],
                "tools": tools or None,
                "add_generation_prompt": add_generation_prompt,
            }
            text = _bounded_text(template.generate(names))
            return text if control is None else control.broken(text)
        except InvalidRequest:
            raise
        except Refusal as error:
            reason = f"the model's chat template refuses these messages: {error}"
        except SecurityError as error:
            reason = f"the model's chat template uses something that is not allowed: {error}"
        except RecursionError:
            reason = "the messages are nested too deeply for the model's chat template"
        except Exception as error:  # noqa: BLE001 — an expression in a template can raise anything
            reason = f"the model's chat template fails for these messages: {type(error).__name__}: {error}"
        # A reason may quote the client's text with half of a surrogate pair, which no response can contain.
        printable = reason[:_MAX_REASON_CHARS].encode(errors="replace").decode()
        raise InvalidRequest(printable, param="messages")

    def _prepared(self, message: Message) -> Message:
        """Return the message as the template expects it: content in its form, arguments as objects."""
        prepared = {**message, "content": self._content(message.get("content"))}
        if isinstance(role := message.get("role"), str):
            prepared["role"] = _ROLES.get(role, role)
        if calls := message.get("tool_calls"):
            prepare = _with_encoded_arguments if self._needs_encoded_arguments else _with_parsed_arguments
            prepared["tool_calls"] = [prepare(call) for call in calls]
        return prepared

    def _content(self, content: Any) -> Any:
        if content is None:
            content = ""  # an assistant's message with tool calls only
        if isinstance(content, str):
            return content if self._accepts_strings else [{"type": "text", "text": content}]
        texts = _texts(content)
        return [{"type": "text", "text": text} for text in texts] if self._accepts_parts else "\n".join(texts)

    def _shows(self, content: Any) -> bool:
        """Return whether the template renders the probe's text without the notation around it."""
        text = self._probed([{"role": "user", "content": content}])
        return _PROBE in text and f"'{_PROBE}'" not in text and f'"{_PROBE}"' not in text

    def _shows_messages(self, messages: list[Message]) -> bool:
        """Return whether the template renders the probe's text in these messages."""
        return _PROBE in self._probed(list(map(self._prepared, messages)))

    def _shows_call(self, arguments: Any) -> bool:
        """Return whether the template renders a call with these arguments."""
        # Mistral's templates accept ids of nine letters only.
        call = {"id": "probecall", "type": "function", "function": {"name": "f", "arguments": arguments}}
        return _PROBE in self._probed(
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        )

    def _probed(self, messages: list[Message]) -> str:
        """Return the rendered messages; empty if the template does not accept them."""
        names = {**self._special_tokens, "add_generation_prompt": True, "tools": None, "documents": None}
        try:
            return _bounded_text(self._template.generate(names, messages=messages))
        except Exception:  # noqa: BLE001 — any error means that it does not accept this form
            return ""


def _candidates(directory: Path) -> Iterator[tuple[Path, Templates | None]]:
    """Yield the files that may contain a template, in order of precedence, with their templates."""
    if (path := directory / "chat_template.jinja").exists():
        more = sorted((directory / "additional_chat_templates").glob("*.jinja"))
        yield path, {"default": read_text(path)} | {file.stem: read_text(file) for file in more}
    for name in ("tokenizer_config.json", "chat_template.json"):
        if (path := directory / name).exists():
            yield path, read_json(path, TokenizerConfig).chat_template


def _by_name(templates: Templates | None) -> dict[str, str]:
    match templates:
        case None:
            return {}
        case str():
            return {"default": templates}
        case dict():
            return templates
        case _:
            return {entry.name: entry.template for entry in templates}


def _literals(source: str) -> Iterator[str]:
    """Yield the strings in a template: its own text, and those in its expressions."""
    for node in environment.parse(source).find_all((nodes.TemplateData, nodes.Const)):
        match node:
            case nodes.TemplateData(data=text) | nodes.Const(value=str(text)):
                yield text


def _texts(parts: Any) -> list[str]:
    """Return the texts of a message's content parts. Raises `InvalidRequest` for a part of another type."""
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


def _with_parsed_arguments(call: Any) -> Any:
    """Return the tool call with its arguments, JSON text in OpenAI's API, as the object templates expect."""
    match call:
        case {"function": {"arguments": str(text)} as function}:
            try:
                arguments = json.loads(text)
            except (ValueError, RecursionError):
                return call  # invalid JSON that the model has generated: the template gets it as text
            return {**call, "function": {**function, "arguments": arguments}}
        case _:
            return call


def _with_encoded_arguments(call: Any) -> Any:
    """Return the tool call with its arguments as JSON text."""
    match call:
        case {"function": {"arguments": dict(arguments)} as function}:
            return {**call, "function": {**function, "arguments": json.dumps(arguments, ensure_ascii=False)}}
        case _:
            return call


def _bounded_text(pieces: Iterator[str]) -> str:
    text: list[str] = []
    length = 0
    for piece in pieces:
        length += len(piece)
        if length > MAX_RENDERED_CHARS:
            raise InvalidRequest(
                "the model's chat template renders too long a text for these messages", param="messages"
            )
        text.append(piece)
    return concat(text)
