"""Schemas of any draft of JSON Schema from 4 on, rewritten as schemas of 2020-12.

`$schema` names the draft. Without it, a schema is of 2020-12, but forms that only older drafts have are read
as these say: a boolean `exclusiveMinimum`, a list as `items`, `definitions`, `id`.
"""

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, NamedTuple
from urllib.parse import quote, unquote, urldefrag, urljoin

from fairlead.language.structured.string_formats import FORMATS, MOST_OF_HOSTNAME

IN_MAPPING = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
IN_LIST = ("anyOf", "oneOf", "allOf", "prefixItems")
SINGLE = (
    *("items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains"),
    *("propertyNames", "unevaluatedItems", "unevaluatedProperties"),
)
_NEWEST = 2020
_DRAFTS = {"draft-04": 4, "draft-05": 4, "draft-06": 6, "draft-07": 7, "2019-09": 2019, "2020-12": _NEWEST}
# The first draft that has a keyword, where it is not 4.
_SINCE = {
    **dict.fromkeys(("const", "contains", "propertyNames"), 6),
    **dict.fromkeys(("if", "then", "else"), 7),
    **dict.fromkeys(
        (
            *("dependentSchemas", "dependentRequired", "unevaluatedItems", "unevaluatedProperties"),
            *("minContains", "maxContains", "$anchor", "$recursiveRef"),
        ),
        2019,
    ),
    **dict.fromkeys(("prefixItems", "$dynamicRef", "$dynamicAnchor"), 2020),
}
_LEFT_OUT = frozenset(
    {
        *("$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$vocabulary", "$defs", "definitions"),
        "format",  # which is a pattern, or an annotation
    }
)
_WALKED = frozenset({*IN_MAPPING, *IN_LIST, *SINGLE, "enum", "dependencies"})
_WHOLE = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_REWRITTEN = frozenset(
    {
        *(*IN_MAPPING, *IN_LIST, *SINGLE, *_LEFT_OUT, *_WHOLE),
        *("$ref", "dependencies", "exclusiveMinimum", "exclusiveMaximum"),
        *_SINCE,
    }
)
"""Keywords of which a schema needs one to be another in 2020-12."""


class Subschema(NamedTuple):
    """A part of a schema that is a schema.

    path: where it is in the schema, for errors.
    schema: the part.
    base: the address that its references are relative to.
    depth: how deep it is.
    """

    path: str
    schema: Any
    base: str
    depth: int


def draft_of(schema: Any) -> int | None:
    """Return the draft that a schema names; None if it names none that is known."""
    named = schema.get("$schema") if isinstance(schema, Mapping) else None
    if not isinstance(named, str):
        return None
    return next((draft for name, draft in _DRAFTS.items() if name in named), None)


def at(path: str, keyword: str) -> str:
    """Return the path of a keyword of the schema at `path`."""
    return f"{path}.{keyword}" if path else keyword


def known(schema: Mapping[str, Any], draft: int | None) -> Mapping[str, Any]:
    """Return the keywords of a schema that its draft has, and that have an effect beside the others."""
    if draft is None:
        return schema
    if draft <= 7 and "$ref" in schema:
        places = ("$ref", "definitions", "$defs")
        return {name: value for name, value in schema.items() if name in places}
    return {name: value for name, value in schema.items() if _SINCE.get(name, 4) <= draft}


