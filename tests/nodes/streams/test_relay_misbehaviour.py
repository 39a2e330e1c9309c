"""A faulty response fails only its job, with an error that states the reason."""

import socket

import pytest
import trio

from fairlead.base.errors import NodeFailed, NodeFull, NodeLimited, NodeRefused, NodeUnsuited
from fairlead.nodes.http.client import UpstreamFailed
from fairlead.nodes.streams import upstream_stream
from nodes.listening import CollectedDeltas, generated, ready_node, relayed_job, stub
from nodes.stub_server import StubServer, text, word

BROKEN_CONNECTIONS = [
    ("gone", 0, "closed the connection without a response"),
    ("reset", 0, "reset|closed the connection"),
    ("garbage", 0, "sent an invalid head"),
    ("reset", 4, "reset by peer|in the middle of a response"),
    ("broken", 4, "closed the connection in the middle of a response"),
    ("bad_chunk", 4, "an invalid chunk|in the middle of a response"),
]
BAD_ANSWERS = [
    *(("status", status, f"answered {status}") for status in (204, 206, 302, 500, 502, 504, 507)),
    ("end", 4, "ended a stream before its end"),
    ("half", 4, "ended a stream before its end"),
    ("kind", 0, "answered with text/html instead of text/event-stream"),
    ("error", 4, "failed: out of order"),
]


@pytest.mark.parametrize(("how", "after", "message"), BROKEN_CONNECTIONS)
async def test_broken_connection_fails_its_job_and_counts_against_the_node(how, after, message):
    async with stub() as server:
        node = ready_node(server)
        result = await generated(node, relayed_job(stub={"how": how, "after": after}))
        assert node.status().busy == 0
    assert isinstance(result.error, UpstreamFailed)
    with pytest.raises(NodeFailed, match=message):
        raise result.error


@pytest.mark.parametrize(("how", "after", "message"), BAD_ANSWERS)
async def test_bad_response_fails_its_job_and_does_not_count_against_the_node(how, after, message):
    async with stub() as server:
        result = await generated(ready_node(server), relayed_job(stub={"how": how, "after": after}))
    assert isinstance(result.error, NodeFailed)
    assert not isinstance(result.error, UpstreamFailed)
    with pytest.raises(NodeFailed, match=message):
        raise result.error


@pytest.mark.parametrize("how", ["end", "half", "broken", "reset", "bad_chunk", "error"])
@pytest.mark.parametrize("after", [3, 5])
async def test_events_before_a_failure_are_delivered_before_the_error(how, after):
    async with stub() as server:
        result = await generated(ready_node(server), relayed_job(stub={"how": how, "after": after}))
    assert result.error is not None
    assert text(after - 1) == result.text()  # the first event has only the role
    assert result.raw.count(b"data:") == after


@pytest.mark.parametrize("how", ["half", "broken", "end"])
async def test_truncated_whole_response_is_not_delivered(how):
    async with stub() as server:
        result = await generated(ready_node(server), relayed_job(stream=False, stub={"how": how}))
    assert result.deltas == []
    assert isinstance(result.error, NodeFailed)


async def test_unrequested_encoding_is_refused():
    async with stub() as server:
        result = await generated(ready_node(server), relayed_job(stream=False, stub={"how": "gzip"}))
    assert result.deltas == []
    assert isinstance(result.error, NodeFailed)


@pytest.mark.parametrize("status", [429, 503, 529])
async def test_full_node_raises_node_full_and_keeps_its_connection(status):
    async with stub() as server:
        node = ready_node(server)
        for _ in range(3):
            result = await generated(node, relayed_job(stub={"how": "status", "after": status}))
            assert isinstance(result.error, NodeFull)
            assert isinstance(result.error, NodeLimited) == (status == 429)
            assert result.error.message.endswith(f" answered {status}: status {status}")
        assert node.status().connections.opened == 1
        assert node.status().is_up


@pytest.mark.parametrize("status", [401, 402, 403, 404, 405, 407])
async def test_refusal_by_the_set_up_of_a_server_lets_others_be_tried(status):
    async with stub() as server:
        node = ready_node(server)
        error = (await generated(node, relayed_job(stub={"how": "status", "after": status}))).error
        assert node.status().is_up
    assert isinstance(error, NodeUnsuited)
    if status in (401, 407):
        assert error.answer.status == 502
        assert error.answer.message.endswith(" rejected our API key")
    else:
        assert error.answer.status == status
        assert b'{"error": {"message": "status %d", "code": "of the stub"}}' % status == error.answer.body


