"""Count which published schemas and values are served: JSONSchemaBench and the JSON-Schema-Test-Suite.

    python tests/published_schemas.py
    PYTHONPATH=tests python bench/schema_suites.py [--every 1] [--out bench/results/schema_suites.json]

Each schema is checked, tried and compiled as that of a request is; each value of its tests is written as
JSON and matched with the grammar. The result counts refused schemas and refused values by reason, and names
each schema that accepts a value which is not valid for it.
"""

import argparse
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import regex
from llguidance import LLMatcher

from fairlead.language.structured.compiler import LIMITS
from fairlead.language.structured.drafts import walk
from fairlead.language.structured.grammar import JsonAnswer, answer_grammar
from fairlead.language.structured.request import AnswerSpec, FaultyRequest
from fairlead.language.structured.schema import UNSUPPORTED, properties_of, resolved
from fairlead.language.structured.string_formats import FORMATS
from fairlead.language.structured.trial_process import _vocabulary
from fairlead.language.structured.trials import GrammarTrials, TrialFailed
from published_schemas import Published, bench, suite

_KEYWORDS = {"$ref", "enum", *UNSUPPORTED}
_QUOTED = re.compile(r'"[^"]*"|[0-9]+|\{.*')
Outcome = Literal["accepted", "only in the schema's order", "refused"]


class Measured:
    """Counts for one collection of schemas."""

    def __init__(self) -> None:
        self.schemas = self.served = self.valid = self.accepted = self.invalid = 0
        self.annotated = 0
        self.refused_schemas: Counter[str] = Counter()
        self.refused_values: Counter[str] = Counter()
        self.wrongly_accepted: list[str] = []
        self.wrongly_refused: list[str] = []
        self._trials = GrammarTrials()

    def add(self, one: Published) -> None:
        """Count a schema with its tests."""
        self.schemas += 1
        grammar, reason = _grammar(one.schema)
        if grammar is not None:
            reason = self._fault(grammar)
        if grammar is None or reason is not None:
            self.refused_schemas[_kind(str(reason))] += 1
            return
        self.served += 1
        matcher = LLMatcher(_vocabulary(), grammar, log_level=0, limits=LIMITS)
        for value, is_valid in one.tests:
            outcome = _outcome(matcher, one.schema, value)
            if is_valid:
                self.valid += 1
                self.accepted += outcome == "accepted"
                if outcome != "accepted":
                    self.refused_values[outcome] += 1
                if outcome == "refused":
                    self.wrongly_refused.append(f"{one.name}: {json.dumps(value)[:100]}")
            else:
                self.invalid += 1
                if outcome == "refused":
                    continue
                if _is_annotated(one.schema):
                    self.annotated += 1
                else:
                    self.wrongly_accepted.append(f"{one.name}: {json.dumps(value)[:100]}")

    def _fault(self, grammar: str) -> str | None:
        """Return why a grammar is refused; None if it is not. A busy machine is given time."""
        for _ in range(20):
            try:
                return self._trials.run(grammar).fault
            except TrialFailed:
                continue
        return "there was no time to compile it"

    def result(self) -> dict[str, Any]:
        """Return the counts."""
        return {
            "schemas": {"all": self.schemas, "served": self.served},
            "schemas refused": dict(self.refused_schemas.most_common()),
            "valid values of served schemas": {"all": self.valid, "accepted": self.accepted},
            "valid values refused": dict(self.refused_values.most_common()),
            "other values of served schemas": self.invalid,
            "accepted, since the keyword is an annotation": self.annotated,
            "wrongly accepted": self.wrongly_accepted,
        }


def accepts(matcher: LLMatcher, value: Any) -> bool:
    """Return whether a value, as Python writes it, is a complete answer."""
    copy = matcher.deep_copy()
    tokens = list(json.dumps(value, ensure_ascii=False).encode(errors="surrogatepass"))
    return copy.try_consume_tokens(tokens) == len(tokens) and bool(copy.is_accepting())


def _outcome(matcher: LLMatcher, schema: Any, value: Any) -> Outcome:
    if accepts(matcher, value):
        return "accepted"
    if accepts(matcher, _ordered(value, schema, schema, 0)):
        return "only in the schema's order"
    return "refused"


