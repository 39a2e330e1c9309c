"""A node that does not speak a request's dialect gets it as a chat, and its answer is translated."""

import msgspec
import pytest

from fairlead.base.config import FiltersConfig
from fairlead.base.errors import NodeFailed, NodeFull, NodeRefused
from fairlead.base.job import Translation
from fairlead.nodes.http.client import UpstreamFailed
from fairlead.nodes.streams.upstream_stream import RelayFailed
from nodes.listening import CHAT, generated, ready_node, stub, translated_job
from nodes.stub_server import text

MESSAGES = "/v1/messages"


def openai_node(server, **options):
    return ready_node(server, dialects=("openai",), **options)


async def test_node_of_another_dialect_gets_a_chat():
    job = translated_job()
    async with stub() as server:
        result = await generated(openai_node(server, names={"m": "org/m"}), job)
        received = server.jobs[0]
    assert received.path == CHAT
    assert received.body == job.relay.chat.body.replace(b'"model":"m"', b'"model":"org/m"')
    assert result.raw == b""
    assert result.text() == text()
    assert result.tokens == 8
    last = result.deltas[-1]
    assert (last.finish_reason, last.translation) == ("stop", Translation("openai", 3))


async def test_node_of_another_dialect_answers_as_a_whole():
    async with stub() as server:
        result = await generated(openai_node(server), translated_job(stream=False))
        assert server.jobs[0].path == CHAT
    assert (result.raw, result.text(), result.tokens) == (b"", text(), 8)
    assert result.deltas[-1].translation == Translation("openai", 3)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("dialects", [("openai", "messages"), None])
async def test_node_of_the_same_dialect_gets_the_clients_bytes(stream, dialects):
    job = translated_job(stream=stream)
    async with stub() as server:
        result = await generated(ready_node(server, dialects=dialects), job)
        received = server.jobs[0]
    assert (received.path, received.body) == (MESSAGES, job.relay.body)
    assert result.raw != b""


@pytest.mark.parametrize("dialects", [("openai", "messages"), None])
async def test_request_that_only_its_chat_has_in_full_is_never_sent_in_the_clients_bytes(dialects):
    job = translated_job()
    job = msgspec.structs.replace(job, relay=msgspec.structs.replace(job.relay, only_chat=True))
    async with stub() as server:
        result = await generated(ready_node(server, dialects=dialects), job)
        assert server.jobs[0].path == CHAT
    assert (result.raw, result.text()) == (b"", text())


async def test_filters_apply_to_the_translated_request():
    filters = FiltersConfig(strip_params=("stream_options",), set_params={"seed": 7})
    async with stub() as server:
        await generated(openai_node(server, filters=filters), translated_job())
        received = server.jobs[0].document
    assert received["seed"] == 7
    assert "stream_options" not in received


@pytest.mark.parametrize("dialects", [("openai",), ("responses",)])
async def test_request_that_is_not_translated_is_refused(dialects):
    job = translated_job()
    if dialects == ("openai",):
        relay = msgspec.structs.replace(job.relay, chat=None)
        job = msgspec.structs.replace(job, relay=relay)
    async with stub() as server:
        result = await generated(ready_node(server, dialects=dialects), job)
        assert server.jobs == []
    assert isinstance(result.error, NodeRefused)
    assert (result.error.status, result.error.body) == (400, b"")
    assert result.error.message == "stub does not serve /v1/messages, and this request cannot be translated"


def _with_dialect(job, dialect):
    return msgspec.structs.replace(job, relay=msgspec.structs.replace(job.relay, dialect=dialect))


@pytest.mark.parametrize("stream", [True, False])
async def test_refusal_has_the_nodes_message_and_not_its_body(stream):
    job = translated_job(stream=stream, stub={"how": "status", "after": 422})
    async with stub() as server:
        result = await generated(openai_node(server), job)
    assert isinstance(result.error, NodeRefused)
    assert (result.error.status, result.error.body) == (422, b"")
    assert result.error.message == "stub answered 422: status 422"


async def test_full_node_is_full():
    job = translated_job(stub={"how": "status", "after": 429})
    async with stub() as server:
        result = await generated(openai_node(server), job)
    assert isinstance(result.error, NodeFull)


@pytest.mark.parametrize(
    ("how", "after", "kind"),
    [
        ("end", 4, RelayFailed),
        ("half", 4, RelayFailed),
        ("broken", 4, UpstreamFailed),
        ("reset", 4, UpstreamFailed),
        ("error", 4, RelayFailed),
        ("gone", 0, UpstreamFailed),
    ],
)
async def test_text_before_a_failure_is_delivered_before_the_error(how, after, kind):
    async with stub() as server:
        result = await generated(openai_node(server), translated_job(stub={"how": how, "after": after}))
    assert isinstance(result.error, kind)
    assert result.text() == text(max(0, after - 1))
    assert not any(delta.finish_reason for delta in result.deltas)


@pytest.mark.parametrize("how", ["half", "broken", "end"])
async def test_truncated_whole_response_is_not_delivered(how):
    async with stub() as server:
        result = await generated(openai_node(server), translated_job(stream=False, stub={"how": how}))
    assert result.deltas == []
    assert isinstance(result.error, NodeFailed)


@pytest.mark.parametrize("how", ["no_done", "unfinished", "close"])
async def test_stream_is_complete_with_all_finish_reasons_or_with_done(how):
    async with stub() as server:
        result = await generated(openai_node(server), translated_job(stub={"how": how}))
    assert result.error is None
    assert (result.text(), result.deltas[-1].finish_reason) == (text(), "stop")
