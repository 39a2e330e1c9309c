"""The Jinja sandbox in which chat templates are rendered, with the names that transformers defines.

Neither the template, which is part of the model, nor a client's messages are trusted.

Renders the same characters as Jinja, and traces which of them are the template's: its strings are compiled to
`TemplateText`, and wherever compiled code joins strings, it calls `concat`.
"""

import json
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.filters import do_join
from jinja2.nodes import Node, Scope
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Namespace, pass_eval_context

from fairlead.language.text.template_text import TemplateMarkup, TemplateText, concat, formatted, literal


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
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@pass_eval_context
def _join(
    context: nodes.EvalContext, value: Iterable[Any], d: str = literal(""), attribute: str | int | None = None
) -> str:
    """Join as Jinja's own filter does. Its default separator is no client's text."""
    joined: str = do_join(context, value, d, attribute)
    return joined


class _Compiler(CodeGenerator):
    """Compiles the strings of a template to constants of type `TemplateText`.

    All constants of a template pass through two methods: those in expressions through `visit_Const`, and
    text that is written as it is through `_output_const_repr`.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._names: dict[str, str] = {}

    def visit_Template(self, node: nodes.Template, frame: Frame | None = None) -> None:  # noqa: N802
        super().visit_Template(node, frame)
        for (
            text,
            name,
        ) in self._names.items():  # globals of the module, which its functions read when they run
            self.writeline(f"{name} = environment.literal({text!r})")

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:  # noqa: N802
        value = node.as_const(frame.eval_ctx)
        if _has_strings(value):
            self.write(self._constant(value))
        else:
            super().visit_Const(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        if frame.eval_ctx.volatile or frame.eval_ctx.autoescape:
            super().visit_Concat(node, frame)  # gives Markup, in which nothing is traced
            return
        self.write("concat(map(str, (")
        for child in node.nodes:
            self.visit(child, frame)
            self.write(", ")
        self.write(")))")

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return self._constant("".join(group))

    def _constant(self, value: Any) -> str:
        """Return the source of a constant, which may be a container that the compiler has made."""
        match value:
            case str() if type(value) is str:
                return self._names.setdefault(value, f"text_{len(self._names)}")
            case list():
                return f"[{', '.join(map(self._constant, value))}]"
            case tuple():
                return f"({''.join(self._constant(item) + ', ' for item in value)})"
            case dict():
                items = (f"{self._constant(key)}: {self._constant(item)}" for key, item in value.items())
                return f"{{{', '.join(items)}}}"
            case _:
                return repr(value)


def _has_strings(value: Any) -> bool:
    return type(value) is str or isinstance(value, list | tuple | dict)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, in which texts are traced."""

    code_generator_class = _Compiler
    concat = staticmethod(concat)
    literal = staticmethod(literal)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return the method `format` of a string for use in templates, None for another value."""
        wrapped: Callable[..., str] | None = super().wrap_str_format(value)
        if wrapped is None or type(value.__self__) is not TemplateText or value.__name__ != "format":
            return wrapped
        values = SandboxedFormatter(self)

        def wrapper(*args: Any, **kwargs: Any) -> str:
            return formatted(wrapped(*args, **kwargs), value.__self__, values, args, kwargs)

        return wrapper


environment = _Environment(
    trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
)
environment.filters["tojson"] = _to_json
environment.filters["join"] = _join
environment.filters["safe"] = TemplateMarkup
environment.globals |= {
    "dict": _new_dict,
    "namespace": _Namespace,
    "raise_exception": _raise_exception,
    "strftime_now": _strftime_now,
}
