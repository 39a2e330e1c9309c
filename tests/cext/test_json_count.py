"""The contract of counting values, on the kernel and its oracle; then both on random bytes."""

import json
import sys

import pytest
from hypothesis import example, find, given, settings
from hypothesis import strategies as st

from cext import json_count_oracle as oracle
from fairlead._cext.jsoncount import count

both = pytest.mark.parametrize("count", [count, oracle.count], ids=["kernel", "oracle"])
IDS = (b"prompt", b"input")


def seen(found):
    return found.values, found.apart, found.largest, found.invalid_at


@both
@pytest.mark.parametrize(
    ("body", "values"),
    [
        (b"", 0),
        (b" \r\n\t", 0),
        (b"1", 1),
        (b"-1", 1),
        (b"1.5", 4),
        (b"1E5", 4),
        (b"true", 1),
        (b'"1.5"', 1),
        (b"[]", 1),
        (b"[1,2]", 3),
        (b'{"a":1}', 2),
        (b'{"a":{"b":[]}}', 3),
        (b'{"a" : "b"}', 2),
        (rb'"\"[,]\\"', 1),
        (b'"[[[', 1),
        (b"[" * 1000, 1000),
        (b"]" * 1000, 0),
        (b":::", 0),
        (b'"a"::', 0),
        ('["é","語","😀"]'.encode(), 4),
    ],
)
def test_values_are_counted_and_keys_are_not(count, body, values):
    assert count(body).values == values


@both
@pytest.mark.parametrize(
    ("body", "values", "apart"),
    [
        (b'{"prompt":[1,2,3]}', 2, (3, 0)),
        (b'{"prompt":[[1,2],[3]],"input":[4]}', 5, (3, 1)),
        (b'{"prompt":[1.5]}', 2, (1, 0)),
        (b'{"prompt":"1"}', 2, (0, 0)),
        (b'{"prompt":1}', 2, (0, 0)),  # not an array
        (b'{"prompt":[{"a":1}]}', 4, (0, 0)),
        (b'{"tools":[1,2]}', 4, (0, 0)),
        (b'{"tools":{"prompt":[1,2]}}', 5, (0, 0)),  # not a member of the outermost object
        (b'{"prompt":[1],"tools":[1]}', 4, (1, 0)),
        (b'{"prompt":[1],"prompt":[1]}', 3, (2, 0)),
        (rb'{"pr\u006fmpt":[1]}', 3, (0, 0)),  # an escaped name counts like any other
        (b'["prompt",[1]]', 4, (0, 0)),
    ],
)
def test_numbers_in_arrays_of_named_members_are_counted_apart(count, body, values, apart):
    found = count(body, IDS)
    assert (found.values, found.apart) == (values, apart)


@both
@pytest.mark.parametrize(
    ("body", "largest"),
    [
        (b"[1]", b""),
        (b'{"a":[1],"b":[1,2],"c":[1]}', b"b"),
        (b'{"a":1,"b":1}', b"a"),
        (b'{"a":{"b":[1,2,3]}}', b"a"),
        (b'{"' + b"k" * 100 + b'":1}', b"k" * 64),
        (b'{"prompt":[1,2,3],"b":[]}', b"prompt"),
        (b'{"prompt":[1,2,3],"b":[1]}', b"b"),
    ],
)
def test_member_with_most_values_is_named(count, body, largest):
    assert count(body, IDS).largest == largest


@both
@pytest.mark.parametrize(
    ("body", "invalid_at"),
    [
        (b'"\xc3\xa9"', -1),
        (b'"\xc3"', 1),
        (b'"a\xff"', 2),
        (b"\xed\xa0\x80", 0),  # half of a surrogate pair
        (b'"\xf4\x90\x80\x80"', 1),  # beyond Unicode
        (b'"\xc0\x80"', 1),  # overlong
        (b'"\xe2\x82', 1),
        (b'"\\\xff"', 2),
        (b"12345678\xf0\x9f\x98", 8),
    ],
)
def test_first_bytes_that_are_not_utf8_are_found(count, body, invalid_at):
    assert count(body).invalid_at == invalid_at


def test_anything_but_bytes_is_refused():
    for wrong in ("[]", bytearray(b"[]"), None):
        with pytest.raises(TypeError):
            count(wrong)
    with pytest.raises(TypeError):
        count(b"[]", ("prompt",))
    with pytest.raises(ValueError, match="names"):
        count(b"[]", (b"a",) * 9)


# Kernel and oracle on random bytes --------------------------------------------------------------------

signs = [b'"', b"\\", b"[", b"]", b"{", b"}", b",", b":", b" ", b"\n", b"1", b"-", b".", b"e", b"true"]
members = [b'"prompt":', b'"input":[', b'{"', b"abcdefgh"]
encoded = [b"\xc3\xa9", b"\xff", b"\xe2\x82", b"\xf0\x9f\x98\x80"]
pieces = st.sampled_from([*signs, *members, *encoded])
bodies = st.one_of(st.lists(pieces, max_size=60).map(b"".join), st.binary(max_size=60))


@given(bodies)
@example(b'"\\')
@example(b'"\\"')
@example(b'{"a\\')
def test_kernel_and_oracle_count_alike(body):
    assert seen(count(body, IDS)) == seen(oracle.count(body, IDS))


def without_escapes(body, apart):
    return oracle.count(body.replace(b"\\\\", b"").replace(b'\\"', b'"'), apart)


def fractions_once(body, apart):
    return oracle.count(body.replace(b".", b"0").replace(b"e", b"0"), apart)


def ids_anywhere(body, apart):
    return oracle.count(body.replace(b'{"input":', b'"input":'), apart)


def surrogates_are_utf8(body, apart):
    found = oracle.count(body, apart)
    return found._replace(invalid_at=-1)


def other_letters_end_strings(body, apart):
    return oracle.count(body.replace(b"\xc3\xa9", b'"'), apart)


@pytest.mark.parametrize(
    "mutant",
    [without_escapes, fractions_once, ids_anywhere, surrogates_are_utf8, other_letters_end_strings],
)
def test_comparison_catches_a_mutant(mutant):
    def differs(body):
        return seen(count(body, IDS)) != seen(mutant(body, IDS))

    assert differs(find(bodies, differs, settings=settings(max_examples=4000, derandomize=True)))


documents = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 10**20) | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=9), inner, max_size=5),
    max_leaves=40,
)


def size(document):
    """Return how many values a parser creates. A fraction counts as four."""
    if isinstance(document, list):
        return 1 + sum(map(size, document))
    if isinstance(document, dict):
        return 1 + sum(map(size, document.values()))
    return 4 if isinstance(document, float) and any(sign in repr(document) for sign in ".e") else 1


@given(documents, st.booleans(), st.sampled_from([None, 1]))
def test_parser_makes_as_many_values_as_are_counted(document, ascii_only, indent):
    body = json.dumps(document, ensure_ascii=ascii_only, indent=indent).encode("utf-8", "surrogatepass")
    found = count(body)
    assert found.values == size(document)


def test_count_keeps_no_reference_to_its_body():
    body = b'{"a":[' + b"1," * 100
    before = sys.getrefcount(body)
    for _ in range(100):
        count(body, IDS)
    assert sys.getrefcount(body) == before