def parts(path: str, keyword: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the schemas in the value of a keyword, which is at `path`, with their paths."""
    if isinstance(value, list) and keyword in (*IN_LIST, "items"):
        yield from ((f"{path}[{index}]", part) for index, part in enumerate(value))
    elif keyword in SINGLE:
        yield path, value
    elif keyword in IN_MAPPING and isinstance(value, dict):
        yield from ((at(path, name), part) for name, part in value.items())
    elif keyword == "dependencies" and isinstance(value, dict):
        yield from ((at(path, name), part) for name, part in value.items() if not isinstance(part, list))


class References:
    """The targets of the references in a schema, which are parts of it."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._is_indexed = False
        self._by_address: dict[str, Any] = {"": root}

    def target(self, reference: Any, base: str = "") -> Any:
        """Return the part of the schema that a reference means; None if it has no such part."""
        if not isinstance(reference, str):
            return None
        if not base and (reference == "#" or reference.startswith("#/")):
            return _pointed(self._root, reference[1:])
        self._index()
        address, fragment = urldefrag(_joined(base, reference))
        if not fragment or fragment.startswith("/"):
            found = self._by_address.get(address)
            return None if found is None else _pointed(found, fragment)
        return self._by_address.get(f"{address}#{fragment}")

    def _index(self) -> None:
        if self._is_indexed:
            return
        self._is_indexed = True
        for _, one, base, _ in walk(self._root):
            if not isinstance(one, Mapping):
                continue
            self._by_address.setdefault(base, one)
            for name in ("$anchor", "$dynamicAnchor"):
                if isinstance(one.get(name), str):
                    self._by_address.setdefault(f"{base}#{one[name]}", one)
            own = one.get("$id", one.get("id"))
            if isinstance(own, str) and own.startswith("#"):
                self._by_address.setdefault(f"{base}{own}", one)


class TooMany(ValueError):
    """More schemas than are allowed. `path`: of the keyword that has them."""

    def __init__(self, path: str) -> None:
        super().__init__(f"{path}: there are too many schemas")
        self.path = path


def walk(root: Any, most: int | None = None) -> Iterator[Subschema]:
    """Yield each schema in a schema, itself included. Not recursive.

    Raises `TooMany` if there are more than `most`, with the values of `enum`.
    """
    draft = draft_of(root)
    pending = [Subschema("", root, "", 0)]
    count = 1
    while pending:
        path, one, base, depth = pending.pop()
        if isinstance(one, dict):
            own = one.get("$id", one.get("id") if draft in (None, 4) else None)
            if (
                isinstance(own, str)
                and not own.startswith("#")
                and not ("$ref" in one and draft in (4, 6, 7))
            ):
                base = urldefrag(_joined(base, own))[0]
        yield Subschema(path, one, base, depth)
        for keyword, value in known(one, draft).items() if isinstance(one, dict) else ():
            if keyword not in _WALKED:
                continue
            in_list = isinstance(value, list) and keyword in (*IN_LIST, "enum", "items")
            in_mapping = isinstance(value, dict) and keyword in (*IN_MAPPING, "dependencies")
            count += len(value) if in_list or in_mapping else keyword in SINGLE
            if most is not None and count > most:
                raise TooMany(at(path, keyword))
            pending += [
                Subschema(place, part, base, depth + 1)
                for place, part in parts(at(path, keyword), keyword, value)
            ]


def reference_to(name: str) -> str:
    """Return the reference to a definition of this name in `$defs` of the whole."""
    return f"#/$defs/{quote(name.replace('~', '~0').replace('/', '~1'), safe='~')}"


def modern(schema: Any) -> Any:
    """Return a checked schema of any draft as a schema of 2020-12.

    Its references are to `$defs` of the whole, named by the places of the targets. Formats are patterns.
    Raises ValueError for a schema that is too deep, which was not checked.
    """
    try:
        return _Rewriting(schema).whole()
    except RecursionError:
        raise ValueError("schemas are nested too deeply") from None


class _Rewriting:
    """Rewrites the parts of one schema."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._draft = draft_of(root)
        self._references = References(root)
        self._targets: dict[str, Any] = {}
        self._names: dict[int, str] = {}
        self._pending: list[tuple[str, Any, str]] = []

    def whole(self) -> Any:
        found = self._schema(self._root, "")
        while self._pending:
            name, target, base = self._pending.pop()
            self._targets[name] = self._schema(target, base)
        if not isinstance(found, dict):
            return found
        found = {name: value for name, value in found.items() if name not in ("$defs", "definitions")}
        return {**found, "$defs": self._targets} if self._targets else found

    @cached_property
    def _bases(self) -> dict[int, tuple[str, str]]:
        """The place and the base address of each schema, which only references need."""
        return {id(one.schema): (one.path, one.base) for one in walk(self._root)}

    def _schema(self, schema: Any, base: str) -> Any:
        if not isinstance(schema, Mapping):
            return schema
        if not schema.keys() & _REWRITTEN:
            return schema
        if "$ref" in schema or "_bases" in self.__dict__:
            base = self._bases.get(id(schema), ("", base))[1]
        source = _with_modern_bounds(_with_prefix_items(known(schema, self._draft)))
        made = {
            keyword: self._rewritten(keyword, value, base)
            for keyword, value in source.items()
            if keyword not in _LEFT_OUT and not (keyword == "dependencies" and not value)
        }
        expression = FORMATS.get(source.get("format") or "")
        if expression is not None and "pattern" not in made:
            made["pattern"] = expression
        elif expression is not None:
            made["allOf"] = [*made.get("allOf", ()), {"pattern": expression}]
        if source.get("format") == "hostname":
            made["maxLength"] = min(made.get("maxLength", MOST_OF_HOSTNAME), MOST_OF_HOSTNAME)
        return made

    def _rewritten(self, keyword: str, value: Any, base: str) -> Any:
        if keyword == "$ref":
            return self._reference(value, base)
        if keyword in IN_MAPPING and isinstance(value, Mapping):
            return {name: self._schema(one, base) for name, one in value.items()}
        if keyword in IN_LIST and isinstance(value, list):
            return [self._schema(one, base) for one in value]
        if keyword in SINGLE:
            return self._schema(value, base)
        return int(value) if keyword in _WHOLE else value

    def _reference(self, reference: str, base: str) -> str:
        """Return the reference to a target in `$defs` of the whole, which is rewritten later."""
        target = self._references.target(reference, base)
        key = id(target)
        if key not in self._names:
            written = unquote(reference).removeprefix("#/").replace("/", ".")
            name = self._bases.get(key, (written, ""))[0] or "#"
            self._names[key] = name
            self._targets[name] = {}
            self._pending.append((name, target, base))
        return reference_to(self._names[key])


def _with_prefix_items(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema whose list of `items`, if it has one, is called `prefixItems`."""
    made = dict(schema)
    more = made.pop("additionalItems", True)
    if isinstance(made.get("items"), list):
        made["prefixItems"] = made.pop("items")
        if more is not True:
            made["items"] = more
        if not made["prefixItems"]:
            del made["prefixItems"]
    return made


def _with_modern_bounds(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema whose exclusive bounds, if it has any, are numbers."""
    for inclusive, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if isinstance(schema.get(exclusive), bool) and schema.pop(exclusive) and inclusive in schema:
            schema[exclusive] = schema.pop(inclusive)
    return schema


def _joined(base: str, reference: str) -> str:
    if reference.startswith("#"):
        return base + reference
    try:
        return urljoin(base, reference)
    except ValueError:
        return reference


def _pointed(root: Any, pointer: str) -> Any:
    target = root
    for part in pointer.split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(target, list) and name.isdecimal() and int(name) < len(target):
            target = target[int(name)]
        elif isinstance(target, dict) and name in target:
            target = target[name]
        else:
            return None
    return target
