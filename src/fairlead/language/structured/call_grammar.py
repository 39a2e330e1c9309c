"""The part of a grammar for a model's tool calls."""

from collections.abc import Mapping
from typing import Any

from fairlead.base.wire_formats import pattern
from fairlead.base.wire_formats.wire_format import CallSyntax
from fairlead.language.structured.dialect_grammar import DialectGrammar
from fairlead.language.structured.json_grammar import add_json
from fairlead.language.structured.lark import BLANKS, JSON_BLANKS, TEXT, Rules
from fairlead.language.structured.tag_grammar import add_tags

_NO_OBJECT = "/\\s{0,4}([^{\\s](.|\\n)*)?/"
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


class CallGrammar:
    """Rules for the calls of some tools, written in one syntax."""

    def __init__(self, rules: Rules, syntax: CallSyntax) -> None:
        self._rules = rules
        self._syntax = syntax
        # The text that begins every call, with what may precede it and the rest of its mark.
        self._trigger = pattern.split_at_literal(syntax.marks.open)
        self._names: list[str] = []

    def add(
        self, tool: str, parameters: Mapping[str, Any] | bool | None, *, is_lenient: bool = False
    ) -> None:
        """Add a tool. Raises ValueError.

        `parameters`: the schema of its arguments; None: any object. `is_lenient`: keywords of it that are not
        supported are ignored.
        """
        syntax, number = self._syntax, len(self._names)
        others_are_lenient = self._rules.lenient
        self._rules.lenient = is_lenient or others_are_lenient
        try:
            arguments = self._add_arguments(f"arguments_{number}", _of_objects(parameters))
        finally:
            self._rules.lenient = others_are_lenient
        if syntax.name is None:
            mark = self._rules.of(self._mark, name=pattern.plain(tool))
            definition = f"{mark} {arguments}"
        else:
            definition = self._object(syntax.name[-1], tool, syntax.arguments[-1], arguments)
            if not syntax.in_list:
                definition = f"{self._rules.of(self._mark)} {definition}"
        self._names.append(self._rules.add(f"call_{number}", definition))

    def calls(self, *, parallel: bool) -> str:
        """Return what a rule needs to match one call, or several."""
        content = self._content(parallel=parallel)
        if self._trigger is not None:
            before, trigger, _ = self._trigger
            lead = self._rules.of(before) or BLANKS
            content = f"{lead} {pattern.quoted(trigger, self._rules.special)} {content}"
        one = self._rules.add("call", content)
        return f"{one}+" if parallel and self._syntax.repeats else one

    def calls_in_text(self, *, parallel: bool) -> str:
        """Return what a rule needs to match a text with calls."""
        if self._trigger is None:
            # A call has no mark before its content, so the first character decides between a call and a text.
            return f"({self.calls(parallel=parallel)} | {self._rules.add('text', _NO_OBJECT)})"
        text = self._rules.add("text", TEXT)
        call = self._rules.add("text_and_call", f"{self._head()} {self._content(parallel=parallel)}")
        if parallel and self._syntax.repeats:
            return f"{call}* {text}"
        return f"({call} {BLANKS} | {text})"

    def _head(self) -> str:
        """Return what matches any text up to and including the text that begins a call."""
        assert self._trigger is not None
        before, trigger, _ = self._trigger
        if pattern.quoted(trigger, self._rules.special).startswith("<["):
            # A text has no special tokens, so those that may precede the call are named.
            return f"{TEXT} {self._rules.of(before)} {pattern.quoted(trigger, self._rules.special)}"
        return self._rules.add_until("call_head", trigger)

    @property
    def _mark(self) -> pattern.Elements:
        """What is left of the opening mark after its trigger."""
        return self._syntax.marks.open if self._trigger is None else self._trigger[2]

    def _add_arguments(self, name: str, schema: Mapping[str, Any] | bool) -> str:
        syntax = self._syntax
        if syntax.content == "xml-inline":
            return add_tags(self._rules, name, syntax.tag, schema)
        if syntax.is_dialect:
            return DialectGrammar(self._rules, syntax.json, schema).add(name, schema)
        return add_json(self._rules, name, schema)

    def _object(self, name_key: str, name: str, arguments_key: str, arguments: str) -> str:
        """Return a call as a JSON object, its name first."""
        blank = self._rules.add("blank", f"/{JSON_BLANKS}/")
        texts = [pattern.plain(pattern.plain(text)) for text in (name_key, name, arguments_key)]
        parts = ['"{"', texts[0], '":"', texts[1], '","', texts[2], '":"', arguments, '"}"']
        return f" {blank} ".join(parts)

    def _content(self, *, parallel: bool) -> str:
        """Return what follows the trigger of a call: any of the tools, and the mark that closes it."""
        close = self._rules.of(self._syntax.marks.close)
        item = self._rules.add("any_call", " | ".join(self._names))
        if self._syntax.in_list:
            blank = self._rules.add("blank", f"/{JSON_BLANKS}/")
            more = f'({blank} "," {blank} {item})*' if parallel else ""
            mark = self._rules.of(self._mark)
            return f'{mark} "[" {blank} {item} {more} {blank} "]" {close}'
        return f"{item} {close}"


def _of_objects(parameters: Mapping[str, Any] | bool | None) -> Mapping[str, Any] | bool:
    """Return the schema of the objects that are valid for `parameters`. Raises ValueError if none can be."""
    if parameters is None or parameters is True:
        return ANY_OBJECT
    if parameters is False:
        return False
    types = parameters.get("type", "object")
    if "object" not in ([types] if isinstance(types, str) else types):
        raise ValueError("type: the arguments of a function are an object")
    return {**parameters, "type": "object"}
