"""Renders a chat to text with the model's Jinja template.

Renders the same text as transformers' `apply_chat_template`. Every failure in rendering is an
`InvalidRequest`. Handles tokens only by their spelling: see `control_tokens`.

`template_probes` finds what a template cannot take when it is loaded, and `template_limits` writes each
conversation so that it can.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError

from fairlead.base.errors import InvalidRequest, LoadFailed
from fairlead.language.checkpoint.checkpoint import TEMPLATE, Checkpoint, open_checkpoint
from fairlead.language.checkpoint.config import CheckpointDocument
from fairlead.language.text.control_tokens import ControlTokens
from fairlead.language.text.files import Templates, TokenizerConfig, read_json, read_special_tokens, read_text
from fairlead.language.text.sandbox import Refusal, environment
from fairlead.language.text.template_limits import Message, Tools
from fairlead.language.text.template_probes import probe
from fairlead.language.text.template_text import concat, literal

MAX_RENDERED_CHARS = 64 * 1024 * 1024
_MAX_REASON_CHARS = 500
# Some templates make a control token of the role: '<|' + message.role + '|>'. A client can only choose one of
# these, so they count as the template's.
_ROLES = {role: literal(role) for role in ("system", "developer", "user", "assistant", "tool")}


class ChatTemplate:
    """Renders messages. `tool_source` is used instead of `source` when there are tools.

    `source` is kept to be shown. `literals` are the template's own text and the strings in its expressions.
    `limits`: what it cannot take.

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
        self.limits = probe(self._probed)

    @classmethod
    def load(cls, model: Path) -> "ChatTemplate | None":
        """Return a checkpoint's template, None if it has none. Raises `LoadFailed`, which names the file.

        As in transformers, chat_template.jinja has precedence over tokenizer_config.json, and that over
        chat_template.json.
        """
        checkpoint = open_checkpoint(model)
        for path, templates in _candidates(checkpoint):
            named = _by_name(templates)
            source = named.get("default") or next(iter(named.values()), None)
            if source is None:
                continue
            try:
                return cls(
                    source,
                    special_tokens=read_special_tokens(checkpoint),
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

        What the template cannot take is rewritten (`limits`).

        `variables` are further template variables ("enable_thinking"), which cannot replace the other
        arguments. With `control`, the text has breaks in control tokens that are not the template's. Without,
        it is a `TemplateText`, or a `str` if the template wrote none of it. Raises `InvalidRequest` if the
        template refuses the messages, fails, or never ends.
        """
        template = self._tool_template if tools else self._template
        try:
            written, written_tools = self._written(messages, tools)
            names = {
                **self._special_tokens,
                "documents": None,
                **variables,
                "messages": written,
                "tools": written_tools,
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

    def _written(
        self, messages: Sequence[Message], tools: Tools | None = None
    ) -> tuple[list[Message], Tools | None]:
        """Return messages and tools as the template takes them, with roles that are the template's text."""
        written, written_tools = self.limits.rewrite(messages, tools)
        for message in written:
            if isinstance(role := message.get("role"), str):
                message["role"] = _ROLES.get(role, role)
        return written, written_tools

    def _probed(self, messages: Sequence[Message], tools: Tools | None) -> str:
        """Return the rendered messages; empty if the template does not accept them."""
        template = self._tool_template if tools else self._template
        names = {**self._special_tokens, "add_generation_prompt": True, "documents": None}
        try:
            return _bounded_text(template.generate(names, messages=messages, tools=tools))
        except Exception:  # noqa: BLE001 — any error means that it does not accept this form
            return ""


def _candidates(checkpoint: Checkpoint) -> Iterator[tuple[CheckpointDocument, Templates | None]]:
    """Yield the files that may contain a template, in order of precedence, with their templates."""
    if (path := checkpoint.document(TEMPLATE)).is_file():
        more = checkpoint.documents("additional_chat_templates/*.jinja")
        yield path, {"default": read_text(path)} | {file.stem: read_text(file) for file in more}
    for name in ("tokenizer_config.json", "chat_template.json"):
        if (path := checkpoint.document(name)).is_file():
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
