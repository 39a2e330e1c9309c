"""Traces through rendering which characters of a text a chat template has written, and which a client has.

A template's own strings are `TemplateText` from the beginning. A text that is made of one has `foreign`
spans: what it has from elsewhere, and each place where something was removed. Its other characters are the
template's, and those between two spans were written one after the other. Any other string is foreign.

    "<|" + role + "|>"              role is foreign: one span
    ("<|im_" + word + "end|>")[4:]  a span for the cut at 0, and one for the word

Each operation gives the same characters as that of `str`. One that is not here gives a `str`, which is
foreign. So an operation of a new version of Python or Jinja can lose what the template wrote, but cannot pass
a client's text off as the template's.

Independent of templates and of control tokens.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import chain, count, repeat
from string import Formatter
from typing import Any, Self, SupportsIndex

from markupsafe import Markup

Spans = tuple[tuple[int, int], ...]
"""Beginnings and ends, in order, which do not touch. An empty span is a place where something was removed."""

# A client can write a separator any number of times, and tracing a part takes a microsecond.
_MAX_PARTS = 1000
_ENTITIES = {"&": "&amp;", ">": "&gt;", "<": "&lt;", "'": "&#39;", '"': "&#34;"}


class TemplateText(str):
    """A text of which the template wrote all but the `foreign` spans.

    The constructor's text is foreign, because libraries call the class of a string that they are given.
    """

    __slots__ = ("_foreign",)
    _foreign: Spans

    def __new__(cls, text: object = "") -> Self:
        self = super().__new__(cls, text)
        self._foreign = ((0, len(self)),)
        return self

    def __str__(self) -> "TemplateText":
        return self

    def __add__(self, other: str) -> "TemplateText | TemplateMarkup":
        if isinstance(other, Markup):  # which escapes what it is added to
            return TemplateMarkup(_escaped(self)) + other
        if not isinstance(other, str):
            return NotImplemented
        return _traced(str.__add__(self, other), _appended(self._foreign, foreign_spans(other), len(self)))

    def __radd__(self, other: str) -> "TemplateText":
        if not isinstance(other, str):
            return NotImplemented
        return _traced(str.__add__(other, self), _appended(foreign_spans(other), self._foreign, len(other)))

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        if isinstance(key, slice) and key.step is None:
            begin, end, _ = key.indices(len(self))
            return self._cut(begin, max(begin, end))
        return str.__getitem__(self, key)

    def strip(self, chars: str | None = None, /) -> "TemplateText":
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None, /) -> "TemplateText":
        return self._cut(len(self) - len(str.lstrip(self, chars)), len(self))

    def rstrip(self, chars: str | None = None, /) -> "TemplateText":
        return self._cut(0, len(str.rstrip(self, chars)))

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._located(str.split(self, sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._located(str.rsplit(self, sep, maxsplit), sep)

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> str:
        plain = str.replace(self, old, new, count)
        parts = self.split(old, count) if old else ()
        return _agreeing(plain, _between(new, parts)) if 0 < len(parts) <= _MAX_PARTS else plain

    def join(self, texts: Iterable[str], /) -> str:
        texts = list(texts)
        plain = str.join(self, texts)
        return _agreeing(plain, _between(self, texts)) if len(texts) <= _MAX_PARTS else plain

    def upper(self) -> str:
        return self._mapped(str.upper(self))

    def lower(self) -> str:
        return self._mapped(str.lower(self))

    def title(self) -> str:
        return self._mapped(str.title(self))

    def capitalize(self) -> str:
        return self._mapped(str.capitalize(self))

    def _cut(self, begin: int, end: int) -> "TemplateText":
        """Return the text from `begin` to `end`."""
        if begin == 0 and end == len(self):
            return self
        spans = self._foreign
        # Spans that only touch the text are included: they are where something was removed.
        inner = spans[bisect_left(spans, begin, key=_end) : bisect_right(spans, end, key=_begin)]
        foreign: Spans = ((0, 0),) if begin > 0 else ()
        clipped = tuple((max(first, begin) - begin, min(last, end) - begin) for first, last in inner)
        foreign = _appended(foreign, clipped, 0)
        if end < len(self):
            foreign = _appended(foreign, ((0, 0),), end - begin)
        return _traced(str.__getitem__(self, slice(begin, end)), foreign)

    def _located(self, parts: list[str], sep: str | None) -> list[str]:
        """Return the parts of the text, which are in its order, as cuts of it."""
        cuts: list[str] = []
        at = 0
        if len(parts) > _MAX_PARTS:
            return parts
        for part in parts:
            at = self.find(part, at)  # blanks between parts begin no part, and `sep` is skipped below
            cuts.append(self._cut(at, at + len(part)))
            at += len(part) + len(sep or "")
        return cuts

    def _mapped(self, plain: str) -> str:
        """Return what a method made of the text: the template's only if all of the text is."""
        return plain if self._foreign else literal(plain)


