"""A model's wire format: how its text marks reasoning and tool calls.

The record is Hugging Face's `response_template` (transformers' documentation, «Response parsing»): a mapping
of message fields to regions of the text, each with the marks that open and close it. A `WireFormat` is what
the grammar and the parser need of such a record.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import regex

from fairlead.base.wire_formats import pattern
from fairlead.base.wire_formats.pattern import Elements

CallContent = Literal["json", "xml-inline"]
_REASONING = ("reasoning_content", "reasoning", "thinking")
_BLANKS = pattern.Class(r"\s*")
Path = tuple[str, ...]


class Region(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One field of a message. Marks are literal texts, of which any may occur, or a regular expression."""

    open: str | list[str] | None = None
    open_pattern: str | None = None
    close: str | list[str] | None = None
    close_pattern: str | None = None
    content: str = "text"
    content_args: dict[str, Any] = {}
    repeats: bool = False
    join: str | None = None
    optional: bool = True
    transform: Any = None
    transform_each: bool = False


class ResponseTemplate(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The record as it is written in `tokenizer_config.json`."""

    fields: dict[str, Region]
    version: Literal[1] = 1
    defaults: dict[str, Any] = {}
    start_anchor: str | list[str] | None = None
    start_anchor_pattern: str | None = None


@dataclass(frozen=True)
class Marks:
    """What opens and closes a region. An empty `close`: its content ends itself, or the text does."""

    open: Elements
    close: Elements


@dataclass(frozen=True)
class JsonDialect:
    """Deviations from JSON: keys without quotation marks, other delimiters of strings."""

    unquoted_keys: bool = False
    string_delimiters: tuple[str, str] | None = None


@dataclass(frozen=True)
class CallSyntax:
    """How a tool call is written.

    marks: what stands before and after it.
    content: how what is between them is read.
    name: the path of keys to the function's name in the content, which is JSON; None: the opening mark has
        it.
    arguments: the path to the arguments; empty: they are the content.
    in_list: whether the content is a list of calls.
    repeats: whether another call may follow.
    tag: of "xml-inline": an argument, with groups for key and value.
    json: how its JSON is written.
    """

    marks: Marks
    content: CallContent
    name: Path | None
    arguments: Path
    in_list: bool = False
    repeats: bool = False
    tag: Elements = ()
    json: JsonDialect = JsonDialect()

    @property
    def is_dialect(self) -> bool:
        """Whether its JSON deviates from the standard."""
        return self.json != JsonDialect()


@dataclass(frozen=True)
class Slip:
    """Another way to write calls, which a model uses by mistake. Only the parser knows it.

    It counts only for functions that the request has. `at_start`: only at the beginning of an answer, because
    elsewhere the same text is often an example.
    """

    syntax: CallSyntax
    at_start: bool = False


@dataclass(frozen=True)
class WireFormat:
    """How a model writes its answer.

    name: the format's name.
    reasoning: the marks of reasoning; None: it has no syntax for that.
    calls: how calls are written; None: it has no syntax for that.
    content: the marks of the answer's text; None: it is what is outside of other regions.
    slips: other ways to write calls, of which the first that fits is used, before `calls`.
    """

    name: str
    reasoning: Marks | None = None
    calls: CallSyntax | None = None
    content: Marks | None = None
    slips: tuple[Slip, ...] = ()


def read_slip(record: Mapping[str, Any], *, at_start: bool = False) -> Slip:
    """Return another way to write calls; `record` is that of `tool_calls`."""
    return Slip(_call_syntax(msgspec.convert(record, Region)), at_start)


def read(name: str, record: Any) -> WireFormat:
    """Return the wire format of a `response_template`. Raises ValueError, which names the faulty field."""
    try:
        template = msgspec.convert(record, ResponseTemplate)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error
    reasoning = next((template.fields[field] for field in _REASONING if field in template.fields), None)
    calls, content = template.fields.get("tool_calls"), template.fields.get("content")
    syntax = None if calls is None else _call_syntax(calls)
    found = WireFormat(name, _marks(reasoning), syntax, _marks(content))
    if syntax is not None and found.content is None and not _has_beginning(syntax.marks.open):
        raise ValueError("tool_calls: there is no text that begins every call")
    return found


def _has_beginning(mark: Elements) -> bool:
    """Return whether a call can be found in a text: by a text of its mark, or by its first character."""
    return pattern.ends_ahead(mark) or pattern.split_at_literal(mark) is not None


def _opens(region: Region) -> bool:
    return region.open is not None or region.open_pattern is not None


def _marks(region: Region | None) -> Marks | None:
    if region is None or not _opens(region):
        return None
    marks = Marks(_elements(region.open, region.open_pattern), _elements(region.close, region.close_pattern))
    for elements in (marks.open, marks.close):
        if elements and not pattern.ends_ahead(elements) and regex.fullmatch(pattern.to_regex(elements), ""):
            raise ValueError("a mark must not be empty")
    return marks


def _elements(texts: str | list[str] | None, expression: str | None) -> Elements:
    if expression is not None:
        return pattern.parse(expression)
    return () if texts is None else pattern.literals([texts] if isinstance(texts, str) else texts)


def _call_syntax(region: Region) -> CallSyntax:
    marks = _marks(region)
    if marks is None:
        raise ValueError("tool_calls needs open or open_pattern")
    if region.content not in ("json", "xml-inline"):
        raise ValueError(f"tool_calls: content {region.content} is not supported")
    name, arguments = _places(region)
    is_tagged, dialect = region.content == "xml-inline", _dialect(region)
    in_mark = name is None and arguments == () and not region.transform_each
    in_content = name is not None and arguments is not None and len(name) == len(arguments) == 1
    if not (in_mark or (in_content and not is_tagged and dialect == JsonDialect())):
        raise ValueError("tool_calls: this transform is not supported")
    if in_mark and "name" not in pattern.group_names(marks.open):
        raise ValueError("tool_calls: its mark has no group name")
    tag: Elements = ()
    if is_tagged:
        tag = pattern.parse(str(region.content_args.get("tag_pattern", "")))
        if not {"key", "value"} <= {one.name for one in tag if isinstance(one, pattern.PatternGroup)}:
            raise ValueError("tool_calls: tag_pattern needs the groups key and value")
    marks = Marks(_with_blanks_after(marks.open), _with_blanks_before(marks.close))
    tag = _with_blanks_after(tag)
    content: CallContent = "xml-inline" if is_tagged else "json"
    assert arguments is not None
    return CallSyntax(marks, content, name, arguments, region.transform_each, region.repeats, tag, dialect)


def _with_blanks_after(mark: Elements) -> Elements:
    """Return a mark that may be followed by blanks before JSON or a tag, as transformers parses it."""
    match mark:
        case (*_, pattern.Literal(text)) if text and not text[-1].isspace():
            return *mark, _BLANKS
    return mark


def _with_blanks_before(mark: Elements) -> Elements:
    match mark:
        case (pattern.Literal(text), *_) if text and not text[0].isspace():
            return _BLANKS, *mark
    return mark


def _dialect(region: Region) -> JsonDialect:
    match region.content_args.get("string_delims") or None:
        case None:
            delimiters = None
        case [[str(opening), str(closing)]] if opening and closing:
            delimiters = opening, closing
        case _:
            raise ValueError("tool_calls: string_delims must be a list of one pair of texts")
    return JsonDialect(bool(region.content_args.get("unquoted_keys")), delimiters)


def _places(region: Region) -> tuple[Path | None, Path | None]:
    """Return the paths of the name and the arguments. None: the name is in the mark; arguments unknown."""
    transform = region.transform
    match transform.get("function", transform) if isinstance(transform, dict) else transform:
        case None | "{content}":
            return ("name",), ("arguments",)
        case {"name": str(name), "arguments": str(arguments)}:
            return _path(name, region), _path(arguments, region)
    return None, None


def _path(placeholder: str, region: Region) -> Path | None:
    """Return the keys in the content that `{content.a.b}` stands for; None for a group of the opening mark.

    With `transform_each`, keys of an element are written without `content`.
    """
    root, *keys = placeholder.removeprefix("{").removesuffix("}").split(".")
    if region.transform_each:
        return (root, *keys)
    return tuple(keys) if root == "content" else None
