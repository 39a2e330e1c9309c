"""The content of tool calls, parsed while it arrives: one parser for each syntax."""

import json
from typing import Any, NamedTuple, Protocol

from fairlead.base.wire_formats.pattern import Elements, PatternGroup
from fairlead.base.wire_formats.wire_format import CallSyntax
from fairlead.language.structured.dialect_parser import DialectArguments
from fairlead.language.structured.json_stream import BLANK, ListReader, Member, ObjectReader, ValueEnd
from fairlead.language.structured.mark import Mark
from fairlead.language.structured.parsed import Call, Parsed, escaped
from fairlead.language.structured.schema import properties_of
from fairlead.language.structured.tag_values import TagValue, tag_value

# As Python writes them; templates that convert values with `string` show them to models so.
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


_ARGUMENT_KEYS = frozenset({"arguments", "parameters"})


class CallParser(Protocol):
    """Parses what is between the marks of a call, or of a list of calls."""

    def feed(self, text: str, *, is_end: bool) -> Parsed:
        """Return what `text` adds. `is_end`: there is no more text."""


def call_parser(syntax: CallSyntax, name: str, schema: Any) -> CallParser:
    """Return the parser of a call, or of several.

    `name`: the name in the opening mark, if it has one. `schema` is that of the arguments, if it is known.
    """
    if syntax.content == "xml-inline":
        return _TaggedArguments(name, syntax.tag, schema)
    if syntax.is_dialect:
        return DialectArguments(name, syntax.json)
    if syntax.name is None:
        return _Arguments(name)
    keys = _Keys(syntax.name[-1], syntax.arguments[-1])
    return _Objects(keys) if syntax.in_list else _Object(keys)


class _Keys(NamedTuple):
    """The keys of a call's members."""

    name: str
    arguments: str