class TemplateMarkup(Markup):
    """A `TemplateText` to which a text is escaped before it is added. It is traced through additions only."""

    __slots__ = ("_text",)
    _text: str

    def __new__(cls, text: Any = "", encoding: str | None = None, errors: str = "strict") -> Self:
        self = super().__new__(cls, text, encoding, errors)
        self._text = text if type(text) is TemplateText else str.__str__(self)
        return self

    def __str__(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return f"Markup({str.__repr__(self)})"

    def __add__(self, other: Any, /) -> "TemplateMarkup":
        added = super().__add__(other)
        return added if added is NotImplemented else _agreeing_markup(added, (self._text, _escaped(other)))

    def __radd__(self, other: Any, /) -> "TemplateMarkup":
        added = super().__radd__(other)
        return added if added is NotImplemented else _agreeing_markup(added, (_escaped(other), self._text))


def literal(text: str) -> TemplateText:
    """Return a string of a template: its own text, or a constant in its expressions."""
    return _traced(text, ())


def foreign_spans(text: str) -> Spans:
    """Return the parts of a text that its template has not written."""
    return text._foreign if type(text) is TemplateText else ((0, len(text)),)  # noqa: SLF001


def concat(texts: Iterable[str]) -> str:
    """Return the texts, one after the other; a `str` if no template wrote any of them."""
    texts = list(texts)
    plain = "".join(texts)
    if texts and TemplateText not in map(type, texts):
        return plain
    foreign: list[tuple[int, int]] = []
    offset = 0
    for text in texts:
        for begin, end in foreign_spans(text):
            if foreign and foreign[-1][1] == begin + offset:
                foreign[-1] = (foreign[-1][0], end + offset)
            else:
                foreign.append((begin + offset, end + offset))
        offset += len(text)
    return _traced(plain, tuple(foreign))


def formatted(plain: str, form: str, values: Formatter, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    """Return `plain`, which is `form` with values formatted into it, with the marks of `form` and values.

    plain: the text.
    form: the format string.
    values: formats a value, and refuses what a template may not read.
    args: values by position.
    kwargs: values by name.
    """
    if foreign_spans(form):
        return plain
    texts: list[str] = []
    numbers = count()
    try:
        for text, name, spec, conversion in values.parse(form):
            texts.append(literal(text))
            if name is not None:
                value, _ = values.get_field(name or str(next(numbers)), args, kwargs)
                texts.append(values.format_field(values.convert_field(value, conversion), spec or ""))
    except Exception:  # noqa: BLE001 — a form that `plain` was made of in another way
        return plain
    return _agreeing(plain, texts)


def _traced(text: str, foreign: Spans) -> TemplateText:
    traced = str.__new__(TemplateText, text)
    traced._foreign = foreign  # noqa: SLF001
    return traced


def _agreeing(plain: str, texts: Sequence[str]) -> str:
    """Return the texts, one after the other, if that is `plain`, which `str` has made; else `plain`."""
    traced = concat(texts)
    return traced if traced == plain else plain


def _agreeing_markup(added: TemplateMarkup, texts: Sequence[str]) -> TemplateMarkup:
    return TemplateMarkup(_agreeing(str.__str__(added), texts))


def _escaped(value: Any) -> str:
    """Return what `value` becomes when it is added to Markup. An entity in it is foreign."""
    if type(value) is not TemplateText:
        return str(Markup.escape(value)) if type(value) is not TemplateMarkup else str(value)
    text: str = value
    for character, entity in _ENTITIES.items():
        text = text.replace(character, entity)
    return text


def _between(separator: str, texts: Sequence[str]) -> list[str]:
    """Return the texts with the separator between each two."""
    return list(chain.from_iterable(zip(repeat(separator), texts, strict=False)))[1:]


def _appended(first: Spans, second: Spans, offset: int) -> Spans:
    """Return the spans of two texts in a row, of which the second begins at `offset`."""
    moved = tuple((begin + offset, end + offset) for begin, end in second) if offset else second
    if first and moved and first[-1][1] == moved[0][0]:
        return (*first[:-1], (first[-1][0], moved[0][1]), *moved[1:])
    return first + moved


def _begin(span: tuple[int, int]) -> int:
    return span[0]


def _end(span: tuple[int, int]) -> int:
    return span[1]
