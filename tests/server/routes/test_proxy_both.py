"""A model of our engine that another server also has: the client gets one response from either."""

import json

import pytest

from fairlead.base.config import QueueConfig
from fairlead.base.job import Delta
from fake_fleet import FakeFleet
from server.routes.remote_responses import ANSWER, CHAT, COMPLETIONS, EVENTS, complete_response, event_stream


@pytest.fixture
def both(client_with):
    """A client of an application with a model that another server also has."""
    return client_with(fleet=FakeFleet(["small"], ["small"]), gateway_script=complete_response)


def ours(job):
    """Return the deltas of our engine."""
    return [
        [Delta(0, "Hel", [1])],
        [Delta(0, "lo", [2])],
        [Delta(0, finish_reason="stop")],
    ]


def contents(events) -> list[str]:
    return [json.loads(event)["choices"][0]["delta"].get("content") for event in events if event != b"[DONE]"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stream", [False, True])
async def test_job_that_both_can_run_has_token_ids_and_the_body_to_relay(both, chat, path, stream):
    body = json.dumps(chat(stream=stream, prompt="hello", seed=5)).encode()
    await both.post(path, body)
    job = both.gateway.job
    assert len(job.prompts) == 1
    assert sum(map(len, job.prompts)) == job.prompt_tokens
    assert (path, body, stream) == (job.relay.path, job.relay.body, job.relay.stream)


async def test_job_that_only_our_engine_can_run_has_nothing_to_relay(client, chat):
    await client.post(CHAT, chat())
    assert client.gateway.job.relay is None


async def test_whole_response_is_written_by_the_server_that_generates_it(both, chat):
    assert (await both.post(CHAT, chat())).body == ANSWER
    both.gateway.script = ours
    reply = await both.post(CHAT, chat())
    assert reply.json["choices"][0]["message"]["content"] == "Hello"


async def test_events_are_written_by_the_server_that_generates_them(both, chat):
    both.gateway.script = event_stream
    assert b"".join(EVENTS) == (await both.post(CHAT, chat(stream=True))).body
    both.gateway.script = ours
    reply = await both.post(CHAT, chat(stream=True))
    assert contents(reply.events) == ["", "Hel", "lo", None]
    assert reply.events[-1] == b"[DONE]"


async def test_stream_continued_by_another_server_has_one_beginning_and_one_end(both, chat):
    both.gateway.script = lambda job: [*ours(job)[:1], *event_stream(job)[1:]]
    reply = await both.post(CHAT, chat(stream=True))
    assert contents(reply.events) == ["", "Hel", "remote", None]
    assert reply.body.count(b"[DONE]") == 1
    assert reply.body.count(b'"finish_reason":"stop"') == 1
    assert reply.is_complete


async def test_stream_continued_by_our_engine_has_one_beginning_and_one_end(both, chat):
    both.gateway.script = lambda job: [*event_stream(job)[:2], *ours(job)[1:]]
    reply = await both.post(CHAT, chat(stream=True))
    assert contents(reply.events) == ["", "remote", "lo", None]
    assert reply.body.count(b"[DONE]") == 1
    assert reply.body.count(b'"role":"assistant"') == 1
    assert reply.body.count(b'"finish_reason":"stop"') == 1


async def test_stream_that_lacks_only_its_end_is_ended_by_our_engine(both, chat):
    both.gateway.script = lambda job: [*event_stream(job)[:2], ours(job)[-1]]
    reply = await both.post(CHAT, chat(stream=True))
    assert contents(reply.events) == ["", "remote", None]
    assert reply.body.count(b'"finish_reason":"stop"') == 1
    assert reply.events[-1] == b"[DONE]"


async def test_early_comments_are_sent_for_a_model_of_two_servers(client_with, chat, autojump_clock):
    client = client_with(
        fleet=FakeFleet(["small"], ["small"]), queue=QueueConfig(keep_alive_s=1.0), gateway_script=ours
    )
    client.gateway.wait_s = 1.9
    reply = await client.post(CHAT, chat(stream=True))
    assert reply.comments == [": queued position=1 estimated_wait=8"]
    assert contents(reply.events) == ["", "Hel", "lo", None]
