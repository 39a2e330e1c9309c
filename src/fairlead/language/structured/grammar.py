"""The grammar of an answer in llguidance's dialect of Lark, from the first token to the last.

It begins where the prompt ends: with the reasoning if the prompt has opened it, or with the answer if the
prompt has closed it. (https://github.com/guidance-ai/llguidance, docs/syntax.md)
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from fairlead.base.wire_formats import pattern
from fairlead.base.wire_formats.pattern import SpecialTokens
from fairlead.base.wire_formats.wire_format import Marks, WireFormat
from fairlead.language.structured.call_grammar import CallGrammar
from fairlead.language.structured.drafts import modern
from fairlead.language.structured.json_grammar import NoValue, add_json
from fairlead.language.structured.lark import BLANKS, TEXT, Rules, WorkLeft

MAX_RULES = 1000  # of a client's grammar; llguidance recurses along a chain of them
ReasoningState = Literal["not opened", "opened", "closed"]
"""The state of the reasoning at the end of the prompt."""


class ToolGrammar(NamedTuple):
    """A function that may be called.

    `parameters`: the schema of its arguments; None: any JSON object. `is_lenient`: its keywords that are not
    supported are ignored.
    """

    name: str
    parameters: Mapping[str, Any] | bool | None = None
    is_lenient: bool = False


class ToolFault(ValueError):
    """A fault of the schema of a function's arguments. `path` is where, as in `properties.a`."""

    def __init__(self, name: str, fault: ValueError) -> None:
        super().__init__(f"the function {name}: {fault}")
        self.name = name
        self.path, self.reason = (
            (fault.path, fault.reason) if isinstance(fault, NoValue) else ("", str(fault))
        )


class JsonAnswer(NamedTuple):
    """An answer that is JSON of this schema."""

    schema: Mapping[str, Any] | bool


class RegexAnswer(NamedTuple):
    """An answer that matches a regular expression as a whole."""

    regex: str


class ChoiceAnswer(NamedTuple):
    """An answer that is one of these texts."""

    choices: Sequence[str]


class LarkAnswer(NamedTuple):
    """An answer of a grammar in llguidance's Lark."""

    lark: str


class Calls(NamedTuple):
    """An answer with calls.

    tools: the functions that may be called.
    is_required: whether it has nothing else.
    parallel: whether it may have several.
    otherwise: what an answer without a call must be, if calls are not required; None: any text.
    """

    tools: Sequence[ToolGrammar]
    is_required: bool
    parallel: bool = True
    otherwise: "JsonAnswer | RegexAnswer | ChoiceAnswer | LarkAnswer | None" = None


Body = Calls | JsonAnswer | RegexAnswer | ChoiceAnswer | LarkAnswer
PLAIN = WireFormat("plain")
"""Of a text without marks: a completion."""

# Where only one text may follow, llguidance would force its tokens, from a tokenizer that we do not give it,
# and first compute all of that text: 7 s for a{1000000}. So any tokens that spell the text are allowed.
_OPTIONS = '%llguidance {"no_forcing": true}'


def answer_grammar(
    body: Body,
    wire_format: WireFormat = PLAIN,
    special: SpecialTokens | None = None,
    reasoning: ReasoningState = "closed",
    *,
    lenient: bool = False,
    work: WorkLeft | None = None,
) -> str:
    """Return the grammar of an answer, for llguidance's `LLMatcher`.

    body: the form of the answer.
    wire_format: how the model writes it.
    special: the special tokens that its marks may be; None: marks are text.
    reasoning: whether reasoning comes first, and whether the prompt has opened it.
    lenient: whether keywords of schemas that llguidance does not support are ignored.
    work: how long writing it may take, if it shares that with others.

    Raises `ValueError` if answers in this wire format cannot be constrained so.
    """
    rules = Rules(special or {}, lenient=lenient, work=work)
    start = f"{_reasoning(rules, wire_format.reasoning, reasoning)} {_body(rules, body, wire_format)}"
    grammars = [{"name": "answer", "lark_grammar": f"{_OPTIONS}\nstart: {start}\n{rules}"}]
    own = body.otherwise if isinstance(body, Calls) else body
    if isinstance(own, LarkAnswer):
        grammars.append({"name": "own", "lark_grammar": own.lark})
    return json.dumps({"grammars": grammars})


def tool_faults(
    tools: Sequence[ToolGrammar],
    wire_format: WireFormat,
    special: SpecialTokens | None = None,
    *,
    lenient: bool = False,
) -> dict[str, str]:
    """Return why the arguments of functions cannot be constrained in a wire format, by their names.

    tools: the functions.
    wire_format: how the model writes calls.
    special: the special tokens that its marks may be; None: marks are text.
    lenient: as for `answer_grammar`.
    """
    faults: dict[str, str] = {}
    if wire_format.calls is None:
        return faults
    work = WorkLeft()
    for tool in tools:
        grammar = CallGrammar(Rules(special or {}, lenient=lenient, work=work), wire_format.calls)
        try:
            grammar.add(tool.name, modern(tool.parameters), is_lenient=tool.is_lenient)
        except ValueError as error:
            faults[tool.name] = str(error)
    return faults


def _reasoning(rules: Rules, marks: Marks | None, state: ReasoningState) -> str:
    if marks is None or state == "closed":
        return ""
    ends = pattern.texts(marks.close)
    if ends is None or len(ends) > 1:
        raise ValueError("this model's reasoning has no single text at its end")
    rules.add("thought", f"{rules.add_until('thought_text', ends[0])} {BLANKS}")
    if state == "opened":
        return "thought"
    rules.add("opened_thought", f"{rules.of(marks.open)} thought")
    return "opened_thought?"


def _body(rules: Rules, body: Body, wire_format: WireFormat) -> str:
    content = wire_format.content
    if isinstance(body, Calls):
        return _calls(rules, body, wire_format)
    match body:
        case JsonAnswer(schema):
            add_json(rules, "body", modern(schema))
        case RegexAnswer(regex):
            rules.add("body", pattern.regex_literal(regex))
        case ChoiceAnswer(choices):
            rules.add("body", " | ".join(map(pattern.plain, choices)))
        case LarkAnswer(lark):
            if lark.count(":") > MAX_RULES:
                raise ValueError(f"the grammar has more than {MAX_RULES} rules")
            rules.add("body", "@own")
    return "body" if content is None else f"{rules.of(content.open)} body"


def _calls(rules: Rules, calls: Calls, wire_format: WireFormat) -> str:
    if wire_format.calls is None:
        raise ValueError("this model has no syntax of tool calls")
    grammar = CallGrammar(rules, wire_format.calls)
    for tool in calls.tools:
        try:
            grammar.add(tool.name, modern(tool.parameters), is_lenient=tool.is_lenient)
        except ValueError as error:
            raise ToolFault(tool.name, error) from error
    if calls.is_required:
        return grammar.calls(parallel=calls.parallel)
    if calls.otherwise is not None:
        body = _body(rules, calls.otherwise, wire_format)
        return f"({grammar.calls(parallel=calls.parallel)} | {body})"
    content = wire_format.content
    if content is None:
        return grammar.calls_in_text(parallel=calls.parallel)
    ends = pattern.texts(content.close) or []
    texts = [rules.add_until(f"content_{number}", end) for number, end in enumerate(ends)]
    texts.append(rules.add("last_content", TEXT))
    rules.add("content", f"{rules.of(content.open)} ({' | '.join(texts)})")
    return f"content? ({grammar.calls(parallel=calls.parallel)})?"
