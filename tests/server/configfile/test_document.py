"""YAML is read with few types and no custom tags; nesting, aliases and size are bounded."""

import pytest

from fairlead.server.configfile.document import Document, UnreadableError


def tree(text: str | bytes, **environment: str):
    document = Document(text if isinstance(text, bytes) else text.encode(), environment)
    assert document.faults == []
    return document.tree


def faults(text: str, **environment: str) -> list[str]:
    return [str(fault) for fault in Document(text.encode(), environment).faults]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1", 1),
        ("-1", -1),
        ("010", 10),
        ("0x1f", 31),
        ("0o17", 15),
        ("1.5", 1.5),
        ("1e3", 1000.0),
        ("true", True),
        ("False", False),
        ("~", None),
        ("", None),
        ("on", "on"),
        ("yes", "yes"),
        ("1:30", "1:30"),
        ("2020-01-01", "2020-01-01"),
        ("'1'", "1"),
        ('"true"', "true"),
        ("!!str 1", 1),
        ("!!int '1'", 1),
        ("[1, a, {b: 2}]", [1, "a", {"b": 2}]),
        ("|\n  a\n  b\n", "a\nb\n"),
    ],
)
def test_values_are_those_of_yaml_1_2(text, expected):
    value = tree(f"x: {text}")["x"]
    assert (type(expected), expected) == (type(value), value)


@pytest.mark.parametrize(
    ("content", "line", "message"),
    [
        (b"", 1, "the file is empty"),
        (b"# nothing\n\n", 1, "the file is empty"),
        (b"- a\n", 1, "must be a mapping of settings"),
        (b"text", 1, "must be a mapping of settings"),
        (b"a: 1\nb: \xff\n", 2, "is not text in UTF-8"),
        (b"a: 1\nb: \x00\n", 2, "is not YAML"),
        (b"a: 1\n\tb: 2\n", 2, "is not YAML"),
        (b"a: [1\nb: 2\n", 2, "is not YAML"),
        (b"a: *nobody\n", 1, "is not YAML: found undefined alias"),
        (b"a: 1\n---\nb: 1\n", 2, "is not YAML: expected a single document"),
        (b'a: "\\U11111111"', 1, "is not YAML"),
        ("a: 1\nb: \ue000\n".encode(), 2, "private use"),
        (b"a: " + b"[" * 1100, 1, "is nested deeper than 50"),
        (b"a: " + b"[" * 60 + b"]" * 60, 1, "is nested deeper than 50"),
        (b"a: &a [*a]", 1, "is nested deeper than 50"),
        (b"x" * (1024 * 1024 + 1), 1, "is larger than 1024 KiB"),
    ],
)
def test_invalid_document_is_refused_with_its_line(content, line, message):
    with pytest.raises(UnreadableError, match=message) as refused:
        Document(content, {})
    assert line == refused.value.line


def test_expansion_of_aliases_is_bounded():
    bomb = "a0: &a0 [1]\n" + "".join(
        f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]\n" for level in range(1, 10)
    )
    with pytest.raises(UnreadableError, match="has more than 100000 values"):
        Document(bomb.encode(), {})


def test_missing_keys_come_from_merged_mappings():
    text = "base: &b {x: 1, y: 2}\nother: &o {y: 3, z: 4}\nm: {<<: [*b, *o], x: 5}\nn: {<<: *b}\n"
    assert tree(text)["m"] == {"x": 5, "y": 2, "z": 4}
    assert tree(text)["n"] == {"x": 1, "y": 2}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: 1\nb: {c: 1,\n  c: 2}", "b.c: occurs twice, on line 2 and on line 3"),
        ("a: .nan", "a: must be a finite number, not .nan"),
        ("a: [1, -.inf]", "a[1]: must be a finite number, not -.inf"),
        ("a: 1e999", "a: must be a finite number, not 1e999"),
        ("a: 9223372036854775808", "a: is too large a number"),
        (f"a: {'9' * 5000}", "a: is too large a number"),
        (
            "a: !!python/name:os.system ''",
            "a: the tag tag:yaml.org,2002:python/name:os.system is not known here",
        ),
        ("a: !mine 1", "a: the tag !mine is not known here"),
        ("{[1]: 2}", "line 1: a key must be text"),
        ("a: {<<: 5}", "a: <<: must be a mapping or a list of them"),
        ("a: ${env.UNSET}", "a: the environment variable UNSET is not set"),
        ("a: ${env.EMPTY}", "a: the environment variable EMPTY is empty"),
    ],
)
def test_invalid_value_is_reported_by_path(text, expected):
    assert expected in faults(text, EMPTY="")


def test_environment_variables_replace_only_values():
    text = "a: ${env.A}\nb: [${env.A}, 'x${env.B}y']\nc: '${env.A}'  # ${env.UNSET}\nd: ${env.EVIL}\n"
    values = tree(text, A="12", B="${env.A}", EVIL="x\nport: 1")
    assert values == {"a": 12, "b": [12, "x${env.A}y"], "c": "12", "d": "x\nport: 1"}


def test_line_of_each_key_and_item_is_known():
    document = Document(b"a:\n  b:\n    - 1\n    - c: 2\n", {})
    assert document.line(("a", "b")) == 2
    assert document.line(("a", "b", 1, "c")) == 4
    assert document.line(("a", "b", 1, "nothing")) == 4
    assert document.line(("nothing",)) == 1


def test_text_of_a_number_is_that_of_the_file():
    assert Document(b"a: [0123]", {}).text(("a", 0)) == "0123"
    assert Document(b"a: ${env.KEY}", {"KEY": "0123"}).text(("a",)) == "0123"
