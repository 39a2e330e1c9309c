"""What a schema makes the compiler count, compared with counting it."""

import math
import re
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead.language.structured.bounds import CountedText, Multiples, counted_text, expanded_size
from fairlead.language.structured.schema import MAX_COUNTED, MAX_MULTIPLE, SchemaFault, check_schema

MOST = 20_000


def remainders(schema, root=None):
    return Multiples((root or {}).get, MOST).remainders(schema)


def expressions():
    """Return pairs of a regular expression and its size, by the same rules in another form."""
    atoms = st.sampled_from([("a", 1), (".", 1), (r"\d", 1), (r"\{", 1), ("[a-z]", 1), ("[]{2}]", 1)])

    def larger(inner):
        sequences = st.lists(inner, min_size=1, max_size=3).map(
            lambda parts: (f"({''.join(part[0] for part in parts)})", sum(part[1] for part in parts))
        )
        counted = st.tuples(inner, st.integers(0, 3), st.integers(0, 3)).map(
            lambda case: (
                f"({case[0][0]}){{{case[1]},{case[1] + case[2]}}}",
                case[0][1] * max(1, case[1] + case[2]),
            )
        )
        return sequences | counted

    return st.recursive(atoms, larger, max_leaves=6)


@given(expressions())
def test_repetitions_count_as_often_as_they_repeat(case):
    expression, size = case
    re.compile(expression)
    assert expanded_size(expression) == size


@pytest.mark.parametrize(
    ("pattern", "size"),
    [
        ("(ab{3}){2}", 8),
        ("[a-z]{0,500}", 500),
        ("((a{100}){100}){100}", 10**6),
        ("(((((a{999}){999}){999}){999}){999})", 10**9),
        (r"\d{3}-[^\]]{4,}", 8),
        ("a{2}{3}", 6),
        ("(a", 1),
        (")a{2", 4),
        ("a|b*|c+?", 3),
    ],
)
def test_expanded_size(pattern, size):
    assert expanded_size(pattern) == size


def test_text_counts_its_longest_constraint_and_patterns_without_counts_are_free():
    assert counted_text({"minLength": 9, "maxLength": 5, "pattern": "^a{7}$"}).characters == 9
    assert counted_text({"pattern": "x" * 500}).characters == 0
    assert counted_text(True) == CountedText()


@given(
    st.lists(
        st.integers(1, 999).map(lambda number: (number, Decimal(number).scaleb(-2))), min_size=1, max_size=4
    )
)
def test_common_multiple_of_all_parts_is_that_of_arithmetic(numbers):
    expected = math.lcm(*(number for number, _ in numbers))
    while expected % 10 == 0:
        expected //= 10
    found = remainders({"allOf": [{"multipleOf": float(value)} for _, value in numbers]})
    assert found == expected if expected <= MOST else found > MOST


def test_choices_count_once_and_with_what_holds_beside_them():
    either = {"anyOf": [{"multipleOf": 97}, {"multipleOf": 89}]}
    assert remainders(either) == 97
    assert remainders({**either, "multipleOf": 7}) == 7 * 97
    assert remainders({"oneOf": [either, {"multipleOf": 101}]}) == 101


def test_references_count_and_may_be_cyclic():
    root = {"a": {"multipleOf": 97}, "loop": {"multipleOf": 3, "$ref": "loop"}}
    assert remainders({"$ref": "a", "multipleOf": 89}, root) == 97 * 89
    assert remainders({"$ref": "loop"}, root) == 3


@pytest.mark.parametrize("value", [0, -3, True, "x", None, 1e308, 5e-324, 10**400])
def test_odd_multiples_are_no_error(value):
    assert remainders({"multipleOf": value}) >= 0


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"properties": {"a": {"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}}}, "properties.a"),
        ({"items": {"type": "integer", "multipleOf": MAX_MULTIPLE + 1}}, "items"),
        ({"properties": {"a": {"type": "string", "maxLength": MAX_COUNTED + 1}}}, "properties.a"),
        ({"properties": {"a": {"type": "string", "minLength": MAX_COUNTED + 1}}}, "properties.a"),
        ({"properties": {"a": {"pattern": "^(a{100}){100}$"}}}, "properties.a"),
    ],
)
def test_schema_that_counts_too_far_is_refused_with_its_path(schema, path):
    with pytest.raises(SchemaFault) as refused:
        check_schema(schema)
    assert refused.value.path == path


def test_different_texts_add_up_and_equal_ones_do_not():
    def texts(lengths):
        return {"properties": {f"k{index}": {"maxLength": length} for index, length in enumerate(lengths)}}

    check_schema(texts([MAX_COUNTED] * 20))
    check_schema(texts([4000, 3999]))
    with pytest.raises(SchemaFault, match="count more than"):
        check_schema(texts([4000, 4001]))
