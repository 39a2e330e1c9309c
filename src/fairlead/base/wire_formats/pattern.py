"""The regular expressions of wire formats: a subset that can be written as a grammar.

Supported are literals, character classes, `.`, groups (also named and optional ones), alternatives, greedy
and lazy repetition, and lookahead. The last is for the parser only: a grammar has it in what follows.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import regex

# A grammar that allowed any amount of white space would let a model write it forever.
_WHITESPACE = {"\\s*": "/[ \\n]{0,4}/", "\\s+": "/[ \\n]{1,4}/", "\\s*?": "/[ \\n]{0,4}/"}
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r"}
_CLASS_OF = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}
_IN_REGEX = re.compile(r"\\?[/\n\r]|\\.", re.DOTALL)
_CODES = {"/": "\\x2f", "\n": "\\n", "\r": "\\r"}
_QUANTIFIER = re.compile(r"(?:[*+?]|\{\d+(?:,\d*)?\})\??")
_CLASS = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]|\\[wWdDsS]|\.")
_GROUP = re.compile(r"\((?:\?:|\?P<(?P<name>\w+)>|(?P<ahead>\?=))?")


class UnsupportedPattern(ValueError):
    """A regular expression that cannot be written as a grammar."""


@dataclass(frozen=True)
class Literal:
    """A text."""

    text: str


@dataclass(frozen=True)
class Class:
    """A character class with its quantifier, as written."""

    source: str


@dataclass(frozen=True)
class PatternGroup:
    """A group of a regular expression.

    alternatives: each is a sequence of elements.
    quantifier: "?", "*", "+", or empty.
    name: its name, if it has one.
    is_ahead: whether it is a lookahead.
    """

    alternatives: "tuple[Elements, ...]"
    quantifier: str = ""
    name: str | None = None
    is_ahead: bool = False


SpecialTokens = Mapping[str, int | None]
"""The ids of special tokens, which no text of a grammar matches, by their text; None: it ends the answer."""
Element = Literal | Class | PatternGroup
Elements = tuple[Element, ...]


def parse(pattern: str) -> Elements:
    """Return the elements of a regular expression. Raises `UnsupportedPattern`."""
    try:
        alternatives, end = _alternatives(pattern, 0)
        regex.compile(pattern)  # which allows a name in several alternatives
    except RecursionError:
        raise UnsupportedPattern("groups that are nested too deeply") from None
    except regex.error as error:
        raise UnsupportedPattern(f"{error} in {pattern}") from None
    if end < len(pattern):
        raise UnsupportedPattern(f"an unexpected ) in {pattern}")
    return alternatives[0] if len(alternatives) == 1 else (PatternGroup(alternatives),)


def literals(texts: Sequence[str]) -> Elements:
    """Return elements that match any of these texts, the longest first."""
    ordered = sorted(texts, key=len, reverse=True)
    if len(ordered) == 1:
        return (Literal(ordered[0]),)
    return (PatternGroup(tuple((Literal(text),) for text in ordered)),)


def to_regex(elements: Elements) -> str:
    """Return the regular expression of these elements, for Python's `re` and `regex`."""
    return "".join(map(_regex_of, elements))


def to_lark(elements: Elements, special: SpecialTokens, captures: Mapping[str, str]) -> str:
    """Return what a rule of llguidance's Lark dialect needs to match these elements.

    `captures` has what stands for each named group.
    """
    return " ".join(filter(None, (_lark_of(element, special, captures) for element in elements)))


def plain(text: str) -> str:
    """Return a text in Lark."""
    return json.dumps(text, ensure_ascii=False)


def regex_literal(source: str) -> str:
    """Return a regular expression in Lark, in which no slash and no line break may occur."""
    return f"/{_IN_REGEX.sub(lambda found: _CODES.get(found[0][-1], found[0]), source)}/"