@pytest.mark.parametrize("status", [400, 409, 413, 422, 501])
async def test_refusal_of_a_bad_request_is_relayed_unchanged(status):
    async with stub() as server:
        result = await generated(ready_node(server), relayed_job(stub={"how": "status", "after": status}))
    assert isinstance(result.error, NodeRefused)
    assert status == result.error.status
    assert b'{"error": {"message": "status %d", "code": "of the stub"}}' % status == result.error.body


@pytest.mark.parametrize("after", [0, 1, 4])
async def test_stream_without_further_data_times_out(after, autojump_clock):
    autojump_clock.autojump_threshold = 0.05
    async with stub() as server:
        node = ready_node(server, between_bytes_s=7.0)
        began = trio.current_time()
        result = await generated(node, relayed_job(stub={"how": "stall", "after": after}))
        assert pytest.approx(7.0, abs=0.5) == trio.current_time() - began
    assert isinstance(result.error, UpstreamFailed)
    assert "did not continue its response in time" in result.error.message
    assert text(max(0, after - 1)) == result.text()


async def test_timeout_between_bytes_restarts_with_each_read(autojump_clock):
    autojump_clock.autojump_threshold = 0.05
    async with stub() as server:
        node = ready_node(server, between_bytes_s=7.0)
        result = await generated(node, relayed_job(stub={"delay_s": 6.0}))
    assert result.error is None
    assert text() == result.text()


async def test_server_that_never_answers_times_out(autojump_clock):
    autojump_clock.autojump_threshold = 0.05
    async with stub() as server:
        node = ready_node(server, first_byte_s=30.0)
        began = trio.current_time()
        result = await generated(node, relayed_job(stub={"how": "silent"}))
        assert pytest.approx(30.0, abs=0.5) == trio.current_time() - began
    assert isinstance(result.error, UpstreamFailed)
    assert "did not respond in time" in result.error.message


async def test_error_for_an_unreachable_server_has_its_name_and_the_reason():
    server = StubServer()
    with socket.socket() as taken:  # so that no other process listens there
        taken.bind(("127.0.0.1", 0))
        server.port = taken.getsockname()[1]
        result = await generated(ready_node(server), relayed_job())
    assert isinstance(result.error, UpstreamFailed)
    assert "stub cannot be reached: Connection refused" in result.error.message


async def test_endless_stream_is_ended(monkeypatch):
    monkeypatch.setattr(upstream_stream, "STREAM_BYTES", 1_000_000)
    async with stub() as server:
        result = await generated(ready_node(server), relayed_job(stub={"how": "endless", "words": 3}))
    assert isinstance(result.error, NodeFailed)
    assert "more than 1000000 bytes" in result.error.message
    assert len(result.raw) < 2_000_000


async def test_event_over_the_limit_is_refused():
    long = {"chunk_words": 1000, "words": 1000}
    async with stub() as server:
        node = ready_node(server, answer_bytes=1000)
        result = await generated(node, relayed_job(stub=long | {"how": "half", "after": 1}))
    assert isinstance(result.error, NodeFailed)
    assert "an event of more than 1000 bytes" in result.error.message


async def test_three_broken_connections_stop_new_jobs_and_end_no_running_one():
    from fairlead.base.config import HealthConfig
    from fairlead.nodes.remote_node import RemoteNode
    from nodes.listening import RecordingListener, upstream_for

    listener = RecordingListener()
    async with stub() as server:
        node = RemoteNode(
            "stub", upstream_for(server), listener, names={"m": "m"}, seats=4, health=HealthConfig()
        )
        node.came_up()
        running = CollectedDeltas()
        async with node.generate(relayed_job(stub={"waits": True, "after": 3}), running):
            await running.first.wait()
            for _ in range(3):
                await generated(node, relayed_job(stub={"how": "gone"}))
            assert listener.reports == [("up", "stub", 4), ("closed", "stub")]
            with pytest.raises(NodeFailed, match="is down"):
                async with node.generate(relayed_job(), CollectedDeltas()):
                    pass
            server.go.release()
            await running.over.wait()
        assert (running.error, running.text()) == (None, text())


async def test_failed_job_does_not_affect_others():
    async with stub() as server:
        node = ready_node(server)
        unaffected = CollectedDeltas()
        async with node.generate(relayed_job(stub={"delay_s": 0.01}), unaffected):
            await generated(node, relayed_job(stub={"how": "reset", "after": 2}))
            await unaffected.over.wait()
    assert word(7) in unaffected.text()
    assert unaffected.error is None
