"""A request in a dialect that a node does not speak is translated, and so is the answer."""

import json

import pytest
import trio

from fairlead.base.config import QueueConfig, SelectorConfig
from fairlead.base.errors import NodeFailed, NodeRefused
from fairlead.base.job import CallPiece, Delta, Translation
from fairlead.dialects.answer_events import AnswerEnd, AnswerEvents, CallArguments, CallBegin
from fairlead.dialects.body import BodyParser
from fairlead.dialects.dialect import GenerationRequest
from fairlead.language.structured.pieces import Content, Reasoning
from fairlead.server.routes.route_table import ROUTES, dialect_route
from fake_fleet import FakeFleet
from server.routes.conftest import client_of
from server.routes.test_new_dialect import PATH, LinesDialect, LinesRequest, LinesWriter, encode

HEADER = "x-fairlead-translated"
ORIGIN = Translation("openai")


class TurnsRequest(LinesRequest, frozen=True, kw_only=True):
    stop: tuple[str, ...] = ()
    scores: int | None = None


class TurnsWriter(LinesWriter):
    """Writes an answer from its events."""

    def __init__(self, context):
        super().__init__()
        self._events = AnswerEvents(context.job)

    def write(self, deltas):
        return b"".join(self._line(line_of(event)) for event in self._events.of(deltas))


def line_of(event):
    match event:
        case Reasoning(text):
            return {"thought": text}
        case Content(text):
            return {"piece": text}
        case CallBegin(number, name):
            return {"call": number, "name": name}
        case CallArguments(number, text):
            return {"call": number, "arguments": text}
        case AnswerEnd(reason, stop, usage):
            return {"reason": reason, "stop": stop, "usage": list(usage)}
    return {"over": event.number}


class TurnsDialect(LinesDialect):
    """A dialect of chats, which nodes do not speak unless it is configured."""

    name = "ollama"
    job_prefix = "turn"
    parse = BodyParser(TurnsRequest)

    def decode(self, body, limits):
        request = self.parse(body, limits)
        return GenerationRequest(
            messages=[{"role": "user", "content": request.text}],
            is_chat=True,
            sampling=request.options,
            max_tokens=request.words,
            stop=request.stop,
            logprobs=request.scores,
            options="kept",
        )

    def write_response(self, context, deltas):
        assert context.options == "kept"
        return encode([line_of(event) for event in AnswerEvents(context.job).of(deltas)])

    def stream_writer(self, context):
        return TurnsWriter(context)


def translated(job):
    """Return the deltas of a node that speaks only chats."""
    counts = Translation("openai", 21)
    return [
        [Delta(0, relayed_tokens=1, reasoning="Hm.", reasoning_tokens=1, translation=ORIGIN)],
        [Delta(0, "Hello", relayed_tokens=1, translation=ORIGIN)],
        [Delta(0, relayed_tokens=1, calls=[CallPiece(0, "f", "{}")], translation=ORIGIN)],
        [Delta(0, relayed_tokens=4, cached_tokens=8, finish_reason="tool_calls", translation=counts)],
    ]


LINES = [
    {"thought": "Hm."},
    {"piece": "Hello"},
    {"call": 0, "name": "f"},
    {"call": 0, "arguments": "{}"},
    {"over": 0},
    {"reason": "tool_calls", "stop": None, "usage": [21, 8, 7, 1]},
]


def turns_client(model, *, dialects=("openai",), engines=("small",), remote=("remote",), **changes):
    fleet = FakeFleet(engines, remote, dialects=dialects)
    routes = (*ROUTES, dialect_route(TurnsDialect(), "Continue a text."))
    return client_of(model, fleet=fleet, routes=routes, gateway_script=translated, **changes)


@pytest.fixture
def client(model):
    return turns_client(model, aliases={"away": "remote"})


def lines(reply):
    return [json.loads(line) for line in reply.body.splitlines()]


async def test_whole_answer_is_written_by_the_dialect(client):
    reply = await client.post(PATH, {"model": "remote", "text": "hello", "stream": False})
    assert (reply.status, reply.headers[HEADER], reply.json) == (200, "openai", LINES)


async def test_stream_is_written_by_the_dialect(client):
    reply = await client.post(PATH, {"model": "remote", "text": "hello"})
    assert (reply.status, reply.headers[HEADER]) == (200, "openai")
    assert reply.headers["content-type"] == "application/x-ndjson"
    numbered = [{"number": number, **line} for number, line in enumerate([*LINES, {"end": True}], 1)]
    assert lines(reply) == numbered