def escaped(text: str) -> str:
    """Return the regular expression that matches a text, for `regex_literal`."""
    return "".join(char if char.isalnum() or not char.isascii() else f"\\x{ord(char):02x}" for char in text)


def quoted(text: str, special: SpecialTokens) -> str:
    """Return a literal text in Lark, in which special tokens are their ids."""
    if not text:
        return ""
    found = [token for token in special if token in text]
    if not found:
        return plain(text)
    token = min(found, key=lambda one: (text.index(one), -len(one)))
    before, _, after = text.partition(token)
    token_id = special[token]
    reference = "" if token_id is None else f"<[{token_id}]>"
    parts = (quoted(before, special), reference, quoted(after, special))
    return " ".join(filter(None, parts))


def split_at_literal(elements: Elements) -> tuple[Elements, str, Elements] | None:
    """Return the first text that every match has, with what may precede it and what follows it.

    None if something else must precede it, or there is no such text.
    """
    for index, element in enumerate(elements):
        match element:
            case Literal(text):
                return elements[:index], text, elements[index + 1 :]
            case Class(source) if source.endswith(("*", "?")):
                continue
            case PatternGroup(_, "?" | "*", None, False):
                continue
        return None
    return None


def _lark_of(element: Element, special: SpecialTokens, captures: Mapping[str, str]) -> str:
    match element:
        case Literal(text):
            return quoted(text, special)
        case Class(source):
            return _WHITESPACE.get(source) or regex_literal(source)
        case PatternGroup(is_ahead=True):
            return ""
        case PatternGroup(name=str(name)) if name in captures:
            return captures[name]
        case PatternGroup(alternatives, quantifier):
            inner = " | ".join(to_lark(one, special, captures) or '""' for one in alternatives)
            return f"({inner}){quantifier}"
    raise AssertionError(element)


def _regex_of(element: Element) -> str:
    match element:
        case Literal(text):
            return re.escape(text)
        case Class(source):
            return source
        case PatternGroup(alternatives, quantifier, name, is_ahead):
            kind = f"?P<{name}>" if name else "?=" if is_ahead else "?:"
            return f"({kind}{'|'.join(map(to_regex, alternatives))}){quantifier}"
    raise AssertionError(element)


def _alternatives(pattern: str, at: int) -> tuple[tuple[Elements, ...], int]:
    """Return the alternatives from `at` to a closing parenthesis or the end, and where they end."""
    alternatives: list[Elements] = []
    elements: list[Element] = []
    while at < len(pattern) and pattern[at] != ")":
        if pattern[at] == "|":
            alternatives.append(_joined(elements))
            elements, at = [], at + 1
            continue
        element, at = _element(pattern, at)
        elements.append(element)
    return (*alternatives, _joined(elements)), at


def _element(pattern: str, at: int) -> tuple[Element, int]:
    """Return the element at `at`, with its quantifier, and where it ends."""
    if pattern[at] == "(":
        opening = _GROUP.match(pattern, at)
        assert opening is not None
        if pattern.startswith("(?", at) and opening.end() == at + 1:
            raise UnsupportedPattern(f"a group of this kind in {pattern}: {pattern[at : at + 4]}")
        alternatives, end = _alternatives(pattern, opening.end())
        if end >= len(pattern):
            raise UnsupportedPattern(f"a ( without its ) in {pattern}")
        quantifier, end = _quantifier(pattern, end + 1)
        if quantifier not in ("", "?", "*", "+"):
            raise UnsupportedPattern(f"a group with {quantifier} in {pattern}")
        return PatternGroup(alternatives, quantifier, opening["name"], opening["ahead"] is not None), end
    if (found := _CLASS.match(pattern, at)) is not None:
        quantifier, end = _quantifier(pattern, found.end())
        return Class(found[0] + quantifier), end
    if pattern[at] in "*+?{^$[":
        raise UnsupportedPattern(f"{pattern[at]} in {pattern}")
    text, end = pattern[at], at + 1
    if text == "\\":
        if end == len(pattern) or (pattern[end].isalnum() and pattern[end] not in _ESCAPED):
            raise UnsupportedPattern(f"an escape in {pattern}: {pattern[at : at + 2]}")
        text, end = _ESCAPED.get(pattern[end], pattern[end]), end + 1
    quantifier, end = _quantifier(pattern, end)
    return (Class(_CLASS_OF.get(text, re.escape(text)) + quantifier) if quantifier else Literal(text)), end


