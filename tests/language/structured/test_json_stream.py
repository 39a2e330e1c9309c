"""JSON that arrives in pieces, against `json.loads`."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead.language.structured.json_stream import ListReader, ObjectReader, ValueEnd

texts = st.text(st.sampled_from('a"\\{}[],: \n\té😀\u2028'), max_size=6)
values = st.recursive(
    texts | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.booleans() | st.none(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=8,
)
indents = st.sampled_from([None, 0, 2])


def in_pieces(text: str, places: list[int]) -> list[str]:
    bounds = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(bounds)]


places_of = st.lists(st.integers(0, 10_000), max_size=6)


@given(value=values, indent=indents, is_ascii=st.booleans(), rest=st.sampled_from([",", "}", " x", "]"]))
def test_end_of_a_value_is_found_however_it_is_cut(
    value: Any, indent: int | None, *, is_ascii: bool, rest: str
) -> None:
    written = json.dumps(value, indent=indent, ensure_ascii=is_ascii)
    for place in range(len(written) + 1):
        end = ValueEnd()
        first = end.feed(written[:place])
        if first is None:
            first = end.feed(written[place:] + rest)
            assert first is not None
            first += place
        assert first == len(written)


def read_object(pieces: list[str]) -> tuple[dict[str, Any], str | None, bool]:
    reader, found, ended, rest = ObjectReader(), {}, set(), None
    for piece in pieces:
        if rest is not None:
            rest += piece
            continue
        members, end = reader.feed(piece)
        for member in members:
            assert member.key not in ended
            found[member.key] = found.get(member.key, "") + member.text
            if member.is_last:
                ended.add(member.key)
        rest = None if end is None else piece[end:]
    decoded = {key: json.loads(text) for key, text in found.items() if key in ended}
    return decoded, rest, reader.is_faulty


@given(value=st.dictionaries(texts, values, max_size=5), indent=indents, places=places_of)
def test_members_of_an_object_are_read_however_it_is_cut(
    value: dict[str, Any], indent: int | None, places: list[int]
) -> None:
    written = json.dumps(value, indent=indent) + " rest"
    assert read_object(in_pieces(written, places)) == (value, " rest", False)


@given(
    value=st.lists(st.dictionaries(texts, values, max_size=3), max_size=4), indent=indents, places=places_of
)
def test_objects_of_a_list_are_read_however_it_is_cut(
    value: list[dict[str, Any]], indent: int | None, places: list[int]
) -> None:
    reader, found, current, rest = ListReader(), [], {}, ""
    pieces = in_pieces(json.dumps(value, indent=indent) + "rest", places)
    for number, piece in enumerate(pieces):
        objects, end = reader.feed(piece)
        for members, has_ended in objects:
            for member in members:
                current[member.key] = current.get(member.key, "") + member.text
            if has_ended:
                found.append({key: json.loads(text) for key, text in current.items()})
                current = {}
        if end is not None:
            rest = piece[end:] + "".join(pieces[number + 1 :])
            break
    assert (found, rest, reader.is_faulty) == (value, "rest", False)


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ("x", "x"),
        ("[1]", "[1]"),
        ("{1: 2}", "1: 2}"),
        ("{,}", ",}"),
        ('{"a" 1}', "1}"),
        ('{"a": }', "}"),
        ('{"a": , "b": 1}', ', "b": 1}'),
        ('{"a": 1 "b": 2}', '"b": 2}'),
        ('{"a": 1,}', "}"),
        ('{"a": 1, 2}', "2}"),
        ('{"\\x": 1}', ": 1}"),
        ('{"a": 1]', "]"),
    ],
)
def test_object_is_faulty_from_its_first_wrong_character(text: str, rest: str) -> None:
    for pieces in ([text], list(text)):
        _, found, is_faulty = read_object(pieces)
        assert is_faulty
        assert found == rest


@pytest.mark.parametrize("text", ["{}", "[1]", '["a"]', "[,{}]", "[{},]", "[{}{}]", "[{} 1]"])
def test_list_of_anything_but_objects_is_faulty(text: str) -> None:
    reader = ListReader()
    _, end = reader.feed(text)
    assert reader.is_faulty
    assert end is not None


@pytest.mark.parametrize("text", ['{"a": {"b": "}"', '{"a', '{"a": "\\', "{", ""])
def test_unfinished_object_goes_on(text: str) -> None:
    reader = ObjectReader()
    assert reader.feed(text)[1] is None
    assert not reader.is_faulty


@pytest.mark.parametrize(("text", "value"), [("12", 12), ("-1.5e3", -1500.0), ("true", True), ("null", None)])
def test_scalar_ends_before_what_follows_it(text: str, value: Any) -> None:
    assert read_object([*f'{{"a":{text}}}']) == ({"a": value}, "", False)
