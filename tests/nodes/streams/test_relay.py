"""Responses are relayed unchanged in every API, and their text, tokens and end are read."""

import json

import msgspec
import pytest
import trio

from fairlead.base.config import FiltersConfig
from fairlead.base.errors import InvalidRequest, NodeFailed
from fairlead.nodes.http.client_connection import ClientConnection
from fairlead.nodes.streams.relay import rewrite_model
from fairlead.nodes.streams.relayed_stream import RelayedStream
from nodes.listening import CHAT, CollectedDeltas, generated, ready_node, relayed_job, stub
from nodes.stub_server import stream_events, text, whole_answer
from upstream_readers import CHAT_READER

OLLAMA = ("/api/chat", "/api/generate")
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/messages", "/v1/responses", *OLLAMA])
@pytest.mark.parametrize("how", ["well", "close"])
async def test_stream_is_relayed_unchanged(path, how):
    async with stub() as server:
        result = await generated(ready_node(server), relayed_job(path, stub={"how": how}))
    document = {"model": "m"}
    assert b"".join(stream_events(path, document, 8, 1)) == result.raw
    assert text() == result.text()
    assert result.deltas[-1].finish_reason == "stop"
    assert result.tokens == 8


@pytest.mark.parametrize(("stream", "tasks"), [(True, 1), (False, 0)])
async def test_only_a_stream_starts_a_task(stream, tasks, mock_clock):
    spawned = []

    class CountTasks(trio.abc.Instrument):
        def task_spawned(self, task):
            spawned.append(task.name)

    async with stub() as server:
        node = ready_node(server)
        # Open a connection. Time does not advance, so it is kept.
        await generated(node, relayed_job(stream=stream))
        instrument = CountTasks()
        trio.lowlevel.add_instrument(instrument)
        await generated(node, relayed_job(stream=stream))
        trio.lowlevel.remove_instrument(instrument)
    assert tasks == len(spawned)


async def test_wait_for_a_whole_response_ends_when_the_node_goes_down():
    async with stub() as server:
        node, into = ready_node(server), CollectedDeltas()
        async with trio.open_nursery() as nursery:

            async def wait():
                async with node.generate(relayed_job(stream=False, stub={"how": "silent"}), into):
                    await into.over.wait()

            nursery.start_soon(wait)
            while not server.jobs:
                await trio.lowlevel.checkpoint()
            node.went_down(NodeFailed("unreachable"))
        assert into.error.message == "unreachable"
        assert (node.status().busy, node.status().connections.busy) == (0, 0)


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/embeddings", *OLLAMA])
@pytest.mark.parametrize("how", ["well", "close"])
async def test_whole_response_keeps_unknown_members(path, how):
    async with stub() as server:
        result = await generated(ready_node(server), relayed_job(path, stream=False, stub={"how": how}))
    assert whole_answer(path, {"model": "m"}, 8) == json.loads(result.raw)
    assert (0 if path == "/v1/embeddings" else 8) == result.tokens


async def test_events_of_one_read_are_one_delta(monkeypatch):
    reads = []
    receive = ClientConnection.receive

    async def counted(connection):
        reads.append(await receive(connection))
        return reads[-1]

    monkeypatch.setattr(ClientConnection, "receive", counted)
    async with stub() as server:
        result = await generated(ready_node(server), relayed_job(stub={"at_once": True, "words": 500}))
    assert text(500) == result.text()
    assert len(result.deltas) <= len(reads) + 3  # the end, the events after it, and the finish reason
    assert len(reads) < 250  # otherwise nothing was merged
    assert result.tokens == 500


async def test_choices_have_separate_deltas_and_so_has_the_end():
    job = relayed_job(n=3, stream_options={"include_usage": True})
    async with stub() as server:
        result = await generated(ready_node(server), job)
    assert [text()] * 3 == [result.text(index) for index in range(3)]
    assert {delta.index for delta in result.deltas} == {0, 1, 2, 3}
    assert result.raw.endswith(b"data: [DONE]\n\n")
    assert result.tokens == 24
    ends = [delta for delta in result.deltas if delta.index == 3]
    assert b"usage" in ends[0].raw[0]
    assert {delta.index for delta in result.deltas if delta.finish_reason} == {0, 1, 2}


async def test_merged_deltas_of_several_choices_end_with_done():
    from fairlead.nodes.streams.deltas import Deltas

    job = relayed_job(n=3, stream_options={"include_usage": True})
    deltas = Deltas(job.sequences)
    async with stub() as server, ready_node(server).generate(job, deltas):
        await deltas.ended()
        taken = await deltas.take()
    raw = b"".join(piece for delta in taken for piece in delta.raw)
    assert raw.endswith(b"data: [DONE]\n\n")
    assert raw.index(b"completion_tokens") > max(raw.rindex(b'"index": %d' % index) for index in range(3))


async def test_first_events_are_kept_until_there_is_text():
    into = CollectedDeltas()
    job = relayed_job(stub={"how": "stall", "after": 1})  # only the role, no text
    async with stub() as server, ready_node(server).generate(job, into):
        while not server.jobs:
            await _next_read()
        await _next_read()
        assert into.deltas == []


async def test_reported_usage_replaces_the_count_of_events():
    job = relayed_job(stream_options={"include_usage": True}, stub={"chunk_words": 4})
    async with stub() as server:
        result = await generated(ready_node(server), job)
    assert result.tokens == 8


