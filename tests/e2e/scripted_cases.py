"""What a scripted model writes in each wire format, what it is asked for, and the answer that clients get."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from e2e.scripted_dialects import CALLS, END, LENGTH, STOP, Answer, Request, Tool
from fairlead.language.structured.grammar import ReasoningState
from fairlead.language.structured.parser import AnswerParser
from fairlead.language.structured.pieces import CallArguments, CallBegin, Content, Reasoning
from language.structured.rendering import (
    SINGLE,
    WIRE_FORMATS,
    Call,
    Vocabulary,
    dumped,
    written_calls,
    written_content,
    written_reasoning,
)

THOUGHT = "Hmm, 1 < 2;\n\nso é."
TEXT = 'Grüße, 日本 😀: 1 < 2 and {x} "y".'
CALL: Call = ("get_weather", {"city": 'Köln "x" {', "n": 3})
SECOND: Call = ("get_time", {"zone": "日本 <b>\n😀", "tags": ["a", "STOP"], "deep": {"k": None, "f": 1.5}})
TOOLS = (
    Tool(
        "get_weather",
        {
            "type": "object",
            "properties": {"city": {"type": "string"}, "n": {"type": "integer"}},
            "required": ["city", "n"],
            "additionalProperties": False,
        },
    ),
    Tool(
        "get_time",
        {
            "type": "object",
            "properties": {
                "zone": {"type": "string"},
                "tags": {"type": "array", "items": {"type": "string"}},
                "deep": {
                    "type": "object",
                    "properties": {"k": {"type": ["string", "null"]}, "f": {"type": "number"}},
                    "required": ["k", "f"],
                },
            },
            "required": ["zone", "tags", "deep"],
        },
    ),
)
STRICT = tuple(tool._replace(is_strict=True) for tool in TOOLS)
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "n": {"type": "integer"}, "tags": {"type": "array"}},
    "required": ["city", "n", "tags"],
}
FORMED = dumped({"city": "Köln 😀", "n": -5, "tags": ["a", {"b": None}]})


class Case(NamedTuple):
    """The texts that a model writes, each followed by the token that ends an answer; and what is asked for.

    `answer` None: the masks of its grammar change the text, and only what holds for every answer is known.
    """

    name: str
    texts: tuple[str, ...]
    request: Request
    answer: Answer | None


class Writer:
    """Writes answers in one wire format, after a prompt that leaves the reasoning in one state."""

    def __init__(self, name: str, state: ReasoningState) -> None:
        self.name = name
        self.state = state

    def thought(self, reasoning: str) -> str:
        """Return reasoning, without the mark that the prompt has written already; none if it is closed."""
        if self.state == "closed":
            return ""
        if self.state != "opened":
            return written_reasoning(self.name, reasoning)
        before, after = written_reasoning(self.name, "THOUGHT").split("THOUGHT")
        del before
        return reasoning + after

    def answer(self, reasoning: str = "", content: str = "", calls: Sequence[Call] = ()) -> str:
        """Return an answer as the model writes it."""
        text = written_content(self.name, content)
        if self.name == "harmony" and content and not calls:
            text = f"<|channel|>final<|message|>{content}"
        return self.thought(reasoning) + text + written_calls(self.name, calls)

    def expected(
        self, reasoning: str = "", content: str = "", calls: Sequence[Call] = (), end: str = END
    ) -> Answer:
        """Return the parts of that answer."""
        is_written = WIRE_FORMATS[self.name].reasoning is not None and self.state != "closed"
        shown = reasoning if is_written else ""
        written = tuple((name, dumped(arguments)) for name, arguments in calls)
        return Answer(shown, content, written, CALLS if calls and end == END else end)


def cases(name: str, state: ReasoningState, made: Vocabulary) -> Iterator[Case]:
    """Yield the cases of a wire format."""
    writer = Writer(name, state)
    parts: dict[str, tuple[str, str, list[Call]]] = {
        "text": ("", TEXT, []),
        "reasoning and text": (THOUGHT, TEXT, []),
        "call": ("", "", [CALL]),
        "two calls": ("", "", [CALL, SECOND]),
        "reasoning, text and call": (THOUGHT, TEXT, [SECOND]),
    }
    if name in SINGLE:
        del parts["two calls"]
    for kind, (reasoning, content, calls) in parts.items():
        texts = (writer.answer(reasoning, content, calls),)
        expected = writer.expected(reasoning, content, calls)
        yield Case(kind, texts, Request(TOOLS), expected)
        if calls:
            yield Case(f"{kind}, strict", texts, Request(STRICT), expected)
        else:
            yield Case(f"{kind}, without tools", texts, Request(), expected)
        if calls and not content:
            required = Request(STRICT, is_required=True)
            yield Case(f"{kind}, required", texts, required, expected)
    yield from _ends(writer, made)
    yield from _forms(writer)
    yield from _damaged(writer)


def _ends(writer: Writer, made: Vocabulary) -> Iterator[Case]:
    before, after = "one 日", "本 two"
    stopped = (writer.answer(THOUGHT, f"{before}STOP{after}"),)
    stop = Request(stop=("STOP", "never"))
    yield Case("stop string", stopped, stop, writer.expected(THOUGHT, before, end=STOP))
    inside = writer.answer("a STOP b", "one STO two", [SECOND])
    expected = writer.expected("a STOP b", "one STO two", [SECOND])
    yield Case("stop string outside of the text", (inside,), Request(TOOLS, stop=("STOP",)), expected)
    ended = (writer.answer(THOUGHT, before), f"{after} and more")
    yield Case("end token", ended, Request(), writer.expected(THOUGHT, before))
    for name, text, request in (
        ("limit in a text", writer.answer("", TEXT), Request()),
        ("limit in a call", writer.answer("", "", [CALL]), Request(TOOLS)),
        ("limit in the reasoning", writer.answer(THOUGHT, TEXT), Request()),
    ):
        whole = made.ids(text)
        ids = whole[: len(whole) // 4 if "reasoning" in name else 3 * len(whole) // 4]
        cut = made.tokenizer.decode(ids, skip_special_tokens=False)
        limited = request._replace(max_tokens=len(ids))
        yield Case(name, (text,), limited, parsed(writer, cut, request)._replace(end=LENGTH))


def _forms(writer: Writer) -> Iterator[Case]:
    formed = Request(schema=SCHEMA)
    expected = writer.expected(THOUGHT, FORMED)
    yield Case("schema", (writer.answer(THOUGHT, FORMED),), formed, expected)
    # The masks of this schema leave no choice, whatever the model prefers.
    only = Request(schema={"enum": ["only"]})
    forced = writer.expected(THOUGHT, '"only"')
    yield Case("form that the model does not write", (writer.answer(THOUGHT, "no"),), only, forced)


def _damaged(writer: Writer) -> Iterator[Case]:
    """Yield calls with a part missing: the masks keep the model from writing them."""
    call = writer.answer("", "", [CALL])
    for number, (begin, end) in enumerate(((1, 2), (2, 4))):
        text = call[: begin * len(call) // 4] + call[end * len(call) // 4 :]
        yield Case(f"damaged call {number}", (text,), Request(STRICT, max_tokens=120), None)


def parsed(writer: Writer, text: str, request: Request) -> Answer:
    """Return the parts of a text that is parsed at once."""
    tools = {tool.name: tool.parameters for tool in request.tools} if request.tools else None
    parser = AnswerParser(WIRE_FORMATS[writer.name], tools=tools, in_reasoning=writer.state == "opened")
    reasoning = content = ""
    calls: list[tuple[str, str]] = []
    for piece in [*parser.push(text), *parser.finish()]:
        match piece:
            case Reasoning(more):
                reasoning += more
            case Content(more):
                content += more
            case CallBegin(_, name):
                calls.append((name, ""))
            case CallArguments(_, more):
                calls[-1] = (calls[-1][0], calls[-1][1] + more)
    return Answer(reasoning, content, tuple(calls), END)
