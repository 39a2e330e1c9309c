"""Hypothesis strategies for values that a JSON Schema allows, for the keywords of our OpenAPI document."""

import math
from typing import Any

from hypothesis import strategies as st

KEYWORDS = {
    *("$ref", "anyOf", "type", "enum", "properties", "required", "additionalProperties", "items", "default"),
    *("minimum", "maximum", "exclusiveMinimum", "minLength", "maxLength", "minItems", "maxItems"),
    *("maxProperties", "title", "description", "discriminator", "format", "propertyNames", "pattern"),
}
LONGEST = 6
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=LONGEST)
ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


class Values:
    """Strategies for the schemas of one OpenAPI document. `named` replaces those of properties by name."""

    def __init__(self, components: dict[str, Any], named: dict[str, st.SearchStrategy]) -> None:
        self._components = components
        self._named = named

    def of(self, schema: dict[str, Any]) -> st.SearchStrategy:
        """Return a strategy for values that `schema` allows."""
        unknown = set(schema) - KEYWORDS
        assert not unknown, f"the keywords {unknown} are not known here"
        if "$ref" in schema:
            return self.of(self._components[schema["$ref"].rpartition("/")[2]])
        if "anyOf" in schema:
            return st.one_of(*map(self.of, schema["anyOf"]))
        if "enum" in schema:
            return st.sampled_from(schema["enum"])
        if "type" not in schema:
            return ANYTHING
        return getattr(self, f"_{schema['type']}")(schema)

    def _null(self, _schema: dict[str, Any]) -> st.SearchStrategy:
        return st.none()

    def _boolean(self, _schema: dict[str, Any]) -> st.SearchStrategy:
        return st.booleans()

    def _integer(self, schema: dict[str, Any]) -> st.SearchStrategy:
        least, most = schema.get("minimum", -(2**31)), schema.get("maximum", 2**31 - 1)
        small = st.integers(max(least, -3), min(most, max(least, 0) + 8))
        return st.one_of(small, small, st.sampled_from([least, most]))

    def _number(self, schema: dict[str, Any]) -> st.SearchStrategy:
        least, most = schema.get("minimum", schema.get("exclusiveMinimum", -1e9)), schema.get("maximum", 1e9)
        if "exclusiveMinimum" in schema:
            least = math.nextafter(least, math.inf)
        return st.floats(least, most) | st.just(most)

    def _string(self, schema: dict[str, Any]) -> st.SearchStrategy:
        if "pattern" in schema:
            return st.from_regex(schema["pattern"])
        least = schema.get("minLength", 0)
        return st.text(
            st.characters(exclude_categories=["Cs"]),
            min_size=least,
            max_size=min(schema.get("maxLength", LONGEST), least + LONGEST),
        )

    def _array(self, schema: dict[str, Any]) -> st.SearchStrategy:
        least = schema.get("minItems", 0)
        items = self.of(schema.get("items", {}))
        return st.lists(items, min_size=least, max_size=min(schema.get("maxItems", 3), least + 3))

    def _object(self, schema: dict[str, Any]) -> st.SearchStrategy:
        properties = {
            name: self._named.get(name, st.deferred(lambda kind=kind: self.of(kind)))
            for name, kind in schema.get("properties", {}).items()
        }
        if not properties:
            more = schema.get("additionalProperties")
            keys = st.integers(0, 300).map(str) if isinstance(more, dict) else TEXT
            return st.dictionaries(keys, self.of(more if isinstance(more, dict) else {}), max_size=3)
        required = set(schema.get("required", ()))
        needed = {name: value for name, value in properties.items() if name in required}
        others = {name: value for name, value in properties.items() if name not in required}
        # Few optional members at a time: of many, nearly always one is refused.
        chosen = st.lists(st.sampled_from(sorted(others)), max_size=3, unique=True) if others else st.just([])
        return chosen.flatmap(
            lambda names: st.fixed_dictionaries(needed | {name: others[name] for name in names})
        )


@st.composite
def invalidated(draw: st.DrawFn, values: st.SearchStrategy) -> Any:
    """Return one of `values` with a member changed, removed or added."""
    value = draw(values)
    if not isinstance(value, dict) or not value:
        return draw(ANYTHING)
    name = draw(st.sampled_from(sorted(value)) | TEXT)
    if draw(st.booleans()):
        return {key: item for key, item in value.items() if key != name}
    return {**value, name: draw(ANYTHING)}
