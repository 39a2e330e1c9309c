"""The grammar of JSON texts that are valid for a schema.

The rules are made here and not by llguidance's `%json`, for two reasons: strings may be written with any
escape (`json_strings`), and numbers and blanks have an end. Parts with other keywords, such as a `oneOf` of
alternatives that may overlap, are left to `%json`. There, only strings without a pattern may have escapes of
printable characters. The schema is in the form of 2020-12, as `drafts.modern` returns it.
"""

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any
from urllib.parse import unquote

from fairlead.base.wire_formats import pattern
from fairlead.language.structured import json_numbers, json_strings
from fairlead.language.structured.drafts import at, reference_to
from fairlead.language.structured.json_numbers import Bound
from fairlead.language.structured.json_patterns import PatternFault, lengths, written_pattern
from fairlead.language.structured.json_strings import CHARACTER
from fairlead.language.structured.lark import JSON_BLANKS, Rules, WorkLeft
from fairlead.language.structured.schema import JSON_TYPES, UNSUPPORTED
from fairlead.language.structured.string_formats import FORMATS

_MOST_LEFT = 8
"""The most parts of a schema that are left to `%json`; with more, the whole schema is."""
_MOST_ESCAPED = 2000
"""The most characters of names and values that may be written with escapes, which take room in a grammar."""
_MOST_ALTERNATIVES = 200  # that are compared, or merged with what is beside them
_MOST_BRANCHES = 1000
_MOST_WORK = 40_000
"""Bounds the time of writing the rules of one schema to about 40 ms, by estimates in microseconds.

A schema that takes longer is left to `%json` as a whole; a trial bounds that. The same holds for further
schemas of an answer, after its first ones have taken 0.1 s (`lark.WorkLeft`). The work can be exponential:
references to two alternatives each, one behind the other, double it.
"""
_MOST_NAMED = 5000