def _quantifier(pattern: str, at: int) -> tuple[str, int]:
    found = _QUANTIFIER.match(pattern, at)
    return ("", at) if found is None else (found[0], found.end())


def _joined(elements: Sequence[Element]) -> Elements:
    """Return the elements with adjacent literals joined."""
    joined: list[Element] = []
    for element in elements:
        if joined and isinstance(element, Literal) and isinstance(joined[-1], Literal):
            joined[-1] = Literal(joined[-1].text + element.text)
        else:
            joined.append(element)
    return tuple(joined)


def texts(elements: Elements) -> list[str] | None:
    """Return the texts that the elements match, if these are few; blanks before them are left out."""
    match [one for one in elements if not (isinstance(one, Class) and one.source.startswith("\\s"))]:
        case [Literal(text)]:
            return [text]
        case [PatternGroup(alternatives, "", None, False)]:
            found = [one[0].text for one in alternatives if len(one) == 1 and isinstance(one[0], Literal)]
            return found if len(found) == len(alternatives) else None
    return None


def bounded(elements: Elements, most: int) -> Elements:
    """Return the elements with at most so many blanks where any number may be."""
    ranges = {r"\s*": f"{{0,{most}}}", r"\s*?": f"{{0,{most}}}", r"\s+": f"{{1,{most}}}"}

    def one(element: Element) -> Element:
        match element:
            case Class(source) if source in ranges:
                return Class(r"\s" + ranges[source])
            case PatternGroup(alternatives):
                return replace(element, alternatives=tuple(bounded(one, most) for one in alternatives))
        return element

    return tuple(map(one, elements))


def may_grow(elements: Elements) -> bool:
    """Return whether a match may become longer when more text follows."""
    match elements[-1] if elements else Literal(""):
        case PatternGroup(is_ahead=True):
            return False
        case PatternGroup(alternatives, "") if len({to_regex(one) for one in alternatives}) == 1:
            return may_grow(alternatives[0])
        case Literal():
            return False
    return True


def ends_ahead(elements: Elements) -> bool:
    """Return whether a mark ends with a lookahead, so that its content begins with what that matches."""
    return bool(elements) and isinstance(elements[-1], PatternGroup) and elements[-1].is_ahead


def all_texts(elements: Elements) -> Iterator[str]:
    """Yield every literal text in the elements."""
    for element in elements:
        match element:
            case Literal(text):
                yield text
            case PatternGroup(alternatives):
                for alternative in alternatives:
                    yield from all_texts(alternative)


def group_names(elements: Elements) -> set[str]:
    """Return the names of the groups in the elements."""
    groups = [one for one in elements if isinstance(one, PatternGroup)]
    inner = [group_names(alternative) for group in groups for alternative in group.alternatives]
    return set().union(*inner, [group.name for group in groups if group.name])


def first_characters(elements: Elements) -> frozenset[str] | None:
    """Return the characters that a match may begin with; None if they are too many, or it may be empty."""
    found: frozenset[str] = frozenset()
    for element in elements:
        match element:
            case Literal(text) if text:
                return found | {text[0]}
            case PatternGroup(alternatives, quantifier):
                firsts = [first_characters(one) for one in alternatives]
                if None in firsts:
                    return None
                found = found.union(*(one for one in firsts if one is not None))
                if quantifier in ("", "+"):
                    return found
            case _:
                return None
    return None
