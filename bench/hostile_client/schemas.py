"""JSON Schemas that are small to send and may be expensive to compile or to follow."""

from typing import Any

Schema = dict[str, Any]

PRIMES = (9973, 9967, 9949, 9941)


def multiples(count: int) -> Schema:
    """Return an integer that is a multiple of several primes: their least common multiple has many states."""
    return {"allOf": [{"type": "integer", "multipleOf": prime} for prime in PRIMES[:count]]}


def alternations(depth: int) -> Schema:
    """Return a text in nested alternations that have common beginnings."""
    pattern = "a"
    for _ in range(depth):
        pattern = f"({pattern}|{pattern}b|a{pattern})*"
    return {"type": "string", "pattern": f"^{pattern}$"}


def repetitions(depth: int, most: int) -> Schema:
    """Return a text of counted repetitions within each other."""
    pattern = "[ab]"
    for _ in range(depth):
        pattern = f"({pattern}{{1,{most}}}c?)"
    return {"type": "string", "pattern": f"^{pattern}$"}


def choices(count: int) -> Schema:
    """Return one of many long texts that begin alike."""
    return {"enum": [f"{'the same beginning ' * 3}{number}" for number in range(count)]}


def shared(depth: int) -> Schema:
    """Return an object of definitions of which each uses the next one twice: 2 ** depth uses."""
    definitions: dict[str, Schema] = {
        f"d{level}": {
            "type": "object",
            "properties": {name: {"$ref": f"#/$defs/d{level + 1}"} for name in "ab"},
            "required": ["a", "b"],
            "additionalProperties": False,
        }
        for level in range(depth)
    }
    return {"$ref": "#/$defs/d0", "$defs": definitions | {f"d{depth}": {"type": "integer"}}}


def nested(depth: int) -> Schema:
    """Return arrays within arrays, each with an alternative."""
    schema: Schema = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": {"anyOf": [schema, {"type": "null"}]}, "maxItems": 3}
    return schema


def long_text(length: int) -> Schema:
    """Return a text with a maximum length, at least half of which has to be written."""
    text = {"type": "string", "minLength": length // 2, "maxLength": length}
    return {"type": "object", "properties": {"a": text}, "required": ["a"]}


BOMBS: dict[str, Schema] = {
    "two multiples": multiples(2),
    "four multiples": multiples(4),
    "alternations": alternations(8),
    "repetitions": repetitions(3, 50),
    "choices": choices(20_000),
    "shared definitions": shared(20),
    "nesting": nested(60),
}
