"""The grammar of arguments that are written in a tag each."""

import json
import re
from collections.abc import Mapping
from typing import Any

from fairlead.base.wire_formats import pattern
from fairlead.base.wire_formats.pattern import Elements, PatternGroup
from fairlead.language.structured.json_grammar import add_json
from fairlead.language.structured.lark import Rules
from fairlead.language.structured.schema import properties_of, resolved
from fairlead.language.structured.tag_values import tag_value
from fairlead.language.structured.text_grammar import add_text

_DEFINITIONS = ("$defs", "definitions")
_OTHER_REFERENCE = re.compile(r'"\$ref": "#(?!/(?:\$defs|definitions)/)')


def add_tags(rules: Rules, name: str, tag: Elements, parameters: Mapping[str, Any] | bool | None) -> str:
    """Add a rule of arguments in tags. Raises `ValueError` for a schema with keywords that are not supported.

    rules: get the rule.
    name: the rule's name.
    tag: the form of an argument, with groups for key and value.
    parameters: the schema of the arguments, which come in the order of its properties; without properties,
        any names and texts are arguments.
    """
    grammar = _TagGrammar(rules, name, tag, parameters)
    schema = resolved(parameters, parameters)
    properties = properties_of(schema, parameters)
    if not properties:
        others = schema.get("additionalProperties", True) if isinstance(schema, Mapping) else True
        return rules.add(name, '""' if others is False else f"{grammar.tag(None, others)}*")
    required = schema.get("required") or ()
    tags = [grammar.tag(key, one) + ("" if key in required else "?") for key, one in properties.items()]
    return rules.add(name, " ".join(tags))


class _TagGrammar:
    """Rules for the tags of one tool's arguments, which are values of parts of the schema `root`."""

    def __init__(self, rules: Rules, prefix: str, tag: Elements, root: Any) -> None:
        self._rules = rules
        self._prefix = prefix
        self._root = root
        at = {one.name: index for index, one in enumerate(tag) if isinstance(one, PatternGroup) and one.name}
        self._head = tag[: at["value"]]
        split = pattern.split_at_literal(tag[at["value"] + 1 :])
        if split is None:
            raise ValueError("the tag of an argument has no text at its end")
        self._before_end, self._end, self._after_end = split
        self._count = 0

    def tag(self, key: str | None, schema: Any) -> str:
        """Add a rule of the argument `key`, None: of any name; return what a rule needs to match it."""
        name = f"{self._prefix}_{self._count}"
        self._count += 1
        head = self._rules.of(self._head, **({} if key is None else {"key": pattern.plain(key)}))
        value = tag_value(schema, self._root)
        end = pattern.quoted(self._end, self._rules.special)
        ways = [
            add_text(self._rules, f"{name}_text_{number}", text, self._end, self._before_end)
            for number, text in enumerate(value.texts)
        ]
        if value.others:
            json_value = add_json(self._rules, f"{name}_json", self._json_schema(value.others))
            ways.append(f"{json_value} {self._rules.of(self._before_end)} {end}")
        return self._rules.add(name, f"{head} ({' | '.join(ways)}) {self._rules.of(self._after_end)}")

    def _json_schema(self, alternatives: tuple[Any, ...]) -> Mapping[str, Any]:
        """Return the schema of values that are written as JSON, with the definitions that it refers to."""
        found = alternatives[0] if len(alternatives) == 1 else {"anyOf": alternatives}
        root = self._root if isinstance(self._root, Mapping) else {}
        schema = {**found, **{name: root[name] for name in _DEFINITIONS if name in root}}
        if _OTHER_REFERENCE.search(json.dumps(schema)):
            raise ValueError(
                "$ref to what is not in $defs is not supported in this model's syntax of tool calls"
            )
        return schema
