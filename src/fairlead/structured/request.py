"""The requested form of an answer: in the terms of no dialect, and as the grammar of the answer."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec

from fairlead.structured.grammar import (
    PLAIN,
    Body,
    Calls,
    ChoiceAnswer,
    JsonAnswer,
    LarkAnswer,
    ReasoningState,
    RegexAnswer,
    ToolGrammar,
    answer_grammar,
)
from fairlead.structured.pattern import SpecialTokens
from fairlead.structured.schema import SchemaFault, check_schema
from fairlead.structured.wire_format import WireFormat

MAX_GRAMMAR_BYTES = 1024 * 1024
AnyAnswer = JsonAnswer | RegexAnswer | ChoiceAnswer | LarkAnswer


class FaultyRequest(ValueError):
    """A fault of what was requested. `field` is the path of the faulty field in the request's body."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


class ToolSpec(msgspec.Struct, frozen=True):
    """A function that the model may call. `parameters`: its arguments' schema, at `field` of the body."""

    name: str
    parameters: Mapping[str, Any] | None
    is_strict: bool
    field: str


class AnswerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The form of an answer.

    `choice`: "auto", "required", or the name of the only function to call, with `is_named`. `parallel`: there
    may be several calls. `answer`: the form of the text, at `answer_field` of the body. With `is_lenient`,
    keywords of schemas that are not supported are ignored.
    """

    tools: tuple[ToolSpec, ...] = ()
    choice: Literal["auto", "required"] = "auto"
    named: str | None = None
    parallel: bool = True
    answer: AnyAnswer | None = None
    answer_field: str = "response_format"
    is_lenient: bool = False

    def check(self) -> None:
        """Raise `FaultyRequest` for the first schema that is faulty, not supported, or too large."""
        left = MAX_GRAMMAR_BYTES
        for schema, field in self._schemas():
            _check(schema, field, lenient=self.is_lenient)
            left -= _least_size(schema, left)
            if left < 0:
                raise FaultyRequest(field, f"the schemas have more than {MAX_GRAMMAR_BYTES} bytes")

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
            raise FaultyRequest(
                "tools" if isinstance(body, Calls) else self.answer_field, str(error)
            ) from error
        if len(grammar) > MAX_GRAMMAR_BYTES:
            field = "tools" if self.tools else self.answer_field
            raise FaultyRequest(field, f"the schemas have more than {MAX_GRAMMAR_BYTES} bytes")
        return grammar

    def schema_grammars(self) -> Iterator[tuple[str, str]]:
        """Yield the field of each schema with a grammar of that schema alone."""
        for schema, field in self._schemas():
            yield field, answer_grammar(JsonAnswer(schema), lenient=self.is_lenient)

    def _schemas(self) -> list[tuple[Mapping[str, Any] | bool, str]]:
        """Return the schemas that the answer must follow, with their fields."""
        schemas = [(self.answer.schema, self.answer_field)] if isinstance(self.answer, JsonAnswer) else []
        schemas.extend(
            (tool.parameters, tool.field)
            for tool in self.tools
            if tool.is_strict and tool.parameters is not None
        )
        return schemas

    def _body(self) -> Body | None:
        if not self.tools:
            return self.answer
        tools = [
            ToolGrammar(tool.name, tool.parameters if tool.is_strict else None)
            for tool in self.tools
            if self.named in (None, tool.name)
        ]
        is_required = self.choice == "required" or self.named is not None
        parallel = self.parallel and self.named is None
        return Calls(tools, is_required, parallel, None if is_required else self.answer)


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


def _check(schema: Any, field: str, *, lenient: bool) -> None:
    try:
        check_schema(schema, lenient=lenient)
    except SchemaFault as fault:
        raise FaultyRequest(f"{field}.{fault.path}" if fault.path else field, fault.reason) from fault