def _is_annotated(schema: Any) -> bool:
    """Return whether a schema has a format, or a form of content, that is not enforced."""
    for part in walk(schema):
        keywords = part.schema if isinstance(part.schema, Mapping) else {}
        if keywords.get("format", "date") not in FORMATS or keywords.keys() & {
            "contentMediaType",
            "contentEncoding",
        }:
            return True
    return False


def _grammar(schema: Any) -> tuple[str | None, str | None]:
    """Return the grammar of a schema, or why it is refused."""
    try:
        AnswerSpec(answer=JsonAnswer(schema), answer_field="schema").check()
        return answer_grammar(JsonAnswer(schema)), None
    except (FaultyRequest, ValueError) as fault:
        return None, str(fault)


def _kind(reason: str) -> str:
    """Return a reason without what only this schema has."""
    path, found, rest = reason.partition(": ")
    keyword = path.rpartition(".")[2] if found else ""
    if keyword not in _KEYWORDS:
        keyword = "schema"
    if keyword == "$ref":
        rest = rest.partition(" ")[2]
    return f"{keyword}: {_QUOTED.sub('…', rest)}"[:80] if found else _QUOTED.sub("…", reason)[:120]


def _ordered(value: Any, schema: Any, root: Any, depth: int) -> Any:
    """Return a value with the properties of its objects in the order of the schema."""
    if depth > 20:
        return value
    parts = list(_parts(schema, root, 0))
    if isinstance(value, list):
        return [
            _ordered(item, {"allOf": list(_items(parts, index))}, root, depth + 1)
            for index, item in enumerate(value)
        ]
    if not isinstance(value, dict):
        return value
    named = [name for part in parts for name in properties_of(part, root)]
    names = [
        *dict.fromkeys(name for name in named if name in value),
        *(name for name in value if name not in named),
    ]
    return {
        name: _ordered(value[name], {"allOf": list(_members(parts, name, root))}, root, depth + 1)
        for name in names
    }


def _members(parts: Iterable[Mapping[str, Any]], name: str, root: Any) -> Iterable[Any]:
    """Yield the schemas of a member of an object."""
    for part in parts:
        properties = properties_of(part, root)
        if name in properties:
            yield properties[name]
        elif "additionalProperties" in part:
            yield part["additionalProperties"]
        for source, one in (part.get("patternProperties") or {}).items():
            if _found(source, name):
                yield one


def _found(pattern: str, name: str) -> bool:
    try:
        return regex.search(pattern, name) is not None
    except regex.error:
        return False


def _parts(schema: Any, root: Any, depth: int) -> Iterable[Mapping[str, Any]]:
    """Yield the schemas that may hold for the same value."""
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping) or depth > 8:
        return
    yield schema
    for keyword in ("allOf", "anyOf", "oneOf"):
        for one in schema.get(keyword) or ():
            yield from _parts(one, root, depth + 1)


def _items(parts: Iterable[Mapping[str, Any]], index: int) -> Iterable[Any]:
    for part in parts:
        prefix = part.get("prefixItems") or (part["items"] if isinstance(part.get("items"), list) else [])
        if index < len(prefix):
            yield prefix[index]
        elif not isinstance(part.get("items"), list) and "items" in part:
            yield part["items"]


def measure(published: Iterable[Published], every: int) -> Measured:
    """Count for each `every`th schema."""
    measured = Measured()
    for number, one in enumerate(published):
        if number % every == 0:
            measured.add(one)
    return measured


def main() -> None:
    """Measure both collections."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--every", type=int, default=1, help="measure one schema of so many")
    parser.add_argument("--only", choices=["bench", "suite"], help="measure one of the collections")
    parser.add_argument("--details", type=Path, help="write the names of all deviations to this file")
    parser.add_argument("--out", type=Path, help="write the result to this file")
    arguments = parser.parse_args()
    collections = {"bench": ("JSONSchemaBench", bench), "suite": ("JSON-Schema-Test-Suite", suite)}
    result: dict[str, Any] = {"question": "which published schemas and values are served"}
    details: dict[str, Any] = {}
    for key, (name, published) in collections.items():
        if arguments.only in (None, key):
            measured = measure(published(), arguments.every)
            result[name] = measured.result()
            details[name] = measured.wrongly_refused
    text = json.dumps(result, indent=1, ensure_ascii=False)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n")
    if arguments.details is not None:
        arguments.details.write_text(json.dumps(details, indent=1))


if __name__ == "__main__":
    main()
