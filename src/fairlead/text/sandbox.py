"""The Jinja sandbox in which chat templates are rendered, with the names that transformers defines.

Neither the template, which is part of the model, nor a client's messages are trusted.
"""

import json
from datetime import datetime
from typing import Any

import jinja2
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.nodes import Node, Scope
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from fairlead.text.control_tokens import BREAK

_ESCAPED_BREAK = json.dumps(BREAK)[1:-1]


class Refusal(jinja2.TemplateError):
    """A template has called `raise_exception`."""


class _Generation(Extension):
    """The tag `{% generation %}`, which marks an assistant's text for training. Here it renders its body."""

    tags = {"generation"}  # noqa: RUF012 — Jinja's own declaration

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return Scope(body, lineno=line)


class _Namespace(Namespace):
    """Jinja's `namespace`, in which a template cannot set `__class__` to disguise it as another type."""

    # No parameter is named self, so that an attribute can be.
    def __init__(*arguments: Any, **attributes: Any) -> None:
        namespace, *rest = arguments
        Namespace.__init__(namespace)
        for name, value in dict(*rest, **attributes).items():
            namespace[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a namespace may not have an attribute {name}")
        super().__setitem__(name, value)


def _raise_exception(message: str) -> None:
    raise Refusal(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _new_dict(*arguments: Any, **items: Any) -> dict[Any, Any]:
    """Return a `dict`. Templates cannot use the class: its methods would change any given dictionary."""
    return dict(*arguments, **items)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON. Jinja's own `tojson` escapes for HTML, unlike the texts that models are trained on."""
    written = json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    return written.replace(_ESCAPED_BREAK, BREAK) if ensure_ascii else written


environment = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
)
environment.filters["tojson"] = _to_json
environment.globals |= {
    "dict": _new_dict,
    "namespace": _Namespace,
    "raise_exception": _raise_exception,
    "strftime_now": _strftime_now,
}