_OF_TYPE: Mapping[str, frozenset[str]] = {
    "string": frozenset({"minLength", "maxLength", "patterns"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
    "array": frozenset({"prefixItems", "items", "minItems", "maxItems"}),
    "object": frozenset({"properties", "required", "additionalProperties", "minProperties", "maxProperties"}),
}
_GENERAL = frozenset({"type", "enum", "const", "anyOf", "oneOf"})
_KEYWORDS = frozenset().union(_GENERAL, *_OF_TYPE.values(), {"patternProperties"})
_ALL_TYPES = ("object", "array", "string", "number", "boolean", "null")
Shape = dict[str, Any]
"""Keywords of a schema, without references and `allOf`; `patterns` is a list."""


class NoValue(ValueError):
    """No value is valid for a schema. `path`: where that is."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}" if path else reason)
        self.path = path
        self.reason = reason


class _Left(Exception):
    """A schema that is not written here."""


class _AllLeft(Exception):
    """A schema of which too many parts are not written here, or that takes too long."""


def add_json(rules: Rules, name: str, schema: Mapping[str, Any] | bool) -> str:
    """Add a rule of the JSON texts that are valid for a schema, and return its name. Raises `NoValue`."""
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    before = rules.state()
    try:
        return _JsonGrammar(rules, name, schema).add()
    except (_AllLeft, RecursionError):
        rules.undo(before)
        return left_to_llguidance(rules, name, schema)


def left_parts(
    schema: Mapping[str, Any] | bool, work: WorkLeft | None = None
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the parts of a schema that are left to `%json`, each with its place. Raises `NoValue`."""
    if isinstance(schema, Mapping):
        grammar = _JsonGrammar(Rules({}, work=work), "part", schema)
        with contextlib.suppress(_AllLeft, RecursionError):
            grammar.add()
            yield from grammar.left


def left_to_llguidance(rules: Rules, name: str, schema: Mapping[str, Any]) -> str:
    """Add a rule of the JSON texts that `%json` of llguidance finds for a schema."""
    options: dict[str, Any] = {"whitespace_pattern": JSON_BLANKS, "lenient": rules.lenient}
    if _has_patterns(schema):
        options["json_allowed_escapes"] = 'nrbtf\\"'
    else:
        options["json_allow_general_unicode_escapes"] = True
    return rules.add(name, "%json " + json.dumps({**schema, "x-guidance": options}, ensure_ascii=False))


class _JsonGrammar:
    """Adds the rules of one schema, whose names begin with `name`."""

    def __init__(self, rules: Rules, name: str, root: Mapping[str, Any]) -> None:
        self._rules = rules
        self._name = name
        self._root = root
        self._count = 0
        self._work = 0
        self._patterns = set(FORMATS.values())  # whose work is done
        self.left: list[tuple[str, Mapping[str, Any]]] = []
        self._escaped = 0
        # Schemas that may have themselves in them have rules of their own, by a key, which are added later.
        self._named: dict[str, str] = {}
        self._pending: list[tuple[str, Any, str]] = []  # keys, schemas and their places
        endless = dict.fromkeys(_endless(root), "each of its values has another one in it, without end")
        self._without_value: dict[str, str] = endless  # the keys of schemas without a value, and why

    def add(self) -> str:
        """Add the rules. They are added again without a target that turns out to have no value."""
        state = self._rules.state()
        while True:
            expression = self._value(self._root, "")
            before = len(self._without_value)
            while self._pending:
                key, schema, path = self._pending.pop()
                try:
                    self._rules.add(self._named[key], self._written(schema, path))
                except NoValue as fault:
                    self._without_value[key] = fault.reason
            if len(self._without_value) == before:
                return self._rules.add(self._name, expression)
            self._named.clear()
            self.left.clear()
            self._rules.undo(state)
            self._escaped = 0

    def _spend(self, work: int) -> None:
        """Count work. Raises `_AllLeft` if it is too much."""
        self._work += work
        self._rules.work.left -= work
        if self._work > _MOST_WORK or self._rules.work.left < 0:
            raise _AllLeft

    # Any schema ------------------------------------------------------------------------------------

    def _value(self, schema: Any, path: str) -> str:
        """Return what matches the values of a schema. Raises `NoValue`."""
        if not isinstance(schema, Mapping):
            return self._written(schema, path)
        meaningful = schema.keys() & _MEANINGFUL
        if meaningful == {"$ref"}:
            name = _name_of(schema["$ref"])
            return self._later(schema["$ref"], self._pointed(schema["$ref"]), "" if name == "#" else name)
        if meaningful & {"$ref", "allOf"}:
            key = json.dumps({name: schema[name] for name in sorted(meaningful)})
            self._spend(len(key) // 50)
            return self._later(key, schema, path)
        return self._written(schema, path)

    def _written(self, schema: Any, path: str) -> str:
        """Return what matches the values of a schema, whose own rule is not used for that."""
        try:
            return self._of_shape(self._shape(schema, path, ()), path)
        except _Left:
            if len(self.left) == _MOST_LEFT or not isinstance(schema, Mapping):
                raise _AllLeft from None
            self.left.append((path, self._with_definitions(schema)))
            rule = left_to_llguidance(self._rules, self._new("left"), self.left[-1][1])
            self._spend(self._rules.size(rule) // 20)
            return rule

    def _later(self, key: str, schema: Any, path: str) -> str:
        """Return the rule of a schema, which is added later."""
        if key in self._without_value:
            raise NoValue(path, self._without_value[key])
        if key not in self._named:
            if len(self._named) > _MOST_NAMED:
                raise _AllLeft
            self._named[key] = self._new("part")
            self._pending.append((key, schema, path))
        return self._named[key]

    def _pointed(self, reference: str) -> Any:
        found: Any = self._root.get("$defs", {}).get(_name_of(reference))
        if found is None:
            raise _AllLeft
        return found

    def _shape(self, schema: Any, path: str, seen: Sequence[str]) -> Shape:
        """Return the keywords of a schema, with those of its references and of `allOf`."""
        self._spend(10)
        if schema is True:
            return {}
        if schema is False:
            raise NoValue(path, "the schema is false")
        if not self._rules.lenient and schema.keys() & _REFUSED:
            raise _Left
        shape: Shape = {}
        own = {keyword: value for keyword, value in schema.items() if keyword in _KEYWORDS}
        if "pattern" in schema:
            own["patterns"] = [schema["pattern"]]
        for keyword, value in schema.items():
            for part in self._applied(keyword, value, seen):
                inner = (*seen, value) if keyword == "$ref" else seen
                shape = self._both(shape, self._shape(part, path, inner))
            if keyword in ("properties", "required", "additionalProperties"):
                shape, own = self._both(shape, own), {}
        return self._both(shape, own)

    def _applied(self, keyword: str, value: Any, seen: Sequence[str]) -> Sequence[Any]:
        """Return the schemas that a keyword applies to the same value."""
        if keyword != "$ref":
            return value if keyword == "allOf" else ()
        if value in seen:
            raise _Left
        return (self._pointed(value),)

    def _both(self, one: Shape, other: Shape) -> Shape:
        """Return the shape of the values that are valid for both."""
        if not one or not other:
            return one or other
        both = {**one, **other}
        for keyword in one.keys() & other.keys():
            first, second = one[keyword], other[keyword]
            if keyword in _MERGED:
                both[keyword] = _MERGED[keyword](first, second)
            elif keyword not in _OF_MEMBERS and first != second:
                raise _Left
        if (one.keys() | other.keys()) & {"properties", "additionalProperties"}:
            self._merge_properties(both, one, other)
        if (one.keys() | other.keys()) & {"prefixItems", "items"}:
            self._merge_items(both, one, other)
        return both

    def _merge_items(self, both: Shape, one: Shape, other: Shape) -> None:
        sides = [(side.get("prefixItems", ()), side.get("items", True)) for side in (one, other)]
        self._spend(sum(len(first) for first, _ in sides))
        both["prefixItems"] = [
            _all_of([first[index] if index < len(first) else others for first, others in sides])
            for index in range(max(len(first) for first, _ in sides))
        ]
        both["items"] = _all_of([others for _, others in sides])

    def _merge_properties(self, both: Shape, one: Shape, other: Shape) -> None:
        names = dict.fromkeys([*one.get("properties", ()), *other.get("properties", ())])
        self._spend(len(names))
        sides = [
            (side.get("properties", {}), side.get("additionalProperties", True)) for side in (one, other)
        ]
        if names:
            both["properties"] = {
                name: _all_of([properties.get(name, others) for properties, others in sides])
                for name in names
            }
        both["additionalProperties"] = _all_of([others for _, others in sides])

    def _any(self) -> str:
        """Add the rule of any value, which may be in itself, and return its name."""
        name = "json_any"
        if self._rules.has(name):
            return name
        self._rules.reserve(name)
        return self._rules.add(name, " | ".join(self._of_type(kind, {}, "") for kind in _ALL_TYPES))

    def _of_shape(self, shape: Shape, path: str) -> str:
        if not shape:
            return self._any()
        for keyword in ("anyOf", "oneOf"):
            if keyword in shape:
                rest = {name: value for name, value in shape.items() if name != keyword}
                return self._alternatives(shape[keyword], rest, path, is_one=keyword == "oneOf")
        if "enum" in shape or "const" in shape:
            return self._enumerated(shape, path)
        types = _types(shape)
        ways, reasons = [], []
        for kind in types:
            try:
                ways.append(self._of_type(kind, shape, path))
            except NoValue as fault:
                reasons.append(fault)
        return self._choice(ways, path, reasons)

    def _choice(self, ways: Sequence[str], path: str, reasons: Sequence[NoValue]) -> str:
        if not ways:
            raise reasons[0] if reasons else NoValue(path, "no type is possible")
        return ways[0] if len(ways) == 1 else f"({' | '.join(dict.fromkeys(ways))})"

    def _alternatives(self, branches: Sequence[Any], rest: Shape, path: str, *, is_one: bool) -> str:
        if len(branches) > (_MOST_ALTERNATIVES if rest else _MOST_BRANCHES):
            raise _Left
        if is_one and not self._rules.lenient and not self._are_disjoint(branches, path):
            raise _Left
        keyword = "oneOf" if is_one else "anyOf"
        ways, reasons = [], []
        for index, branch in enumerate(branches):
            place = at(path, f"{keyword}[{index}]")
            try:
                if rest:
                    shape = self._both(rest, self._shape(branch, place, ()))
                    ways.append(self._of_shape(shape, place))
                else:
                    ways.append(self._value(branch, place))
            except NoValue as fault:
                reasons.append(fault)
        return self._choice(ways, path, reasons)

    def _are_disjoint(self, branches: Sequence[Any], path: str) -> bool:
        """Return whether no value is valid for two of the alternatives, as far as that is easily seen."""
        shapes = []
        for branch in branches:
            try:
                shapes.append(self._shape(branch, path, ()))
            except NoValue:
                continue
        if len(shapes) > _MOST_ALTERNATIVES:
            return False
        return all(
            self._is_disjoint(one, other, path)
            for index, one in enumerate(shapes)
            for other in shapes[index + 1 :]
        )

    def _is_disjoint(self, one: Shape, other: Shape, path: str) -> bool:
        first, second = _values(one), _values(other)
        self._spend(5 + 3 * (len(first or ()) + len(second or ())))
        if first is not None and second is not None:
            return not {json.dumps(value, sort_keys=True) for value in first} & {
                json.dumps(value, sort_keys=True) for value in second
            }
        kinds = [_types_of_values(values, shape) for values, shape in ((first, one), (second, other))]
        if not set(kinds[0]) & set(kinds[1]):
            return True
        if kinds != [("object",), ("object",)]:
            return False
        for name in set(one.get("required", ())) & set(other.get("required", ())):
            try:
                values = [
                    self._shape(side.get("properties", {}).get(name, True), path, ()) for side in (one, other)
                ]
            except NoValue:
                return True
            if self._is_disjoint(values[0], values[1], path):
                return True
        for side, opposite in ((one, other), (other, one)):
            # A property that one requires and the other does not allow.
            closed = opposite.get("additionalProperties", True) is False
            allowed = opposite.get("properties", {})
            if (
                any(allowed.get(name, not closed) is False for name in side.get("required", ()))
                and "patternProperties" not in opposite
            ):
                return True
        return False

    # Values that are listed --------------------------------------------------------------------------

    def _enumerated(self, shape: Shape, path: str) -> str:
        listed, types = _values(shape) or (), _types(shape)
        self._spend(4 * len(listed))
        values = [value for value in listed if _fits(value, types, shape)]
        if not values:
            raise NoValue(path, "none of its values is possible")
        if any(isinstance(value, list | dict) for value in values):
            raise _Left
        texts = [value for value in values if isinstance(value, str)]
        others = [json.dumps(value) for value in values if not isinstance(value, str)]
        ways = []
        if texts:
            plain = all(map(_is_plain, texts)) or self._escaped + sum(map(len, texts)) > _MOST_ESCAPED
            ways.append("|".join(f'"{_spelled(text, plain=plain)}"' for text in dict.fromkeys(texts)))
        ways += [pattern.escaped(text) for text in dict.fromkeys(others)]
        return self._rules.terminal("|".join(ways))

    # Types -------------------------------------------------------------------------------------------

    def _of_type(self, kind: str, shape: Shape, path: str) -> str:
        match kind:
            case "string":
                return self._string(shape, path)
            case "number" | "integer":
                return self._number(shape, path, is_integer=kind == "integer")
            case "boolean":
                return self._rules.terminal("true|false")
            case "null":
                return self._rules.terminal("null")
            case "array":
                return self._array(shape, path)
        return self._object(shape, path)

    def _string(self, shape: Shape, path: str) -> str:
        least, most = shape.get("minLength", 0), shape.get("maxLength")
        if most is not None and least > most:
            raise NoValue(path, f"minLength is above maxLength: {least} and {most}")
        expressions = []
        if least or most is not None or not shape.get("patterns"):
            counts = "*" if not least and most is None else f"{{{least},{'' if most is None else most}}}"
            expressions.append(f'"{CHARACTER}{counts}"')
        for source in shape.get("patterns", ()):
            self._spend(len(source) // 50 if source in self._patterns else 4 * len(source))
            self._patterns.add(source)
            try:
                shortest, longest = lengths(source)
                if (most is not None and shortest > most) or (longest is not None and longest < least):
                    raise NoValue(path, "no text has both the pattern and the length")
                expressions.append(f'"(?:{written_pattern(source)})"')
            except PatternFault:
                raise _Left from None
        return self._rules.terminal(*expressions)

    def _number(self, shape: Shape, path: str, *, is_integer: bool) -> str:
        places, multiple = 0 if is_integer else None, shape.get("multipleOf")
        if multiple is not None:
            step = _decimal(multiple)
            digits = step.normalize().as_tuple()
            places = -int(digits.exponent)
            if digits.digits != (1,) or places < 0:
                raise _Left
            places = 0 if is_integer else places
        least = _stricter(shape, "minimum", "exclusiveMinimum", max)
        most = _stricter(shape, "maximum", "exclusiveMaximum", min)
        if least is None and most is None and multiple is None:
            return self._rules.terminal(json_numbers.INTEGER if is_integer else json_numbers.NUMBER)
        expressions = json_numbers.bounded(least, most, places)
        if expressions is None:
            raise _Left
        if not expressions:
            raise NoValue(path, "no number is within its bounds")
        return self._rules.terminal(*expressions)

    def _array(self, shape: Shape, path: str) -> str:
        least, most = shape.get("minItems", 0), shape.get("maxItems")
        if most is not None and least > most:
            raise NoValue(path, f"minItems is above maxItems: {least} and {most}")
        begin, end, comma = (self._rules.terminal(one) for one in (_BEGIN_ARRAY, _END_ARRAY, _COMMA))
        items: list[str] = []
        fault = NoValue(path, f"it has at most {most} items, and minItems is {least}")
        for index, schema in enumerate(shape.get("prefixItems", ())):
            try:
                items.append(self._value(schema, f"{at(path, 'prefixItems')}[{index}]"))
            except NoValue as found:
                most, fault = min(index, index if most is None else most), found
                break
        more = None
        if most is None or most > len(items):
            try:
                more = self._value(shape.get("items", True), at(path, "items"))
            except NoValue as found:
                most, fault = len(items), found
        if most is not None and least > most:
            raise fault
        return f"{begin} {self._items(items, more, least, most, comma)} {end}"

    def _items(self, items: list[str], more: str | None, least: int, most: int | None, comma: str) -> str:
        """Return what matches the items between the brackets."""
        items = items if most is None else items[:most]
        if not items:
            if more is None or most == 0:
                return '""'
            rest = f"({comma} {more}){{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
            rest = "" if most == 1 else rest
            return f"{more} {rest}" if least else f"({more} {rest})?"
        tail = ""
        if more is not None and (most is None or most > len(items)):
            counts = f"{max(least - len(items), 0)},{'' if most is None else most - len(items)}"
            tail = f"({comma} {more}){{{counts}}}"
        for index in range(len(items) - 1, -1, -1):
            one = f"{comma} {items[index]} {tail}" if index else f"{items[index]} {tail}"
            tail = one if index < least else f"({one})?"
        return tail

    def _object(self, shape: Shape, path: str) -> str:
        required = list(dict.fromkeys(shape.get("required", ())))
        properties = {**shape.get("properties", {})}
        if shape.get("patternProperties") or shape.get("minProperties", 0) > len(required):
            raise _Left
        if "maxProperties" in shape and shape["maxProperties"] < len(required):
            raise NoValue(path, "maxProperties is below the number of required properties")
        if "maxProperties" in shape:
            raise _Left
        others = shape.get("additionalProperties", True)
        for name in required:
            properties.setdefault(name, others)
        self._spend(25 + 12 * len(properties))
        self._escaped += sum(map(len, properties))
        plain = self._escaped > _MOST_ESCAPED
        other = self._other_member(others, list(properties), path, plain=plain)
        colon = self._rules.terminal(_COLON)
        members: list[tuple[str, bool]] = []
        for name, schema in properties.items():
            place = at(path, f"properties.{name}")
            try:
                value = self._value(schema, place)
            except NoValue as fault:
                if name in required:
                    raise NoValue(fault.path or place, fault.reason) from None
                continue
            is_plain = _is_plain(name) if other is None else plain
            key = self._rules.terminal(f'"{_spelled(name, plain=is_plain)}"')
            members.append((f"{key} {colon} {value}", name in required))
        begin, end = self._rules.terminal(_BEGIN_OBJECT), self._rules.terminal(_END_OBJECT)
        return self._rules.shared(f"{begin} {self._members(members, other)} {end}")

    def _other_member(self, schema: Any, names: list[str], path: str, *, plain: bool) -> str | None:
        """Return what matches a member that no property describes; None if there may be none."""
        try:
            value = self._value(schema, at(path, "additionalProperties"))
        except NoValue:
            return None
        character = r'[^"\\\x00-\x1f]' if plain else CHARACTER
        expression = f'"{character}*"'
        taken = "|".join(_spelled(name, plain=plain) for name in names)
        key = self._rules.terminal(expression, but=f'"(?:{taken})"' if names else None)
        return f"{key} {self._rules.terminal(_COLON)} {value}"

    def _members(self, members: list[tuple[str, bool]], other: str | None) -> str:
        """Return what matches the members of an object, with commas between them."""
        comma = self._rules.terminal(_COMMA)
        after = f"({comma} {other})*" if other else ""  # what follows a member
        first = f"({other} {after})?" if other else '""'  # what is there without one before it
        first_required = next((index for index, member in enumerate(members) if member[1]), len(members))
        for index in range(len(members) - 1, -1, -1):
            member, is_required = members[index]
            if is_required:
                first, after = f"{member} {after}", f"{comma} {member} {after}"
                continue
            if index < first_required:  # it may be the first one
                after = self._rules.shared(after) if after else ""
                first = f"{member} {after} | {self._rules.shared(first)}"
            after = f"({comma} {member})? {after}"
        return self._rules.shared(first)

    def _new(self, kind: str) -> str:
        self._count += 1
        return f"{self._name}_{kind}_{self._count}"

    def _with_definitions(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a part of the schema with the definitions that it refers to."""
        definitions, needed, pending = self._root.get("$defs", {}), {}, [schema]
        while pending:
            for reference in _references(pending.pop()):
                name = _name_of(reference)
                if name not in needed and name in definitions:
                    needed[name] = definitions[name]
                    pending.append(definitions[name])
        return {**schema, "$defs": needed} if needed else schema


_MEANINGFUL = _KEYWORDS | {"$ref", "allOf", "pattern"} | frozenset(UNSUPPORTED)
_REFUSED = frozenset(UNSUPPORTED) - {"uniqueItems", "unevaluatedItems", "unevaluatedProperties"}
_NOT_ALNUM = re.compile("[^A-Za-z0-9]")
_ESCAPED = re.compile(r'["\\\x00-\x1f]')
_COMMA = f"{JSON_BLANKS},{JSON_BLANKS}"
_COLON = f"{JSON_BLANKS}:{JSON_BLANKS}"
_BEGIN_OBJECT, _END_OBJECT = rf"\{{{JSON_BLANKS}", rf"{JSON_BLANKS}\}}"
_BEGIN_ARRAY, _END_ARRAY = rf"\[{JSON_BLANKS}", rf"{JSON_BLANKS}\]"


def _name_of(reference: str) -> str:
    name = unquote(reference.removeprefix("#/$defs/"))
    return name.replace("~1", "/").replace("~0", "~")


def _references(value: Any) -> Iterator[str]:
    pending = [value]
    while pending:
        one = pending.pop()
        if isinstance(one, Mapping):
            if isinstance(one.get("$ref"), str):
                yield one["$ref"]
            pending += one.values()
        elif isinstance(one, list):
            pending += one


def _endless(root: Mapping[str, Any]) -> Iterator[str]:
    """Yield the references to schemas whose values would have values of the same schemas in them for ever."""
    definitions = root.get("$defs", {})
    references = {reference_to(name): schema for name, schema in definitions.items()}
    ending: set[str] = set()
    while found := {
        reference
        for reference, schema in references.items()
        if reference not in ending and _ends(schema, ending)
    }:
        ending |= found
    yield from references.keys() - ending


def _ends(schema: Any, ending: set[str]) -> bool:
    """Return whether a schema has a value that ends, as far as its required parts tell."""
    if not isinstance(schema, Mapping):
        return True
    if "$ref" in schema and schema["$ref"] not in ending:
        return False
    if not all(_ends(part, ending) for part in schema.get("allOf", ())):
        return False
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema and not any(_ends(part, ending) for part in schema[keyword]):
            return False
    types = _types(schema)
    if types == ("object",):
        properties = schema.get("properties", {})
        others = schema.get("additionalProperties", True)
        return all(_ends(properties.get(name, others), ending) for name in schema.get("required", ()))
    if types == ("array",) and schema.get("minItems", 0):
        first, rest = schema.get("prefixItems", ()), schema.get("items", True)
        needed = [*first[: schema["minItems"]], *([rest] if len(first) < schema["minItems"] else [])]
        return all(_ends(part, ending) for part in needed)
    return True


def _has_patterns(value: Any) -> bool:
    pending = [value]
    while pending:
        one = pending.pop()
        if isinstance(one, Mapping):
            if "pattern" in one or "patternProperties" in one:
                return True
            pending += one.values()
        elif isinstance(one, list):
            pending += one
    return False


def _all_of(schemas: Sequence[Any]) -> Any:
    kept: list[Any] = []
    for schema in schemas:
        is_all = isinstance(schema, Mapping) and schema.keys() == {"allOf"}
        for part in schema["allOf"] if is_all else [schema]:
            if part is not True and part != {} and part not in kept:
                kept.append(part)
    if any(schema is False for schema in kept):
        return False
    if len(kept) < 2:
        return kept[0] if kept else True
    return {"allOf": kept}


def _common_types(one: Any, other: Any) -> list[str]:
    first, second = ([kinds] if isinstance(kinds, str) else kinds for kinds in (one, other))
    found = [kind for kind in first if kind in second]
    if ("integer" in first and "number" in second) or ("integer" in second and "number" in first):
        found.append("integer")
    return found


_OF_MEMBERS = frozenset({"properties", "additionalProperties", "prefixItems", "items"})
_MERGED: Mapping[str, Callable[[Any, Any], Any]] = {
    **dict.fromkeys(("minLength", "minItems", "minProperties", "minimum", "exclusiveMinimum"), max),
    **dict.fromkeys(("maxLength", "maxItems", "maxProperties", "maximum", "exclusiveMaximum"), min),
    **dict.fromkeys(("patterns", "required"), lambda one, other: list(dict.fromkeys([*one, *other]))),
    "type": _common_types,
}


def _types(shape: Mapping[str, Any]) -> tuple[str, ...]:
    kinds = shape.get("type", _ALL_TYPES)
    found = [kinds] if isinstance(kinds, str) else list(dict.fromkeys(kinds))
    return tuple(kind for kind in found if kind != "integer" or "number" not in found)


def _types_of_values(values: Sequence[Any] | None, shape: Shape) -> tuple[str, ...]:
    """Return the types that are possible, integers as numbers."""
    found = _types(shape) if values is None else [JSON_TYPES[type(value)] for value in values]
    return tuple(dict.fromkeys("number" if kind == "integer" else kind for kind in found))


def _values(shape: Shape) -> list[Any] | None:
    """Return the values that are listed; None if there is no list."""
    if "const" in shape and "enum" in shape:
        raise _Left
    return [shape["const"]] if "const" in shape else shape.get("enum")


def _fits(value: Any, types: Sequence[str], shape: Shape) -> bool:
    """Return whether a value has one of the types. Raises `_Left` if there are other constraints."""
    kind = JSON_TYPES[type(value)]
    is_whole = isinstance(value, float) and value.is_integer()
    is_number = kind in ("integer", "number") and "number" in types
    if kind not in types and not is_number and not (is_whole and "integer" in types):
        return False
    group = "number" if kind == "integer" else kind
    if shape.keys() & _OF_TYPE.get(group, frozenset()) or (
        group == "object" and "patternProperties" in shape
    ):
        raise _Left
    return True


def _decimal(value: float) -> Decimal:
    try:
        return Decimal(repr(value))
    except InvalidOperation:
        raise _Left from None


def _stricter(shape: Shape, inclusive: str, exclusive: str, choose: Any) -> Bound | None:
    bounds = [
        Bound(_decimal(shape[name]), is_open)
        for name, is_open in ((inclusive, False), (exclusive, True))
        if name in shape
    ]
    if len(bounds) == 2 and bounds[0].value == bounds[1].value:
        return bounds[1]
    return choose(bounds, key=lambda bound: bound.value) if bounds else None


def _is_plain(text: str) -> bool:
    return _ESCAPED.search(text) is None


def _spelled(text: str, *, plain: bool) -> str:
    """Return what matches a text between quotation marks: all its writings, or only the usual one."""
    if not plain:
        return json_strings.literal(text, plain=False)
    return _NOT_ALNUM.sub(_code, json.dumps(text, ensure_ascii=False)[1:-1])


def _code(character: re.Match[str]) -> str:
    return f"\\x{{{ord(character[0]):x}}}"