async def test_job_has_both_forms_of_the_request(client):
    options = {"temperature": 0, "top_p": 0.5, "seed": 3}
    body = {"model": "away", "text": "hello", "words": 7, "options": options, "stop": ["x"]}
    await client.post(PATH, body)
    job = client.gateway.job
    assert job.id.startswith("turn-")
    assert (job.model, job.stop, job.relay.dialect) == ("remote", ("x",), "ollama")
    assert (job.relay.path, json.loads(job.relay.body)) == (PATH, body)
    assert json.loads(job.relay.chat.body) == {
        "model": "away",  # filters depend on it
        "messages": [{"role": "user", "content": "hello"}],
        **options,
        "max_tokens": 7,
        "stop": ["x"],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert job.relay.size == len(job.relay.body) + len(job.relay.chat.body)


async def test_nothing_is_decoded_for_nodes_that_speak_the_dialect(model):
    client = turns_client(model, dialects=("openai", "ollama"))
    client.gateway.script = lambda job: [[Delta(0, raw=[b"{}"], finish_reason="stop")]]
    reply = await client.post(PATH, {"model": "remote", "stream": False, "text": 7})
    assert (reply.status, reply.body, HEADER in reply.headers) == (200, b"{}", False)
    assert client.gateway.job.relay.chat is None
    assert client.gateway.job.id.startswith("relay-")


async def test_chats_are_never_translated(model):
    client = turns_client(model, dialects=("ollama",))
    client.gateway.script = lambda job: [[Delta(0, raw=[b"{}"], finish_reason="stop")]]
    reply = await client.post("/v1/chat/completions", {"model": "remote", "anything": 1})
    assert (reply.status, client.gateway.job.relay.chat) == (200, None)


@pytest.mark.parametrize("stream", [False, True])
async def test_invalid_request_is_refused_by_the_dialect(client, stream):
    reply = await client.post(PATH, {"model": "remote", "words": 7, "stream": stream})
    assert (reply.status, set(reply.json), reply.json["field"]) == (400, {"fault", "field"}, "text")
    assert client.gateway.jobs == []


async def test_request_that_no_chat_can_say_is_relayed_untranslated(client):
    client.gateway.refusal = NodeRefused("big does not serve it, and this request cannot be translated")
    reply = await client.post(PATH, {"model": "remote", "text": "hello", "scores": 1})
    assert reply.status == 400
    assert "cannot be translated" in reply.json["fault"]
    assert client.gateway.job.relay.chat is None


async def test_refusal_of_a_node_has_the_form_of_the_dialect(client):
    client.gateway.refusal = NodeRefused("big answered 422: no such option", status=422)
    reply = await client.post(PATH, {"model": "remote", "text": "hello"})
    assert (reply.status, reply.json) == (422, {"fault": "big answered 422: no such option", "field": None})


async def test_failure_in_the_stream_is_the_dialects_own_event(client):
    client.gateway.script = lambda job: [*translated(job)[:2], NodeFailed("gone")]
    reply = await client.post(PATH, {"model": "remote", "text": "hello"})
    assert not reply.is_complete
    assert lines(reply)[-1] == {"number": 3, "fault": "gone"}


async def test_relayed_events_of_another_node_are_passed_on(client):
    client.gateway.script = lambda job: [
        [Delta(0, "Hello", raw=[b'{"piece":"Hello"}\n'], relayed_tokens=1)],
        [Delta(0, raw=[b""], finish_reason="stop")],
    ]
    reply = await client.post(PATH, {"model": "remote", "text": "hello"})
    assert (lines(reply), HEADER in reply.headers) == ([{"piece": "Hello"}], False)


async def test_stream_that_has_begun_has_no_header(model, autojump_clock):
    client = turns_client(model, queue=QueueConfig(keep_alive_s=1.0))
    client.gateway.wait_s = 2.0
    reply = await client.post(PATH, {"model": "remote", "text": "hello"})
    assert reply.status == 200
    assert HEADER not in reply.headers
    assert b'"piece":"Hello"' in reply.body


async def test_model_of_our_engine_is_translated_only_for_other_nodes(model):
    client = turns_client(model, remote=("small",))
    client.gateway.script = lambda job: [[Delta(0, "Hello", [1])], [Delta(0, finish_reason="stop")]]
    reply = await client.post(PATH, {"model": "small", "text": "hello", "stream": False})
    assert (reply.json[0], HEADER in reply.headers) == ({"piece": "Hello"}, False)
    job = client.gateway.job
    assert job.prompts
    assert json.loads(job.relay.chat.body)["messages"] == [{"role": "user", "content": "hello"}]
    client.gateway.script = translated
    reply = await client.post(PATH, {"model": "small", "text": "hello", "stream": False})
    assert (reply.json, reply.headers[HEADER]) == (LINES, "openai")


async def test_selector_names_the_model_in_both_forms(model):
    selector = SelectorConfig(strategy="pin", targets=("remote",))
    client = turns_client(model, selectors={"any": selector})
    await client.post(PATH, {"model": "any", "text": "hello"})
    relay = client.gateway.job.relay
    assert [json.loads(body)["model"] for body in (relay.body, relay.chat.body)] == ["remote", "remote"]


async def test_client_that_leaves_ends_the_job(client):
    client.gateway.script = lambda job: [*translated(job)[:2], None]
    left, body = trio.Event(), {"model": "remote", "text": "hello"}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: client.post(PATH, body, disconnected=left))
        await trio.testing.wait_all_tasks_blocked()
        assert (len(client.gateway.jobs), client.gateway.ended) == (1, 0)
        left.set()
    assert client.gateway.ended == 1
