"""Random JSON schemas with short values."""

import random
from typing import Any

NAMES = ("name", "age", "tags", "ok", "ünïcode", "a b", 'quo"te', "deep", "x", "y")
WORDS = ("red", "green", "", "日本", 'with "quotes"', "back\\slash", "line\nbreak", "😀")
PATTERNS = ("^[0-9]{5}$", "^[a-f]{2,6}(-[a-f]+)?$", "^(yes|no|maybe)$", "^x+y{1,3}$", "^[A-Z][a-z]{0,8}$")
FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "email")


def schema_of(seed: int, *, depth: int = 3) -> dict[str, Any]:
    """Return the schema of a seed: an object, as `response_format` requires."""
    chance = random.Random(seed)
    schema = _object(chance, depth)
    if chance.random() < 0.3:
        leaf = {"type": "object", "properties": {"value": _leaf(chance)}, "additionalProperties": False}
        leaf["properties"]["next"] = {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}
        schema["$defs"] = {"node": {**leaf, "required": ["value", "next"]}}
        schema["properties"]["list"] = {"$ref": "#/$defs/node"}
    return schema


def _any(chance: random.Random, depth: int) -> dict[str, Any]:
    kind = chance.random() if depth > 0 else 1.0
    if kind < 0.25:
        return _object(chance, depth - 1)
    if kind < 0.45:
        least = chance.randint(0, 2)
        schema = {"type": "array", "items": _any(chance, depth - 1)}
        return {**schema, "minItems": least, "maxItems": least + chance.randint(0, 2)}
    if kind < 0.55:
        return {"anyOf": [_any(chance, depth - 1) for _ in range(chance.randint(1, 3))]}
    if kind < 0.6:
        items = [_leaf(chance) for _ in range(chance.randint(1, 3))]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    return _leaf(chance)


def _object(chance: random.Random, depth: int) -> dict[str, Any]:
    names = chance.sample(NAMES, chance.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: _any(chance, depth - 1) for name in names},
        "required": [name for name in names if chance.random() < 0.6],
        "additionalProperties": False,
    }


def _leaf(chance: random.Random) -> dict[str, Any]:
    least = chance.randint(0, 3)
    low = chance.randint(-1000, 1000)
    return chance.choice(
        [
            {"type": "string", "minLength": least, "maxLength": least + chance.randint(0, 12)},
            {"type": "string", "pattern": chance.choice(PATTERNS)},
            {"type": "string", "format": chance.choice(FORMATS)},
            {"type": "integer", "minimum": low, "maximum": low + chance.randint(0, 5000)},
            {"type": "integer", "minimum": 0, "maximum": 1000, "multipleOf": chance.choice([1, 2, 5])},
            {"type": "number", "exclusiveMinimum": low, "maximum": low + 10},
            {"type": "boolean"},
            {"type": "null"},
            {"type": ["null", "boolean"]},
            {"const": chance.choice([*WORDS, 3, None, True, [1, {"a": 2}]])},
            {"enum": chance.sample([*WORDS, 1, 2.5, None], 3)},
        ]
    )
