"""The grammar of values in a dialect of JSON: other delimiters of strings, keys without quotation marks."""

from collections.abc import Mapping
from typing import Any

from fairlead.base.wire_formats import pattern
from fairlead.base.wire_formats.wire_format import JsonDialect
from fairlead.language.structured.json_grammar import add_json
from fairlead.language.structured.lark import Rules
from fairlead.language.structured.schema import properties_of, resolved
from fairlead.language.structured.text_grammar import add_text

# With exponents of two digits, every number is finite for its readers.
_NUMBERS = {
    "integer": "/-?(0|[1-9][0-9]{0,18})/",
    "number": "/-?(0|[1-9][0-9]{0,18})(\\.[0-9]{1,18})?([eE][+-]?[0-9]{1,2})?/",
}
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_UNSUPPORTED = frozenset(
    {
        "allOf",
        "oneOf",
        "patternProperties",
        "minProperties",
        "maxProperties",
        "prefixItems",
        "additionalItems",
    }
)
_ANY_KEY = '/[^\\s"{}\\[\\],:<]{1,64}/ ":"'


class DialectGrammar:
    """Adds rules for values of parts of the schema `root`.

    Raises ValueError for keywords of a schema that it does not support, unless the rules are lenient.
    """

    def __init__(self, rules: Rules, dialect: JsonDialect, root: Any) -> None:
        self._rules = rules
        self._root = root
        opening, self._closing = dialect.string_delimiters or ('"', '"')
        self._opening = pattern.quoted(opening, rules.special)
        self._unquoted = dialect.unquoted_keys
        self._targets: dict[str, str] = {}  # the rules of the targets of references

    def add(self, name: str, schema: Any) -> str:
        """Add a rule of the values that are valid for `schema`, and return its name."""
        return self._rules.add(name, self._value(name, schema))

    def _value(self, name: str, schema: Any) -> str:
        """Return what matches the values of a schema."""
        if isinstance(schema, Mapping) and "$ref" in schema:
            return self._target(name, schema)
        schema = resolved(schema, self._root)
        if not isinstance(schema, Mapping):
            if schema is False:
                raise ValueError(
                    "a schema that is false is not supported in this model's syntax of tool calls"
                )
            return self._any()
        unsupported = sorted(_UNSUPPORTED & schema.keys())
        if unsupported and not self._rules.lenient:
            raise ValueError(f"{unsupported[0]} is not supported in this model's syntax of tool calls")
        if "const" in schema or "enum" in schema:
            return " | ".join(map(self._written, schema["enum"] if "enum" in schema else [schema["const"]]))
        if "anyOf" in schema:
            if "properties" in schema:
                raise ValueError(
                    "anyOf beside properties is not supported in this model's syntax of tool calls"
                )
            return " | ".join(self.add(f"{name}_{at}", one) for at, one in enumerate(schema["anyOf"]))
        kinds = schema.get("type", "object" if "properties" in schema else None)
        if kinds is None:
            return self._any()
        return " | ".join(
            self._of_type(f"{name}_{kind}", kind, schema)
            for kind in ([kinds] if isinstance(kinds, str) else kinds)
        )

    def _target(self, name: str, schema: Mapping[str, Any]) -> str:
        """Return the rule of a reference's target, which may be the value that has the reference."""
        key = str(sorted(schema.items(), key=str))
        if key not in self._targets:
            self._targets[key] = f"{name}_target"
            self.add(f"{name}_target", resolved(schema, self._root))
        return self._targets[key]

    def _of_type(self, name: str, kind: str, schema: Mapping[str, Any]) -> str:
        match kind:
            case "string":
                return f"{self._opening} {add_text(self._rules, f'{name}_text', schema, self._closing)}"
            case "integer" | "number":
                bounds = {key: schema[key] for key in _BOUNDS if key in schema}
                if not bounds:
                    return _NUMBERS[kind]
                return add_json(self._rules, f"{name}_bounded", {"type": kind, **bounds})
            case "boolean":
                return '"true" | "false"'
            case "null":
                return '"null"'
            case "array":
                return self._array(name, schema)
        return self._object(name, schema)

    def _array(self, name: str, schema: Mapping[str, Any]) -> str:
        item = self.add(f"{name}_item", schema.get("items", True))
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return '"[" "]"'
        more = f'("," {item}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
        return f'"[" ({item} {more}){"" if least else "?"} "]"'

    def _object(self, name: str, schema: Mapping[str, Any]) -> str:
        properties, required = properties_of(schema, self._root), schema.get("required") or ()
        if not properties:
            return self._map(name, schema.get("additionalProperties", True))
        # The rules from a member on, where a member was written before it and where none was.
        rest, first = '"}"', '"}"'
        for number, (key, one) in reversed(list(enumerate(properties.items()))):
            member = f"{self._key(key)} {self.add(f'{name}_{number}', one)}"
            after = self._rules.add(f"{name}_after_{number}", rest)
            begin = f"{member} {after}"
            if key in required:
                rest, first = f'"," {begin}', begin
            else:
                otherwise = self._rules.add(f"{name}_without_{number}", first)
                rest, first = f'"," {begin} | {after}', f"{begin} | {otherwise}"
        return f'"{{" {self._rules.add(f"{name}_members", first)}'

    def _map(self, name: str, value: Any) -> str:
        """Return what matches an object with any keys and with values of the schema `value`."""
        if value is False:
            return '"{" "}"'
        if value is True or value == {}:
            self._any()
            return "any_object"
        member = f"{self._any_key()} {self.add(f'{name}_value', value)}"
        return f'"{{" ({member} ("," {member})*)? "}}"'

    def _key(self, key: str) -> str:
        return pattern.plain(f"{key}:") if self._unquoted else f'{self._written(key)} ":"'

    def _any_key(self) -> str:
        return _ANY_KEY if self._unquoted else f'{self._any_string()} ":"'

    def _written(self, value: Any) -> str:
        """Return what matches just this value."""
        match value:
            case str():
                closing = pattern.quoted(self._closing, self._rules.special)
                return f"{self._opening} {pattern.plain(value)} {closing}"
            case bool() | None:
                return {True: '"true"', False: '"false"', None: '"null"'}[value]
            case int() | float():
                return pattern.plain(repr(value))
        raise ValueError("an enum of objects or arrays is not supported in this model's syntax of tool calls")

    def _any_string(self) -> str:
        return f"{self._opening} {self._rules.add_until('dialect_text', self._closing)}"

    def _any(self) -> str:
        """Add the rules of any value, and return the name of that rule."""
        member = f"{self._any_key()} any_value"
        self._rules.add("any_object", f'"{{" ({member} ("," {member})*)? "}}"')
        scalars = [
            "any_object",
            '"[" (any_value ("," any_value)*)? "]"',
            self._any_string(),
            _NUMBERS["number"],
        ]
        return self._rules.add("any_value", " | ".join([*scalars, '"true"', '"false"', '"null"']))
