"""Every wire format over HTTP, in every dialect, streamed and whole, in pieces of 1 to 7 tokens.

The parts of an answer are those that the model has written, and a stream adds up to the whole answer, however
many tokens come at once.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import h11
import jsonschema
import pytest
import trio

from e2e.scripted_cases import Case, Writer, cases
from e2e.scripted_dialects import DIALECTS, LENGTH, Answer, Dialect, Request, Tool
from e2e.scripted_model import SLOTS, Scripts, serving, write_folder
from fairlead.base.job import CallPiece
from fairlead.language.structured.forming import Formed
from fairlead.language.structured.mark import Mark
from language.structured import bfcl
from language.structured.bfcl_counts import ordered, unusual
from language.structured.families import FAMILIES, Family
from language.structured.rendering import SINGLE, WIRE_FORMATS, vocabulary

# A model of each wire format. The prompts of two of them open the reasoning.
SERVED = {
    name: FAMILIES[name]
    for name in (
        *("Qwen3", "Qwen3.5", "Llama 3", "Mistral v3", "Magistral", "Gemma 4", "DeepSeek R1"),
        *("DeepSeek V3.1", "GLM-4.5", "gpt-oss"),
    )
}
SERVED["no calls in its template"] = Family(
    "{% for message in messages %}{{ message.role + ': ' + message.content + '\\n' }}{% endfor %}assistant: ",
    "json",
)
PIECES = range(1, 8)
TIMEOUT_S = 240
EVERY = 30  # of so many questions of the leaderboard, one is asked
MOST_TOOLS = 3000  # characters of the tools' schemas, which fit the context


class Asked(NamedTuple):
    """A request, and how its answer comes."""

    case: Case
    name: str
    stream: bool
    piece: int

    @property
    def dialect(self) -> Dialect:
        return DIALECTS[self.name]


Forms = Callable[[Case, int], Iterator[Asked]]
Reply = tuple[Asked, Answer | str]
"""The answer to a request, or what is wrong with the response."""


class Caller:
    """A client with one connection to the server."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._connection = h11.Connection(h11.CLIENT)

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        """Return the status and the body of the response."""
        content = json.dumps(body).encode()
        headers = [("Host", "localhost"), ("Content-Length", str(len(content)))]
        request = h11.Request(method="POST", target=path, headers=headers)
        parts: list[h11.Event] = [request, h11.Data(data=content), h11.EndOfMessage()]
        await self._stream.send_all(b"".join(self._connection.send(part) or b"" for part in parts))
        status, received = 0, b""
        while True:
            match self._connection.next_event():
                case h11.NEED_DATA:
                    self._connection.receive_data(await self._stream.receive_some())
                case h11.Response(status_code=status):
                    pass
                case h11.Data(data=data):
                    received += data
                case h11.EndOfMessage():
                    self._connection.start_next_cycle()
                    return status, received
                case other:
                    raise AssertionError(other)


def all_forms(case: Case, number: int) -> Iterator[Asked]:
    """Yield every form of a case."""
    for name in DIALECTS:
        for stream in (False, True):
            for piece in PIECES:
                yield Asked(case, name, stream, piece)


