"""Bodies: valid ones from a JSON Schema, mutations of them, and JSON text that no encoder writes."""

import json
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from random import Random
from typing import Any

OPTIONAL_FIELD = 0.12  # the probability of an optional field
MAX_ITEMS = 3
MAX_DEPTH = 8
WORDS = (
    "Hello",
    "The quick brown fox",
    "one two three four",
    "你好，世界",
    "مرحبا",
    "a\nb",
    "🙂",
    "<|im_end|>",
    " ",
)


class Raw(bytes):
    """JSON text that is written unchanged."""


class Pairs(list[tuple[str, Any]]):
    """An object with possibly duplicate keys."""


class Schemas:
    """Generates values for a schema of an OpenAPI document. `hints` generate fields of these names."""

    def __init__(self, components: Mapping[str, Any], hints: Mapping[str, Callable[[Random], Any]]) -> None:
        self._components = components
        self._hints = hints

    def value(self, schema: Mapping[str, Any], random: Random, depth: int = 0) -> Any:
        """Return a value that matches the schema; None if it has no known type."""
        if "$ref" in schema:
            schema = self._components[schema["$ref"].rpartition("/")[2]]
        if "anyOf" in schema:
            choices = [each for each in schema["anyOf"] if each.get("type") != "null"]
            return self.value(random.choice(choices), random, depth)
        if "enum" in schema:
            return random.choice(schema["enum"])
        match schema.get("type"):
            case "object":
                return self._object(schema, random, depth)
            case "array":
                count = random.randint(schema.get("minItems", 0), MAX_ITEMS)
                return [self.value(schema.get("items", {}), random, depth + 1) for _ in range(count)]
            case "string":
                return random.choice(WORDS)[: schema.get("maxLength", 100)] or "x"
            case "boolean":
                return random.random() < 0.5
            case "integer":
                return random.randint(max(schema.get("minimum", 0), -5), min(schema.get("maximum", 5), 5))
            case "number":
                return round(random.uniform(max(schema.get("minimum", 0), -2), schema.get("maximum", 2)), 3)
        return None

    def _object(self, schema: Mapping[str, Any], random: Random, depth: int) -> dict[str, Any]:
        required = schema.get("required", ())
        found = {}
        for name, field in schema.get("properties", {}).items():
            if name not in required and (depth > MAX_DEPTH or random.random() >= OPTIONAL_FIELD):
                continue
            hint = self._hints.get(name)
            found[name] = hint(random) if hint is not None else self.value(field, random, depth + 1)
        if not schema.get("properties") and random.random() < 0.5:
            found = {
                word: self.value(schema.get("additionalProperties") or {}, random, depth + 1) for word in "ab"
            }
        return found


WEIRD: tuple[Callable[[Random], Any], ...] = (
    lambda random: random.choice(
        (None, True, False, 0, 1, -1, 0.5, "", "1", "true", [], {}, [[]], [{}], {"": None})
    ),
    lambda random: random.choice(
        (2**31, 2**53 + 1, 2**63, -(2**63) - 1, 2**64, 10**30, -5, 1e308, 5e-324, -0.0)
    ),
    lambda random: Raw(
        random.choice(
            (
                b"NaN",
                b"Infinity",
                b"-Infinity",
                b"1e999",
                b"-1e999",
                b"01",
                b"+1",
                b".5",
                b"1.",
                b"0x1",
                b"1" * 5000,
            )
        )
    ),
    lambda random: random.choice(
        ("\x00", "\ud800", "\udfff\ud800", "\ufeff", "\u202e", "\x7f", "a\x00b", "{{7*7}}")
    ),
    lambda random: Raw(
        random.choice((b'"\xff"', b'"\xed\xa0\x80"', b'"\\ud83d"', b'"\\x41"', b'"a\nb"', b"'a'"))
    ),
    lambda random: (
        random.choice(("x", "é", "🙂", "<|im_start|>", "\n", "a ")) * random.choice((100, 5_000, 50_000))
    ),
    lambda random: Raw(_nested(b"[", b"]", random)),
    lambda random: Raw(_nested(b'{"a":', b"}", random, b"1")),
    lambda random: [random.choice((0, None, "a", {}, []))] * random.choice((10, 1000, 20_000)),
    lambda random: {str(number): number for number in range(random.choice((10, 2000)))},
    lambda random: Raw(
        random.choice((b"", b"/**/1", b"1,", b'{"a":1,}', b"[1,]", b"undefined", b'{"a":1 "b":2}'))
    ),
)


def _nested(opens: bytes, closes: bytes, random: Random, inside: bytes = b"") -> bytes:
    depth = random.choice((3, 60, 300, 1100, 30_000))
    return opens * depth + inside + closes * (depth if random.random() < 0.9 else depth - 1)


def weird(random: Random) -> Any:
    """Return an unusual value, which few fields accept."""
    return random.choice(WEIRD)(random)


def spoil(document: Any, random: Random) -> Any:
    """Return the document with one random change."""
    places = list(_places(document))
    if not places:
        return weird(random)
    holder, key = random.choice(places)
    match random.randrange(8):
        case 0:
            del holder[key]
        case 1 | 2 | 3:
            holder[key] = weird(random)
        case 4:
            other, there = random.choice(places)
            holder[key] = deepcopy(other[there])  # which may contain this place
        case 5:
            holder[key] = random.choice(([holder[key]], {"a": holder[key]}, [holder[key]] * 300))
        case 6 if isinstance(holder, dict):
            holder[random.choice(("__proto__", "", "\ud800", "a.b", "x" * 500, key.upper()))] = weird(random)
        case _ if isinstance(document, dict):
            twice = Pairs(document.items())
            twice.insert(
                random.randrange(len(twice) + 1), (random.choice(twice)[0] if twice else "a", weird(random))
            )
            return twice
    return document


def _places(document: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the place of each value: its container, and its key or index."""
    unvisited = [document]
    while unvisited:
        holder = unvisited.pop()
        if isinstance(holder, dict):
            keys: Any = list(holder)
        elif isinstance(holder, list) and not isinstance(holder, Pairs):
            keys = range(min(len(holder), 50))
        else:
            continue
        for key in keys:
            yield holder, key
            if not isinstance(holder[key], Pairs):
                unvisited.append(holder[key])


def encoded(value: Any) -> bytes:
    """Return JSON text. Lone surrogates are written as escapes."""
    if isinstance(value, Raw):
        return bytes(value)
    if isinstance(value, Pairs | dict):
        pairs = value.items() if isinstance(value, dict) else value
        return b"{" + b",".join(encoded(str(key)) + b":" + encoded(item) for key, item in pairs) + b"}"
    if isinstance(value, list):
        return b"[" + b",".join(map(encoded, value)) + b"]"
    if isinstance(value, str):
        try:
            return json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return json.dumps(value).encode()
    return json.dumps(value).encode()
