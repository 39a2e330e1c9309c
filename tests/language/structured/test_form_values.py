"""Forms of answers as bytes for another process."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead.base.wire_formats.formats import NAMES, configured
from fairlead.language.structured.form_values import decode_values, encode_values
from fairlead.language.structured.grammar import ChoiceAnswer, JsonAnswer, LarkAnswer, RegexAnswer
from fairlead.language.structured.request import AnswerSpec, Relaxation, ToolSpec

texts = st.text(st.characters(exclude_categories=()), max_size=8)
schemas = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=20,
)
objects = st.dictionaries(texts, schemas, max_size=4)
relaxations = st.builds(Relaxation, schema=st.none() | objects, reason=texts)
tools = st.builds(
    ToolSpec,
    name=texts,
    parameters=st.none() | objects,
    is_strict=st.booleans(),
    field=texts,
    relaxed=st.none() | relaxations,
)
answers = st.one_of(
    st.builds(JsonAnswer, objects | st.booleans()),
    st.builds(RegexAnswer, texts),
    st.builds(ChoiceAnswer, st.lists(texts, max_size=4)),
    st.builds(LarkAnswer, texts),
)
specs = st.builds(
    AnswerSpec, tools=st.lists(tools, max_size=3).map(tuple), answer=st.none() | answers, answer_field=texts
)


@given(spec=specs)
def test_form_is_the_same_afterwards(spec):
    assert decode_values(encode_values((spec, "closed", None))) == (spec, "closed", None)


def test_wire_formats_are_the_same_afterwards():
    formats = tuple(map(configured, NAMES))
    assert decode_values(encode_values(formats)) == formats


def test_deeply_nested_schema_arrives():
    schema: object = {"const": "\ud800"}
    for _ in range(5000):
        schema = {"items": schema}
    arrived = decode_values(encode_values(JsonAnswer(schema))).schema
    for _ in range(5000):
        arrived = arrived["items"]
    assert arrived == {"const": "\ud800"}


@pytest.mark.parametrize("value", [object(), b"x", {1, 2}, pytest])
def test_other_values_are_refused(value):
    with pytest.raises(TypeError, match="is not part of a form"):
        encode_values((value,))


@pytest.mark.parametrize(
    "data",
    [
        b'[["Path", null, 1, 1], ["value", "/", 0, 0]]',
        b'[["tuple", null, 0, 1]]',
        b'[["AnswerSpec", null, 1, 0]]',
    ],
)
def test_nothing_else_is_made(data):
    with pytest.raises(ValueError):
        decode_values(data)