def few_forms(case: Case, number: int) -> Iterator[Asked]:
    """Yield a form for each dialect: every other one a stream. Over all cases, each dialect has all forms.

    Where only the forms can be compared with each other, yield both.
    """
    for at, name in enumerate(DIALECTS, number):
        is_stream = (at // len(DIALECTS) + at) % 2 == 0
        yield Asked(case, name, is_stream, PIECES[at % 7])
        if case.answer is None:
            yield Asked(case, name, not is_stream, PIECES[(at + 3) % 7])


def values_of(answer: Answer) -> tuple[Any, ...]:
    """Return the answer with the values of its calls' arguments, unless they are cut."""
    calls = []
    for name, arguments in answer.calls:
        try:
            calls.append((name, json.loads(arguments)))
        except ValueError:
            calls.append((name, arguments))
    return (*answer._replace(calls=()), calls)


async def answers_of(folder: Path, scripts: Scripts, asked: list[Asked]) -> list[Reply]:
    """Ask for everything, `SLOTS` at a time; return the replies."""
    found: list[Reply] = []
    waiting = iter(asked)

    async def call(address: tuple[str, int]) -> None:
        async with await trio.open_tcp_stream(*address) as stream:
            caller = Caller(stream)
            for one in waiting:
                case, dialect = one.case, one.dialect
                message = scripts.add(*case.texts, piece=one.piece)
                body = dialect.body(message, case.request)
                status, content = await caller.post(
                    dialect.path, {"model": "scripted", "stream": one.stream, **body}
                )
                try:
                    assert status == 200
                    found.append((one, (dialect.stream if one.stream else dialect.whole)(content)))
                except Exception as error:  # noqa: BLE001  whatever a response makes its reader raise
                    found.append((one, f"{error!r}: {status} {content[-2000:]!r}"))

    with trio.fail_after(TIMEOUT_S):
        async with serving(folder, scripts) as address, trio.open_nursery() as nursery:
            for _ in range(SLOTS):
                nursery.start_soon(call, address)
    return found


def faults(found: list[Reply]) -> Iterator[str]:
    """Yield what is not as the model has written it, and streams that differ from the whole answer."""
    first: dict[tuple[str, str], Answer] = {}
    for one, answer in found:
        where = f"{one.case.name}, {one.name}, stream {one.stream}, {one.piece} tokens at once"
        if isinstance(answer, str):
            yield f"{where}: {answer}"
            continue
        expected = one.case.answer
        if expected is None:
            yield from (f"{where}: {fault}" for fault in invalid_calls(one, answer))
        else:
            shown = one.dialect.shown(expected._replace(end=one.dialect.ends[expected.end]))
            if values_of(answer) != values_of(shown):
                yield f"{where}:\n  {answer}\n  instead of\n  {shown}"
        other = first.setdefault((one.case.name, one.name), answer)
        if answer != other:
            yield f"{where}:\n  {answer}\n  and in another form\n  {other}"


def test_every_wire_format_is_served():
    assert {served.format for served in SERVED.values()} == set(WIRE_FORMATS)


def invalid_calls(one: Asked, answer: Answer) -> Iterator[str]:
    """Yield why calls are not valid for their strict schemas. The limit may cut the last one."""
    schemas = {tool.name: tool.parameters for tool in one.case.request.tools if tool.is_strict}
    is_cut = answer.end == one.dialect.ends[LENGTH]
    for name, arguments in answer.calls[:-1] if is_cut else answer.calls:
        if name in schemas:
            try:
                jsonschema.validate(json.loads(arguments), schemas[name])
            except (ValueError, jsonschema.ValidationError) as error:
                yield f"{name}({arguments}): {error}"


@pytest.mark.parametrize("family", SERVED)
@pytest.mark.parametrize("forms", [few_forms, pytest.param(all_forms, marks=pytest.mark.nightly)])
async def test_answer_has_the_parts_that_the_model_wrote(tmp_path, family, forms):
    assert not [*faults(await answers_of_family(tmp_path, family, forms))]


async def answers_of_family(tmp_path: Path, family: str, forms: Forms) -> list[Reply]:
    """Return the replies of a model of this family, in those of the forms that their dialects have."""
    served = SERVED[family]
    _, state = served.states[0]
    made = vocabulary(served.format)
    write_folder(tmp_path, made.library, served.template)
    asked = [
        one
        for number, case in enumerate(cases(served.format, state, made))
        for one in forms(case, number)
        if all(
            member in one.dialect.can or not getattr(case.request, member) for member in case.request._fields
        )
    ]
    found = await answers_of(tmp_path, Scripts(), asked)
    assert len(found) == len(asked)
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("family", SERVED)
async def test_calls_of_the_leaderboard_arrive(tmp_path, family):
    """Some of those that `structured/test_bfcl.py` writes, parses and allows in every wire format."""
    if not bfcl.is_present():
        pytest.skip("run `python tests/language/structured/bfcl.py`")
    served = SERVED[family]
    writer = Writer(served.format, served.states[0][1])

    def forms(_case: Case, number: int) -> Iterator[Asked]:
        for at, question in enumerate(bfcl.questions()):
            if number or at % EVERY or not question.calls or len(json.dumps(question.tools)) > MOST_TOOLS:
                continue
            calls = [(name, ordered(arguments, question.tools[name])) for name, arguments in question.calls]
            calls = calls[:1] if served.format in SINGLE else calls
            tools = tuple(Tool(name, schema) for name, schema in question.tools.items())
            text = writer.answer("", "", calls)
            if unusual(served.format, question, calls):
                continue
            case = Case(question.id, (text,), Request(tools), writer.expected("", "", calls))
            yield Asked(case, [*DIALECTS][at // EVERY % len(DIALECTS)], at % 2 == 0, PIECES[at // EVERY % 7])

    found = await answers_of_family(tmp_path, family, forms)
    assert len(found) > 50
    assert not [*faults(found)]


def find_only_whole_marks(mark: Mark, text: str, *, is_end: bool) -> tuple[int, object]:
    """Find a mark as `Mark.find` does, but hold nothing back that may be its beginning."""
    found = mark._compiled.search(text)
    return (len(text), None) if found is None else (found.start(), found)


def decode_each_piece(stream: Any, ids: Sequence[int]) -> str:
    """Decode as `Detokenizer` does, but without the bytes of a character that came before."""
    shown = [stream._token_bytes(token_id) for token_id in ids if token_id not in stream._skipped]
    return b"".join(shown).decode(errors="replace")


def forget_the_arguments(calls: list[CallPiece], piece: CallPiece) -> None:
    """Add a piece of a call to a delta, but none to a call that the delta has."""
    if not calls or calls[-1].number != piece.number:
        calls.append(piece)


# What is replaced by a mistake, and the cases that must show it.
MUTANTS = {
    "stop string is not held back": (
        "fairlead.language.text.stops.StopStrings._safe_chars",
        lambda _stops, text: len(text),
        "stop string",
    ),
    "mark is not held back": (
        "fairlead.language.structured.mark.Mark.find",
        find_only_whole_marks,
        "reasoning",
    ),
    "part of a character is decoded": (
        "fairlead.language.text.detokenizer._Bytes.push",
        decode_each_piece,
        "text",
    ),
    "arguments are forgotten": ("fairlead.base.job.add_piece", forget_the_arguments, "call"),
    "mask is ignored": (
        "fairlead.language.structured.constraint.Constraint.fill",
        lambda _constraint, mask: mask.fill(0xFFFF_FFFF),
        "form that the model does not write",
    ),
    "calls are not checked": (
        "fairlead.language.structured.trials.GrammarTrials.call",
        lambda _trials, _name, spec, *_more, owner="": Formed(spec, None, "tools"),
        "damaged call",
    ),
    "call does not end the answer as one": (
        "fairlead.language.structured.parser.AnswerParser.calls",
        property(lambda _parser: 0),
        "call",
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
async def test_mistake_is_found(tmp_path, monkeypatch, name):
    replaced, mistake, begin = MUTANTS[name]

    def forms(case: Case, number: int) -> Iterator[Asked]:
        if case.name.startswith(begin):
            for piece in (1, 2, 5):
                yield Asked(case, "chat", stream=piece != 2, piece=piece)

    monkeypatch.setattr(replaced, mistake)
    assert [*faults(await answers_of_family(tmp_path, "Qwen3", forms))]
