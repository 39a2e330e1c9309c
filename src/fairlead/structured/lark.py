"""Rules of a grammar in llguidance's dialect of Lark."""

import json
from collections.abc import Mapping
from typing import Any

from fairlead.structured import pattern
from fairlead.structured.pattern import Elements, SpecialTokens

BLANKS = "/[ \\n]{0,4}/"
TEXT = "/(.|\\n)*/"
# Between the tokens of JSON: one blank, or one line break with its indentation. Unlimited white space would
# let a model write it forever.
JSON_BLANKS = r"( |\n[ \t]{0,64})?"


class Rules:
    """The rules of one grammar. `lenient`: schemas may have keywords that llguidance does not support."""

    def __init__(self, special: SpecialTokens, *, lenient: bool = False) -> None:
        self.special = special
        self.lenient = lenient
        self._rules: dict[str, str] = {}

    def add(self, name: str, definition: str) -> str:
        """Add a rule and return its name. The same rule may be added again."""
        assert self._rules.get(name, definition) == definition, name
        self._rules[name] = definition
        return name

    def add_json(self, name: str, schema: Mapping[str, Any] | bool) -> str:
        """Add a rule of the JSON texts that are valid for a schema."""
        if isinstance(schema, bool):
            schema = {} if schema else {"enum": []}
        options = {"whitespace_pattern": JSON_BLANKS, "lenient": self.lenient}
        return self.add(name, "%json " + json.dumps({**schema, "x-guidance": options}, ensure_ascii=False))

    def add_until(self, name: str, end: str, *bodies: str, between: str = "") -> str:
        """Add a rule of a text, up to and including the first occurrence of `end`, and return its name.

        `bodies`: regular expressions that the text before it must match; without them, it is any text.
        `between`: a regular expression of what is between that text and `end`.
        """
        mark = pattern.quoted(end, self.special)
        if mark != pattern.plain(end) and not mark.startswith("<["):
            raise ValueError(f"{end} begins with text and has a special token, which no grammar finds")
        if not bodies:
            if mark != pattern.plain(end):
                return self.add(name, f"{TEXT} {mark}")
            self._rules[f"{name}[suffix={mark}]"] = TEXT
            return name
        body = self.add(f"{name}_BODY".upper(), " & ".join(map(pattern.regex_literal, bodies)))
        if mark != pattern.plain(end):
            return self.add(name, f"{body} {mark}")
        closing = pattern.escaped(end)
        marked = self.add(f"{name}_MARKED".upper(), f"{body} {pattern.regex_literal(between + closing)}")
        later = pattern.regex_literal(rf"(.|\n)*{closing}(.|\n)+")
        return self.add(name, self.add(name.upper(), f"{marked} & ~{later}"))

    def of(self, elements: Elements, **captures: str) -> str:
        """Return what a rule needs to match a mark; `captures` has what stands for its named groups."""
        return pattern.to_lark(elements, self.special, captures)

    def __str__(self) -> str:
        return "\n".join(f"{name}: {definition}" for name, definition in self._rules.items())