class _Arguments:
    """Arguments as JSON; the mark has the name."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name
        self._value = ValueEnd()

    def feed(self, text: str, *, is_end: bool) -> Parsed:
        del is_end
        name, self._name = self._name, None
        if name is not None:
            text = text.lstrip(BLANK)
            if not text:
                self._name = name
                return Parsed()
            if text[0] != "{":
                return Parsed(rest=text, is_faulty=True)
        end = self._value.feed(text)
        return Parsed([Call(name, text[:end])], None if end is None else text[end:])


class _CallMembers:
    """The name and the arguments among the members of an object, in either order.

    Models mix up the two common keys of arguments; the first of them counts.
    """

    def __init__(self, keys: _Keys) -> None:
        self._keys = keys
        self._argument_keys = _ARGUMENT_KEYS | {keys.arguments}
        self._written_name: list[str] = []
        self._early_arguments: list[str] = []
        self._arguments_key: str | None = None  # the one that is used
        self._value: list[str] | None = None  # arguments that are not written as an object, so far
        self.has_name = self.is_faulty = False

    def add(self, members: list[Member], *, is_last: bool) -> list[Call]:
        calls = []
        for member in members:
            if member.key == self._keys.name and not self.has_name:
                self._written_name.append(member.text)
                self.is_faulty |= not self._written_name[0].startswith('"')
                if member.is_last:
                    name = _decoded("".join(self._written_name))
                    self.has_name = isinstance(name, str)
                    self.is_faulty |= not self.has_name
                    calls.append(Call(str(name), "".join(self._early_arguments)))
            elif member.key in self._argument_keys and self._arguments_key in (None, member.key):
                text = self._arguments_of(member)
                if self.has_name:
                    calls.append(Call(arguments=text))
                else:
                    self._early_arguments.append(text)
        if is_last:
            self.is_faulty |= not self.has_name
            if self._arguments_key is None:
                calls.append(Call(arguments="{}"))
        return [] if self.is_faulty else calls

    @property
    def unfinished(self) -> list[Call]:
        """What was read of arguments that are not returned in pieces."""
        return [Call(arguments="".join(self._value))] if self._value and self.has_name else []

    def _arguments_of(self, member: Member) -> str:
        """Return what is known now of the arguments: of an object at once, of any other value at its end."""
        if self._arguments_key is None:
            self._arguments_key = member.key
            if not member.text.startswith("{"):
                self._value = []
        if self._value is None:
            return member.text
        self._value.append(member.text)
        if not member.is_last:
            return ""
        written, self._value = "".join(self._value), None
        return _object_of(written)


class _Object:
    """A call as one object."""

    def __init__(self, keys: _Keys) -> None:
        self._object = ObjectReader()
        self._members = _CallMembers(keys)

    def feed(self, text: str, *, is_end: bool) -> Parsed:
        members, end = self._object.feed(text)
        is_faulty = self._object.is_faulty
        calls = self._members.add(members, is_last=end is not None and not is_faulty)
        if is_end and end is None:
            calls += self._members.unfinished
        if self._members.is_faulty:
            return Parsed(rest=text if end is None else text[end:], is_faulty=True)
        return Parsed(calls, None if end is None else text[end:], is_faulty)


class _Objects:
    """Calls as a list of objects."""

    def __init__(self, keys: _Keys) -> None:
        self._keys = keys
        self._list = ListReader()
        self._members = _CallMembers(keys)

    def feed(self, text: str, *, is_end: bool) -> Parsed:
        calls: list[Call] = []
        objects, end = self._list.feed(text)
        is_faulty = self._list.is_faulty
        for members, is_last in objects:
            calls += self._members.add(members, is_last=is_last)
            is_faulty |= self._members.is_faulty
            if is_last:
                self._members = _CallMembers(self._keys)
        if is_faulty and end is None:
            end = len(text)
        if is_end and end is None:
            calls += self._members.unfinished
        return Parsed(calls, None if end is None else text[end:], is_faulty)


class _TaggedArguments:
    """Each argument in a tag of its own. Values are text, or JSON where the schema allows no string."""

    def __init__(self, name: str, tag: Elements, schema: Any) -> None:
        self._name: str | None = name
        at = next(
            index for index, one in enumerate(tag) if isinstance(one, PatternGroup) and one.name == "value"
        )
        self._head, self._tail = Mark(tag[:at]), Mark(tag[at + 1 :])
        self._schema = schema
        self._text = ""
        self._kind: TagValue | None = None  # of the current value; None between values
        self._value: list[str] = []  # what was read of a value that is not returned in pieces
        self._count = 0

    def feed(self, text: str, *, is_end: bool) -> Parsed:
        self._text += text
        calls = [] if self._name is None else [Call(self._name)]
        self._name = None
        while True:
            if self._kind is None:
                self._text = self._text.lstrip(BLANK)
                is_possible, head = self._head.match(self._text, is_end=is_end)
                if not is_possible:
                    calls.append(Call(arguments="}" if self._count else "{}"))
                    return Parsed(calls, self._text)
                if head is None:
                    return Parsed(calls)
                calls.append(Call(arguments=self._begin(head["key"].strip())))
                self._text = self._text[head.end() :]
            if not self._read_value(calls, is_end=is_end):
                return Parsed(calls)

    def _begin(self, key: str) -> str:
        """Return the JSON before the value of `key`."""
        try:
            self._kind = tag_value(properties_of(self._schema, self._schema).get(key, True), self._schema)
        except ValueError:
            self._kind = TagValue()  # a schema that was not checked, as it is not strict
        self._value.clear()
        self._count += 1
        opening = "{" if self._count == 1 else ", "
        return f"{opening}{json.dumps(key, ensure_ascii=False)}: " + ('"' if self._kind.is_text else "")

    def _read_value(self, calls: list[Call], *, is_end: bool) -> bool:
        """Read more of the current value; return whether its end was found."""
        assert self._kind is not None
        at, tail = self._tail.find(self._text, is_end=is_end)
        piece = self._text[:at]
        self._text = self._text[at if tail is None else tail.end() :]
        if not self._kind.is_text:
            self._value.append(piece)
        elif piece:
            calls.append(Call(arguments=escaped(piece)))
        if tail is None:
            return False
        calls.append(
            Call(arguments='"' if self._kind.is_text else _json_of("".join(self._value), self._kind))
        )
        self._kind = None
        return True


def _decoded(written: str) -> Any:
    try:
        return json.loads(written)
    except (ValueError, RecursionError):
        return None


def _object_of(written: str) -> str:
    """Return arguments that were not written as an object: empty ones, or an object as JSON in a string."""
    value = _decoded(written)
    if value is None or value == "":
        return "{}"
    return value if isinstance(value, str) and isinstance(_decoded(value), dict) else written


def _json_of(text: str, kind: TagValue) -> str:
    """Return a value as JSON; as a string if it is not JSON, or if its schema is that of a string."""
    word = _PYTHON_WORDS.get(text.strip(), text.strip())
    try:
        value = json.loads(word)
    except (ValueError, RecursionError):
        return json.dumps(text.strip(), ensure_ascii=False)
    return word if kind.is_other(text, value) else json.dumps(text, ensure_ascii=False)
