"""The requested form of an answer, independent of dialects, and the grammar that is made of it.

The arguments of every tool follow its schema. If that is not possible, the request is refused for a tool that
is strict. Any other tool is relaxed: its arguments follow what is left of its schema, or are any object.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from fairlead.base.wire_formats.pattern import SpecialTokens
from fairlead.base.wire_formats.wire_format import WireFormat
from fairlead.language.structured.drafts import modern
from fairlead.language.structured.grammar import (
    PLAIN,
    Body,
    Calls,
    ChoiceAnswer,
    JsonAnswer,
    LarkAnswer,
    ReasoningState,
    RegexAnswer,
    ToolFault,
    ToolGrammar,
    answer_grammar,
    tool_faults,
)
from fairlead.language.structured.json_grammar import NoValue, left_parts
from fairlead.language.structured.lark import WorkLeft
from fairlead.language.structured.relaxing import relax_schema, shape_of
from fairlead.language.structured.schema import SchemaFault, check_schema

MAX_GRAMMAR_BYTES = 1024 * 1024
AnyAnswer = JsonAnswer | RegexAnswer | ChoiceAnswer | LarkAnswer


class FaultyRequest(ValueError):
    """A fault of what was requested. `field` is the path of the faulty field in the request's body."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


class Relaxation(msgspec.Struct, frozen=True):
    """What arguments follow instead of their schema.

    `schema`: of which unsupported keywords are ignored; None: any object.
    `reason`: why, with the path in the body.
    """

    schema: Mapping[str, Any] | None
    reason: str


class ToolSpec(msgspec.Struct, frozen=True):
    """A function that the model may call.

    `parameters`: the schema of its arguments; None: any object.
    `is_strict`: a request whose schema cannot be followed is refused.
    `field`: where the schema is in the body.
    `relaxed`: what its arguments follow instead; None: the schema.
    """

    name: str
    parameters: Mapping[str, Any] | None
    is_strict: bool
    field: str
    relaxed: Relaxation | None = None

    @property
    def may_be_relaxed(self) -> bool:
        """Whether it has a schema, which it need not follow."""
        has_schema = self.parameters is not None if self.relaxed is None else self.relaxed.schema is not None
        return has_schema and not self.is_strict

    @property
    def grammar(self) -> ToolGrammar:
        """The function with what its arguments follow."""
        if self.relaxed is None:
            return ToolGrammar(self.name, self.parameters)
        return ToolGrammar(self.name, self.relaxed.schema, is_lenient=True)

    @property
    def warning(self) -> str:
        """What a client should know of how its arguments are relaxed; empty if they are not."""
        if self.relaxed is None:
            return ""
        rest = "any object is allowed" if self.relaxed.schema is None else "the rest of the schema holds"
        return f"{self.relaxed.reason} ({rest})"

    def check(self, left: int, *, lenient: bool) -> "tuple[ToolSpec, int]":
        """Return it, relaxed if its schema is faulty, and how many bytes are left for others.

        `left`: how many bytes its schema may have. `lenient`: unsupported keywords are ignored anyway. Raises
        `FaultyRequest` if it is strict.
        """
        if self.parameters is None or self.relaxed is not None:
            return self, left
        try:
            return self, _checked(self.parameters, self.field, left, lenient=lenient)
        except FaultyRequest as fault:
            if self.is_strict:
                raise
            schema = None if isinstance(fault, _TooLarge) else relax_schema(self.parameters)
            return self.follow(schema, fault.reason, fault.field), left

    def relax(self, reason: str) -> "ToolSpec":
        """Return it with what is left of its schema, or with nothing of it if it follows no more already."""
        followed = self.grammar.parameters
        shape = shape_of(self.parameters)
        return self.follow(None if shape == followed else shape, reason)

    def follow(self, schema: Mapping[str, Any] | None, reason: str, field: str | None = None) -> "ToolSpec":
        """Return it with another schema of its arguments; None: any object. The first reason is kept."""
        known = f"{field or self.field}: {reason}" if self.relaxed is None else self.relaxed.reason
        return msgspec.structs.replace(self, relaxed=Relaxation(schema, known))


class AnswerPart(NamedTuple):
    """The grammar of a part of an answer: of its text, or of the calls of one function.

    `tool`: the function's name, if it may be relaxed. `field`: where the part is in the body.
    """

    tool: str | None
    field: str
    grammar: str


class AnswerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The form of an answer.

    tools: the functions that may be called.
    choice: "required": one must be called.
    named: the only function that may and must be called.
    parallel: whether there may be several calls.
    answer: the form of the text; None: any.
    answer_field: where that is in the body, for errors.
    is_lenient: whether keywords of schemas that are not supported are ignored.
    """

    tools: tuple[ToolSpec, ...] = ()
    choice: Literal["auto", "required"] = "auto"
    named: str | None = None
    parallel: bool = True
    answer: AnyAnswer | None = None
    answer_field: str = "response_format"
    is_lenient: bool = False

    def check(self) -> "AnswerSpec":
        """Return this form, with the tools relaxed whose schemas are faulty, not supported, or too large.

        Raises `FaultyRequest` for the first such schema of the text or a strict tool.
        """
        left = MAX_GRAMMAR_BYTES
        if isinstance(self.answer, JsonAnswer):
            left = _checked(self.answer.schema, self.answer_field, left, lenient=self.is_lenient)
        tools = []
        for tool in self.tools:
            checked, left = tool.check(left, lenient=self.is_lenient)
            tools.append(checked)
        return msgspec.structs.replace(self, tools=tuple(tools))

    def fit(self, wire_format: WireFormat, special: SpecialTokens | None = None) -> "AnswerSpec":
        """Return this form, with the tools relaxed whose schemas a wire format cannot have."""
        fitted = self
        while True:
            tools = [tool.grammar for tool in fitted.tools if tool.may_be_relaxed]
            faults = tool_faults(tools, wire_format, special, lenient=self.is_lenient)
            if not faults:
                return fitted
            fitted = fitted.relax(faults)

    def relax(self, faults: Mapping[str, str]) -> "AnswerSpec":
        """Return this form, with the tools of these names relaxed; `faults` has the reason for each."""
        tools = [
            tool.relax(faults[tool.name]) if tool.name in faults and tool.may_be_relaxed else tool
            for tool in self.tools
        ]
        return msgspec.structs.replace(self, tools=tuple(tools))

    def free_arguments(self, reason: str) -> "AnswerSpec":
        """Return this form with any object as the arguments of every tool that is not strict."""
        tools = [tool.follow(None, reason) if tool.may_be_relaxed else tool for tool in self.tools]
        return msgspec.structs.replace(self, tools=tuple(tools))

    @property
    def warnings(self) -> list[str]:
        """What a client should know of the tools that are relaxed."""
        return [tool.warning for tool in self._called if tool.warning]

    def grammar(
        self,
        wire_format: WireFormat = PLAIN,
        special: SpecialTokens | None = None,
        reasoning: ReasoningState = "closed",
    ) -> str | None:
        """Return the grammar of the answer; None if it may be any text. Raises `FaultyRequest`."""
        body = self._body()
        if body is None:
            return None
        try:
            grammar = answer_grammar(body, wire_format, special, reasoning, lenient=self.is_lenient)
        except ValueError as error:
            raise self._fault(error) from error
        if len(grammar) > MAX_GRAMMAR_BYTES:
            field = "tools" if self.tools else self.answer_field
            raise FaultyRequest(field, f"the schemas have more than {MAX_GRAMMAR_BYTES} bytes")
        return grammar

    def _fault(self, error: ValueError) -> FaultyRequest:
        """Return an error of the grammar with the field that it concerns."""
        match error:
            case ToolFault():
                fields = [tool.field for tool in self.tools if tool.name == error.name]
                return FaultyRequest(_at(fields[0], error.path), error.reason)
            case NoValue():
                return FaultyRequest(_at(self.answer_field, error.path), error.reason)
        return FaultyRequest("tools" if self.tools else self.answer_field, str(error))

    def parts(
        self, wire_format: WireFormat = PLAIN, special: SpecialTokens | None = None
    ) -> Iterator[AnswerPart]:
        """Yield the parts whose grammars may be at fault; those come first that cannot be relaxed."""
        work = WorkLeft()
        if self.answer is not None and not self._is_required:
            if isinstance(self.answer, JsonAnswer):
                yield from self._inner_parts(self.answer.schema, self.answer_field, work)
            grammar = answer_grammar(self.answer, lenient=self.is_lenient, work=work)
            yield AnswerPart(None, self.answer_field, grammar)
        for tool in sorted(self._called, key=lambda one: one.may_be_relaxed):
            if tool.grammar.parameters is not None:
                if not tool.may_be_relaxed:
                    yield from self._inner_parts(tool.grammar.parameters, tool.field, work)
                calls = Calls([tool.grammar], is_required=True)
                grammar = answer_grammar(calls, wire_format, special, lenient=self.is_lenient, work=work)
                yield AnswerPart(tool.name if tool.may_be_relaxed else None, tool.field, grammar)

    def _inner_parts(self, schema: Any, field: str, work: WorkLeft) -> Iterator[AnswerPart]:
        """Yield the parts of a schema of which one may be refused by itself."""
        for path, part in left_parts(modern(schema), work):
            if path:
                grammar = answer_grammar(JsonAnswer(part), lenient=self.is_lenient, work=work)
                yield AnswerPart(None, _at(field, path), grammar)

    @property
    def _called(self) -> Sequence[ToolSpec]:
        """The tools that the model may call."""
        return [tool for tool in self.tools if self.named in (None, tool.name)]

    @property
    def _is_required(self) -> bool:
        """Whether the answer has nothing but calls."""
        return bool(self.tools) and (self.choice == "required" or self.named is not None)

    def _body(self) -> Body | None:
        if not self.tools:
            return self.answer
        tools = [tool.grammar for tool in self._called]
        parallel = self.parallel and self.named is None
        otherwise = None if self._is_required else self.answer
        return Calls(tools, self._is_required, parallel, otherwise)


class _TooLarge(FaultyRequest):
    """A schema with which the schemas of a request are too large."""


def _checked(schema: Any, field: str, left: int, *, lenient: bool) -> int:
    """Return how many bytes are left after a schema. Raises `FaultyRequest`."""
    try:
        check_schema(schema, lenient=lenient)
    except SchemaFault as fault:
        raise FaultyRequest(_at(field, fault.path), fault.reason) from fault
    size = _least_size(schema, left)
    if size > left:
        raise _TooLarge(field, f"the schemas have more than {MAX_GRAMMAR_BYTES} bytes")
    return left - size


def _least_size(value: Any, most: int) -> int:
    """Return a lower bound of the bytes of a JSON value, at least `most` + 1 if it has more than that.

    Encoding 16 MB only to measure it would hold the GIL for tenths of a second.
    """
    size = 0
    pending = [value]
    while pending and size <= most:
        one = pending.pop()
        size += 1
        if isinstance(one, str):
            size += len(one)
        elif isinstance(one, Mapping):
            pending += one
            pending += one.values()
        elif isinstance(one, list):
            pending += one
    return size


def _at(field: str, path: str) -> str:
    return f"{field}.{path}" if path else field
