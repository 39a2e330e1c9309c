"""The grammar of strings that are written as plain text, up to a mark."""

from collections.abc import Mapping
from typing import Any

from fairlead.base.wire_formats import pattern
from fairlead.base.wire_formats.pattern import Elements
from fairlead.language.structured.lark import Rules

_UNSUPPORTED = ("format", "allOf", "anyOf", "oneOf", "not")
_ANY = r"(.|\n)*"


def add_text(rules: Rules, name: str, schema: Mapping[str, Any], end: str, before_end: Elements = ()) -> str:
    """Add a rule of the strings of a schema with a mark after them, and return its name.

    rules: get the rule.
    name: the rule's name.
    schema: that of the strings.
    end: the mark.
    before_end: blanks that are between them.

    Raises `ValueError` for a keyword that is not supported, unless the rules are lenient.
    """
    if "const" in schema or "enum" in schema:
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        texts = " | ".join(pattern.plain(value) for value in values if isinstance(value, str))
        return rules.add(name, f"({texts}) {rules.of(before_end)} {pattern.quoted(end, rules.special)}")
    unsupported = [keyword for keyword in _UNSUPPORTED if keyword in schema]
    if unsupported and not rules.lenient:
        raise ValueError(
            f"{unsupported[0]} of a string is not supported in this model's syntax of tool calls"
        )
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    bodies = [rf"(.|\n){{{least},{most}}}"] if least or most != "" else []
    if "pattern" in schema:
        bodies.append(whole_pattern(schema["pattern"]))
    if bodies and before_end:
        # What may be between the text and the end of its tag does not belong to the text.
        edge = r"\S" if pattern.bounded(before_end, 1) != before_end else r"[^\n]"
        bodies.append(rf"({edge}((.|\n)*{edge})?)?")
    return rules.add_until(name, end, *bodies, between=pattern.to_regex(before_end))


def whole_pattern(source: str) -> str:
    """Return the regular expression of the texts in which `source` is found. Raises ValueError."""
    body, begins = source.removeprefix("^"), source.startswith("^")
    anchors, has_alternatives = _outside_of_classes(body)
    ends = anchors == [len(body) - 1] and body.endswith("$")
    if (anchors and not ends) or (has_alternatives and (begins or ends)):
        raise ValueError(f"pattern: {source[:100]} has an anchor that is not supported here")
    return f"{'' if begins else _ANY}(?:{body[:-1] if ends else body}){'' if ends else _ANY}"


def _outside_of_classes(source: str) -> tuple[list[int], bool]:
    """Return where a regular expression has anchors, and whether it has alternatives outside of groups."""
    anchors, has_alternatives, depth, at, in_class = [], False, 0, 0, False
    while at < len(source):
        match source[at]:
            case "\\":
                if source[at + 1 : at + 2] in ("b", "B") and not in_class:
                    anchors.append(at)
                at += 1
            case "[":
                in_class = True
            case "]":
                in_class = False
            case "^" | "$" if not in_class:
                anchors.append(at)
            case "|" if not in_class:
                has_alternatives |= depth == 0
            case "(" | ")" if not in_class:
                depth += 1 if source[at] == "(" else -1
        at += 1
    return anchors, has_alternatives
