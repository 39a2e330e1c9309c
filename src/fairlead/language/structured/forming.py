"""From the form of an answer to its grammar. Pure: `GrammarTrials.call` calls this in another process."""

from typing import NamedTuple

from fairlead.base.wire_formats.pattern import SpecialTokens
from fairlead.base.wire_formats.wire_format import WireFormat
from fairlead.language.structured.grammar import ReasoningState
from fairlead.language.structured.request import AnswerPart, AnswerSpec, FaultyRequest


class Formed(NamedTuple):
    """A form of an answer, as it is followed.

    spec: The form. Tools are relaxed if their schemas cannot be followed.
    grammar: The grammar; None: the answer may be any text, or there is a fault.
    field: The field of the body that the grammar, or the fault, is from.
    fault: Why the request is refused; None: it is not.
    """

    spec: AnswerSpec
    grammar: str | None
    field: str
    fault: str | None = None


def field_of(spec: AnswerSpec) -> str:
    """Return the field of the body that the grammar is from."""
    return "tools" if spec.tools else spec.answer_field


def form_answer(
    spec: AnswerSpec, wire_format: WireFormat, special: SpecialTokens | None, reasoning: ReasoningState
) -> Formed:
    """Return the form that is possible, and its grammar. Tools are relaxed that the format cannot have."""
    try:
        spec = spec.check()
        try:
            grammar = spec.grammar(wire_format, special, reasoning)
        except FaultyRequest as fault:
            spec = spec.fit(wire_format, special)
            try:
                grammar = spec.grammar(wire_format, special, reasoning)
            except FaultyRequest:
                spec = spec.free_arguments(fault.reason)
                grammar = spec.grammar(wire_format, special, reasoning)
    except FaultyRequest as fault:
        return Formed(spec, None, fault.field, fault.reason)
    return Formed(spec, grammar, field_of(spec))


def divide_answer(
    spec: AnswerSpec, wire_format: WireFormat, special: SpecialTokens | None
) -> tuple[AnswerSpec, tuple[AnswerPart, ...]]:
    """Return the form without the tools that the format cannot have, and the grammars of its parts."""
    if spec.tools:
        spec = spec.fit(wire_format, special)
    return spec, tuple(spec.parts(wire_format, special))
