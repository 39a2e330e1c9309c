"""Whether each wire format writes, parses and allows the leaderboard's calls (`bfcl`), and how many of them.

    PYTHONPATH=tests python -m language.structured.bfcl_counts --out bench/results/bfcl.json

A call is written as a model writes it, with its arguments in the order of the schema, which is that of the
grammar. It must be parsed back however its text is cut, and the grammar of the offered tools must accept it,
with `strict` and without, where a call is required and where it is not.

What may be otherwise has a reason, and is counted by it: a ground truth that is not valid for its own schema,
and what a wire format cannot express.
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
from llguidance import LLMatcher

from fairlead.language.structured.compiler import LIMITS
from fairlead.language.structured.parser import AnswerParser
from fairlead.language.structured.pieces import CallArguments, CallBegin
from fairlead.language.structured.request import AnswerSpec, FaultyRequest, ToolSpec
from fairlead.language.structured.schema import properties_of
from language.structured import bfcl
from language.structured.bfcl import Call, Question
from language.structured.rendering import SINGLE, WIRE_FORMATS, vocabulary, written_calls

PIECES = range(1, 8)  # characters
EVERY_CUT = 20  # of so many questions, one is cut once at each place

INVALID = "the ground truth is not valid for its schema"
UNNAMED = "an argument that the schema does not name"
UNSUPPORTED = "a keyword that this syntax of calls does not support"
CONTRADICTORY = "an enum without any value of the schema's type, whose values this syntax of calls allows"


class Outcome(NamedTuple):
    """What came of the calls of a question in a wire format: `kind` and, if it is not as it should, `reason`.

    `reason` None: it is as it should. Empty: there is no reason for it, so it is a defect.
    """

    kind: str
    reason: str | None = None
    detail: str = ""


def outcomes(name: str, question: Question, *, every_cut: bool) -> Iterator[Outcome]:
    """Yield what comes of a question's calls in a wire format; of each alone where an answer has only one."""
    calls = [(tool, ordered(arguments, question.tools[tool])) for tool, arguments in question.calls]
    for group in [[call] for call in calls] if name in SINGLE else [calls] if calls else []:
        yield _parsed(name, question, group, every_cut=every_cut)
        for is_strict in (True, False):
            for choice in ("required", "auto"):
                yield _allowed(name, question, group, choice, is_strict=is_strict)


def ordered(value: Any, schema: Any) -> Any:
    """Return a value with the members of its objects in the order of the schema's properties."""
    schema = schema if isinstance(schema, dict) else {}
    match value:
        case dict():
            properties = properties_of(schema, schema)
            names = [name for name in properties if name in value]
            names += [name for name in value if name not in properties]
            others = schema.get("additionalProperties")
            return {name: ordered(value[name], properties.get(name, others)) for name in names}
        case list():
            return [ordered(one, schema.get("items")) for one in value]
    return value


def cuts(text: str, *, every_cut: bool) -> Iterator[list[str]]:
    """Yield the text as a whole, in pieces of each size, and with `every_cut` cut once at each place."""
    yield [text]
    for size in PIECES:
        yield [text[at : at + size] for at in range(0, len(text), size)]
    if every_cut:
        yield from ([text[:at], text[at:]] for at in range(1, len(text)))


def unusual(name: str, question: Question, calls: list[Call]) -> str:
    """Return why calls need not be parsed back or accepted; empty if they must be."""
    schemas = [question.tools[tool] for tool, _ in calls]
    for schema, (_, arguments) in zip(schemas, calls, strict=True):
        if not jsonschema.Draft202012Validator(schema).is_valid(arguments):
            return INVALID
    syntax = WIRE_FORMATS[name].calls
    is_json = syntax is not None and not syntax.is_dialect and not _has_tags(name)
    if not is_json and any(map(_has_unnamed, (arguments for _, arguments in calls), schemas)):
        return UNNAMED
    return ""


def _parsed(name: str, question: Question, calls: list[Call], *, every_cut: bool) -> Outcome:
    expected = _comparable(calls)
    for pieces in cuts(written_calls(name, calls), every_cut=every_cut):
        found = _parse(name, pieces, question.tools)
        if found != expected:
            return Outcome("parsed", unusual(name, question, calls), f"{pieces}: {found}")
    return Outcome("parsed")


def _parse(name: str, pieces: Iterable[str], tools: dict[str, Any]) -> str:
    """Return the calls of an answer, or what it has instead."""
    parser = AnswerParser(WIRE_FORMATS[name], tools=tools)
    written: list[list[str]] = []
    for piece in [*(found for one in pieces for found in parser.push(one)), *parser.finish()]:
        match piece:
            case CallBegin(_, tool):
                written.append([tool, ""])
            case CallArguments(number, text):
                written[number][1] += text
            case other:
                return repr(other)
    try:
        return _comparable([(tool, json.loads(arguments)) for tool, arguments in written])
    except ValueError:
        return repr(written)


