"""A dialect is one class and one row of the route table: this one writes an answer in lines of JSON."""

import json

import msgspec
import pytest

from fairlead.base.errors import NodeFailed, QueueFull
from fairlead.base.job import Delta
from fairlead.base.upstream_events import UpstreamEvent, readers
from fairlead.dialects.body import BodyParser
from fairlead.dialects.dialect import GenerationRequest, StreamingDialect
from fairlead.dialects.event_reader import EventReader, EventShape, text_members
from fairlead.dialects.fields import Envelope, SamplingParameters
from fairlead.server.routes.route import dialect_route
from fairlead.server.routes.route_table import ROUTES
from fake_fleet import FakeFleet
from server.routes.conftest import client_of
from server.routes.remote_responses import complete_response

PATH = "/api/continue"


class LinesEnvelope(Envelope, frozen=True, kw_only=True):
    stream: bool | None = True  # other than in OpenAI's dialects


class LinesRequest(msgspec.Struct, frozen=True, kw_only=True):
    text: str
    words: int | None = None
    options: SamplingParameters = SamplingParameters()


class LinesAnswer(msgspec.Struct, frozen=True):
    text: str
    end: str | None


class LinesWriter:
    """Numbers all events of a stream, an error too."""

    def __init__(self):
        self._number = 0

    def write(self, deltas):
        return b"".join(self._line({"piece": delta.text}) for delta in deltas if delta.text)

    def end(self):
        return self._line({"end": True})

    def fail(self, error):
        return self._line({"fault": error.message})

    def skip_beginnings(self):
        """There are none."""

    def _line(self, event):
        self._number += 1
        return encode({"number": self._number} | event) + b"\n"


class LineShape(EventShape):
    piece: str | None = None


class LinesReader(EventReader[LineShape]):
    shape = LineShape

    def _event(self, shape):
        return UpstreamEvent(0, shape.piece or "")

    def _texts(self, document):
        return text_members(document, ("piece",))


class LinesDialect(StreamingDialect):
    path = PATH
    job_prefix = "lines"
    body_type = LinesRequest
    answer_type = LinesAnswer
    stream_type = "application/x-ndjson"
    read_envelope = BodyParser(LinesEnvelope)
    reader = LinesReader()
    parse = BodyParser(LinesRequest)

    def decode(self, body, limits):
        request = self.parse(body, limits)
        return GenerationRequest(
            prompts=[request.text], prompts_field="text", sampling=request.options, max_tokens=request.words
        )

    def write_response(self, context, deltas):
        return encode({"text": deltas[0].text, "end": deltas[0].finish_reason})

    def stream_writer(self, context):
        return LinesWriter()

    def error_body(self, error):
        return encode({"fault": error.message, "field": error.param})

    def error_event(self, error):
        return self.error_body(error) + b"\n"


encode = msgspec.json.Encoder().encode


@pytest.fixture
def client(model):
    fleet = FakeFleet(["small"], ["remote"])
    row = dialect_route(LinesDialect(), "Continue a text.")
    return client_of(model, fleet=fleet, routes=(*ROUTES, row))


async def test_new_dialect_serves_a_whole_answer(client, model):
    body = {"model": "small", "text": "hello", "words": 7, "options": {"top_k": 3}, "stream": False}
    reply = await client.post(PATH, body)
    assert (reply.status, reply.json) == (200, {"text": "Hello world", "end": "stop"})
    job = client.gateway.job
    assert job.id.startswith("lines-")
    assert job.prompts == (model.encode_prompt("hello"),)
    sampling = job.sampling
    assert (sampling.max_tokens, sampling.top_k, sampling.temperature) == (7, 3, model.defaults.temperature)


async def test_new_dialect_serves_a_stream_of_its_own_type(client):
    reply = await client.post(PATH, {"model": "small", "text": "hello"})
    assert (reply.status, reply.headers["content-type"]) == (200, "application/x-ndjson")
    assert [json.loads(line) for line in reply.body.splitlines()] == [
        {"number": 1, "piece": "Hello"},
        {"number": 2, "piece": " world"},
        {"number": 3, "end": True},
    ]


@pytest.mark.parametrize(
    ("path", "body", "status", "field"),
    [
        (PATH, {"model": "small"}, 400, "text"),
        (PATH, {"model": "small", "text": "hello", "options": {"top_p": 2}}, 400, "options.top_p"),
        (PATH, {"model": "small", "text": ""}, 400, "text"),
        (PATH, {"model": "nothing", "text": "hello"}, 404, "model"),
        (f"{PATH}/more", {}, 404, None),
    ],
)
async def test_new_dialect_writes_refusals_in_its_own_form(client, path, body, status, field):
    reply = await client.post(path, body)
    assert (reply.status, set(reply.json), reply.json["field"]) == (status, {"fault", "field"}, field)


async def test_new_dialect_writes_refusals_of_the_queue_in_its_own_form(client):
    client.gateway.refusal = QueueFull("no room", retry_after_s=17)
    reply = await client.post(PATH, {"model": "small", "text": "hello"})
    assert (reply.status, reply.headers["retry-after"]) == (429, "17")
    assert reply.json == {"fault": "no room", "field": None}


async def test_new_dialect_ends_a_stream_with_its_own_error(client):
    client.gateway.script = lambda job: [[Delta(0, "Hello", [1])], NodeFailed("gone")]
    reply = await client.post(PATH, {"model": "small", "text": "hello"})
    assert not reply.is_complete
    assert [json.loads(line) for line in reply.body.splitlines()] == [
        {"number": 1, "piece": "Hello"},
        {"number": 2, "fault": "gone"},
    ]


async def test_new_dialect_ends_a_relayed_stream_with_its_own_error(client):
    client.gateway.script = lambda job: [[Delta(0, raw=[b'{"piece":"Hello"}\n'])], NodeFailed("gone")]
    reply = await client.post(PATH, {"model": "remote", "text": "hello"})
    assert not reply.is_complete
    assert [json.loads(line) for line in reply.body.splitlines()] == [
        {"piece": "Hello"},
        {"fault": "gone", "field": None},
    ]


async def test_new_dialect_is_relayed_with_its_reader(client):
    client.gateway.script = complete_response
    reply = await client.post(PATH, {"model": "remote", "stream": False, "anything": 1})
    assert reply.status == 200
    relay = client.gateway.job.relay
    assert relay.path == PATH
    assert readers[relay.path].read_event(b'data: {"piece": "a"}\n\n').text == "a"


async def test_new_dialect_is_in_the_document(client):
    document = (await client.get("/openapi.json")).json
    content = document["paths"][PATH]["post"]["responses"]["200"]["content"]
    assert set(content) == {"application/json", "application/x-ndjson"}