async def test_stream_without_done_is_complete_when_every_choice_has_ended():
    async with stub() as server:
        result = await generated(ready_node(server), relayed_job(n=2, stub={"how": "no_done"}))
    assert result.error is None
    assert [text(), text()] == [result.text(0), result.text(1)]


async def test_stream_with_done_is_complete_without_finish_reasons():
    async with stub() as server:
        result = await generated(ready_node(server), relayed_job(n=2, stub={"how": "unfinished"}))
    assert result.error is None
    assert {delta.index for delta in result.deltas if delta.finish_reason} == {0, 1}


async def test_relayed_body_differs_from_the_clients_only_in_the_model():
    async with stub() as server:
        node = ready_node(server, names={"m": "org/Other-7B"}, api_key="sk-secret")
        job = relayed_job(request_id="abc", seed=2**70, temperature=1e-7, tools=[{"x": "ü"}])
        job = msgspec.structs.replace(job, traceparent=TRACE)
        await generated(node, job)
        received = server.jobs[0]
    assert received.path == CHAT
    assert received.headers["authorization"] == "Bearer sk-secret"
    assert (received.headers["x-request-id"], received.headers["traceparent"]) == ("abc", TRACE)
    assert f"127.0.0.1:{server.port}" == received.headers["host"]
    assert job.relay is not None
    assert job.relay.body.replace(b'"model":"m"', b'"model":"org/Other-7B"') == received.body


def test_rewritten_body_has_all_other_values_unchanged():
    body = b'{ "a": 1.0e2, "model" :"x", "deep": {"model": "y",  "z":[1 ,2]}, "big": 1234567890123456789012}'
    same = b'{"a":1.0e2,"model":"n\\"","deep":{"model": "y",  "z":[1 ,2]},"big":1234567890123456789012}'
    assert same == rewrite_model(body, 'n"')


@pytest.mark.parametrize("body", [b"[]", b'"x"', b"{", b"", b"\xff"])
def test_body_that_is_not_a_json_object_is_refused(body):
    with pytest.raises(InvalidRequest):
        rewrite_model(body, "m")


def test_filters_strip_and_set_parameters_by_the_clients_model_name():
    filters = FiltersConfig(
        strip_params=("temperature", "model", "absent"),
        set_params={"top_p": 0.5, "model": "never"},
        set_params_by_id={"m:high": {"effort": "high"}, "m:low": {"effort": "low"}},
    )
    body = b'{"model":"m:high","temperature":1,"top_p":1}'
    assert json.loads(rewrite_model(body, "own", filters)) == {"model": "own", "top_p": 0.5, "effort": "high"}


async def test_job_without_a_client_request_is_refused():
    from fake_nodes import job

    async with stub() as server:
        with pytest.raises(NodeFailed, match="as clients write them"):
            async with ready_node(server).generate(job(), CollectedDeltas()):
                pass


async def _next_read() -> None:
    import trio

    await trio.sleep(0.02)


class _FakeResponse:
    """A response that arrives in the given reads."""

    def __init__(self, *reads):
        self._reads = list(reads)

    async def read(self):
        return self._reads.pop(0) if self._reads else b""

    async def drain(self, within_s):
        """Do nothing: no data follows the end."""


def _chunk(index, content, finish_reason=None):
    choice = {"index": index, "delta": {"content": content}, "finish_reason": finish_reason}
    return b"data: %s\n\n" % json.dumps({"choices": [choice]}).encode()


@pytest.mark.parametrize("reads_one_by_one", [True, False])
@pytest.mark.parametrize("choices", [1, 2, 3])
async def test_choices_end_separately_even_if_more_arrive_than_were_requested(choices, reads_one_by_one):
    from fairlead.nodes.streams.deltas import Deltas

    noise = b'data: {"choices": [], "unknown": 1}\n\n'
    events = [
        _chunk(0, "a"),
        _chunk(1, "x"),
        _chunk(0, "", "length"),
        noise,
        _chunk(0, "", "length"),
        _chunk(1, "y"),
        _chunk(1, "", "stop"),
        b"data: [DONE]\n\n",
    ]
    deltas = Deltas(choices)
    reads = events if reads_one_by_one else [b"".join(events)]
    stream = RelayedStream("stub", relayed_job(n=choices), CHAT_READER, deltas, event_bytes=10_000)
    await stream.run(_FakeResponse(*reads))
    await deltas.ended()
    taken = await deltas.take()
    raw = b"".join(piece for delta in taken for piece in delta.raw)
    chunks = [json.loads(event.removeprefix(b"data: ")) for event in raw.split(b"\n\n")[:-2]]
    parts = [chunk["choices"][0] for chunk in chunks]
    assert "".join(sorted(part["delta"].get("content") or "" for part in parts)) == "axy"
    ends = [part["finish_reason"] for part in parts if part["finish_reason"]]
    assert ends == (["length", "stop"] if choices > 1 else ["stop"])
    assert raw.endswith(b"data: [DONE]\n\n")
    assert await deltas.take() == []
    if choices == 2:
        assert {delta.index: delta.finish_reason for delta in taken if delta.finish_reason} == {
            0: "length",
            1: "stop",
        }