def _comparable(calls: Sequence[Call]) -> str:
    """Return calls as text, so that 7 is not 7.0, and True is not 1."""
    return json.dumps(calls, sort_keys=True)


def _allowed(name: str, question: Question, calls: list[Call], choice: Any, *, is_strict: bool) -> Outcome:
    kind = f"accepted {'strict' if is_strict else 'not strict'}, {choice}"
    made = vocabulary(name)
    tools = tuple(
        ToolSpec(tool, schema, is_strict, f"tools[{at}]")
        for at, (tool, schema) in enumerate(question.tools.items())
    )
    spec = AnswerSpec(tools=tools, choice=choice)
    try:
        spec.check()
        grammar = spec.grammar(WIRE_FORMATS[name], made.special)
    except FaultyRequest as fault:
        return Outcome(kind, UNSUPPORTED, str(fault))
    assert grammar is not None
    matcher = LLMatcher(made.matching, grammar, log_level=0, limits=LIMITS)
    ids = made.ids(written_calls(name, calls))
    count = 0 if matcher.is_error() else matcher.try_consume_tokens(ids)
    is_accepted = count == len(ids) and matcher.is_accepting()
    reason = unusual(name, question, calls)
    if is_strict and is_accepted and reason == INVALID and not _has_tags(name):
        syntax = WIRE_FORMATS[name].calls
        if syntax is not None and syntax.is_dialect and any(map(_contradicts, question.tools.values())):
            return Outcome(kind, CONTRADICTORY)
        return Outcome(kind, "", f"{calls} is accepted, which {INVALID}")
    if is_accepted:
        return Outcome(kind)
    return Outcome(kind, reason, f"{matcher.get_error()} after {ids[:count]} of {calls}")


def _has_tags(name: str) -> bool:
    """Return whether arguments are written as texts, so that 5 is not different from "5"."""
    syntax = WIRE_FORMATS[name].calls
    return syntax is not None and syntax.content == "xml-inline"


def _has_unnamed(value: Any, schema: Any) -> bool:
    """Return whether an object in a value has a member that is not among the properties of its schema."""
    schema = schema if isinstance(schema, dict) else {}
    match value:
        case dict():
            properties = schema.get("properties")
            if not properties:
                return False
            return any(
                name not in properties or _has_unnamed(one, properties[name]) for name, one in value.items()
            )
        case list():
            return any(_has_unnamed(one, schema.get("items")) for one in value)
    return False


def _contradicts(schema: Any) -> bool:
    """Return whether a part of a schema has an enum of which no value has its type."""
    if not isinstance(schema, dict):
        return False
    if "enum" in schema and "type" in schema:
        typed = jsonschema.Draft202012Validator({"type": schema["type"]})
        if not any(map(typed.is_valid, schema["enum"])):
            return True
    return any(map(_contradicts, [*(schema.get("properties") or {}).values(), schema.get("items")]))


def counted(names: Iterable[str], questions: Sequence[Question]) -> tuple[dict[str, Any], list[str]]:
    """Return the counts of outcomes by wire format, kind and reason, and the defects."""
    counts: dict[str, dict[str, Counter[str]]] = {}
    defects: list[str] = []
    for name in names:
        counts[name] = {}
        for at, question in enumerate(questions):
            for outcome in outcomes(name, question, every_cut=at % EVERY_CUT == 0):
                reason = "as it should be" if outcome.reason is None else outcome.reason or "defects"
                counts[name].setdefault(outcome.kind, Counter())[reason] += 1
                if outcome.reason == "":
                    defects.append(f"{name}, {question.id}, {outcome.kind}: {outcome.detail}")
    return counts, defects


def main() -> int:
    """Count all questions; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="where the counts are written")
    arguments = parser.parse_args()
    questions = [*bfcl.questions()]
    counts, defects = counted(sorted(WIRE_FORMATS), questions)
    result = {
        "question": "whether each wire format writes, parses back and allows the calls of BFCL",
        "package": bfcl.PACKAGE,
        "questions": len(questions),
        "calls": sum(len(question.calls) for question in questions),
        "questions by wire format, outcome and reason": counts,
        "defects": defects,
    }
    text = json.dumps(result, indent=2, ensure_ascii=False) + "\n"
    if arguments.out is None:
        print(text)  # noqa: T201
    else:
        arguments.out.write_text(text, encoding="utf-8")
    return 1 if defects else 0


if __name__ == "__main__":
    raise SystemExit(main())
