"""The subset of regular expressions that wire formats are written in."""

import re

import pytest
import regex

from fairlead.base.wire_formats import pattern
from fairlead.base.wire_formats.formats import FORMATS, GENERIC
from fairlead.base.wire_formats.pattern import Class, Literal, PatternGroup, UnsupportedPattern

SAMPLES = [
    *("", "a", "ab", "aab", "abc", "b", "{", "}", "a{}", "x1", "x-1", " \n a", "</a>", "a/b", "\\", "a|b"),
    *("[x]", "^$", "a.b", "a\nb", "aaaa", "ABC", "é", "_"),
]


@pytest.mark.parametrize(
    "source",
    [
        *("", "a", "abc", "a|b", "ab|", "(?:a|b)c", "a*", "a+b?", "a{2}", "a{1,2}b", "a*?b", r"\s*a\s+"),
        *(r"[^>\n]+", r"[a-z]*", r"[]a]", r"[^]]", r"[\]]", r"\w+", r"\d{1,2}", r"\S", ".*", ".+?b", r"a\.b"),
        *(r"\{\}", r"\n", r"\\", "/", "(?P<name>a+)b", "(?P<name>a|b)?", "(?:ab)+", "(?:ab)*c", "a(?=b)"),
        *(r"(?=\{)", "(a)(b)", "((a|b)|c)", "]", "a}", r"\(\)\[\]\|"),
    ],
)
def test_elements_are_the_same_expression(source: str) -> None:
    again = pattern.to_regex(pattern.parse(source))
    for sample in SAMPLES:
        for flags in (0, re.DOTALL):
            expected, found = (re.search(one, sample, flags) for one in (source, again))
            assert (found and (found.span(), found.groupdict())) == (
                expected and (expected.span(), expected.groupdict())
            ), sample


def test_expressions_of_known_formats_are_the_same() -> None:
    fields = [field for record in (*FORMATS, GENERIC) for field in record.template["fields"].values()]
    sources = [field[key] for field in fields for key in ("open_pattern", "close_pattern") if key in field]
    assert len(sources) > 10
    for source in sources:
        assert regex.compile(pattern.to_regex(pattern.parse(source)))
        assert pattern.to_regex(pattern.parse(pattern.to_regex(pattern.parse(source)))) == pattern.to_regex(
            pattern.parse(source)
        )


@pytest.mark.parametrize(
    "source",
    [
        *(
            "^a",
            "a$",
            "(?!a)",
            "(?<=a)b",
            "(?<!a)b",
            "(?i)a",
            "(?P=name)",
            "(?>a)",
            r"a\1",
            r"\bword",
            r"\Aa",
        ),
        *("*a", "+", "?", "a**", "a*+", "(a", "a)", "(?:a", "(a){2}", "(?:a)*?", "a\\", "(?#x)", r"\x41"),
        *("a{}", "a{,3}", "[a", "{2}"),
    ],
)
def test_other_constructs_are_refused(source: str) -> None:
    with pytest.raises(UnsupportedPattern):
        pattern.parse(source)


def test_literals_match_the_longest_first() -> None:
    assert pattern.to_regex(pattern.literals(["a", "abc", "ab"])) == "(?:abc|ab|a)"
    assert pattern.literals(["a"]) == (Literal("a"),)


def test_special_tokens_within_a_literal_become_their_ids() -> None:
    special = {"<a>": 7, "<a><b>": 8, "<end>": None}
    assert pattern.quoted("x<a>y", special) == '"x" <[7]> "y"'
    assert pattern.quoted("<a><b>", special) == "<[8]>"
    assert pattern.quoted("<a><a>", special) == "<[7]> <[7]>"
    assert pattern.quoted("x<end>", special) == '"x"'
    assert pattern.quoted("", special) == ""
    assert pattern.quoted('say "é"\n', {}) == '"say \\"é\\"\\n"'


def test_lark_has_captures_and_bounded_blanks() -> None:
    elements = pattern.parse(r"\s*<a>(?P<name>[^/]+)(?:b|c)?(?=\{)\n/")
    assert pattern.to_lark(elements, {"<a>": 7}, {"name": '"f"'}) == (
        '/[ \\n]{0,4}/ <[7]> "f" ("b" | "c")? "\\n/"'
    )
    assert pattern.to_lark(elements, {}, {}).split(" ")[3] == "(/[^\\x2f]+/)"


@pytest.mark.parametrize(
    ("source", "literal"),
    [("a/b", r"/a\x2fb/"), (r"a\/b", r"/a\x2fb/"), (r"a\\/b", r"/a\\\x2fb/"), ("a\nb", r"/a\nb/")],
)
def test_slashes_and_line_breaks_of_an_expression_are_escaped(source: str, literal: str) -> None:
    assert pattern.regex_literal(source) == literal


def test_first_text_of_every_match_is_found() -> None:
    before, text, after = pattern.split_at_literal(pattern.parse(r"\s*(?:x)?<a>b+")) or ((), "", ())
    assert before == (Class(r"\s*"), PatternGroup(((Literal("x"),),), "?"))
    assert (text, after) == ("<a>", (Class("b+"),))
    assert pattern.split_at_literal(pattern.parse(r"\w+a")) is None
    assert pattern.split_at_literal(pattern.parse("(?:a|b)c")) is None
    assert pattern.split_at_literal(pattern.parse(r"\s*(?=\{)")) is None


def test_texts_of_a_mark_are_listed_if_they_are_few() -> None:
    assert pattern.texts(pattern.parse(r"\s*</think>\s*")) == ["</think>"]
    assert pattern.texts(pattern.literals(["a", "bc"])) == ["bc", "a"]
    assert pattern.texts(pattern.parse("a+")) is None
    assert pattern.texts(pattern.parse("(?:a|b+)")) is None
    assert sorted(pattern.all_texts(pattern.parse("a(?:b|(?P<n>c))d"))) == ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("source", "may_grow"),
    [("a", False), ("a+", True), ("a(?:b)?", True), (r"a\s*", True), (r"a(?=b)", False), ("(?:a|a)", False)],
)
def test_match_may_grow_at_its_end(source: str, *, may_grow: bool) -> None:
    assert pattern.may_grow(pattern.parse(source)) == may_grow


@pytest.mark.parametrize(
    ("source", "characters"),
    [
        ("<a>", "<"),
        ("(?:a|bc)d", "ab"),
        ("(?:a|bc)?d", "abd"),
        (r"(?:;)?(?=\{)", ";{"),
        ("(?:a)*", None),
        ("(?:a|)b", None),
        (r"\s*a", None),
        ("a+", None),
    ],
)
def test_first_characters_of_a_match(source: str, characters: str | None) -> None:
    expected = None if characters is None else frozenset(characters)
    assert pattern.first_characters(pattern.parse(source)) == expected
