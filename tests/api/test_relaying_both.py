"""A model that our engine has and another server, too: whoever answers, the client gets one answer."""

import json

import pytest

from api.far_away import ANSWER, CHAT, COMPLETIONS, EVENTS, streamed, whole
from fairlead.config import QueueConfig
from fairlead.job import Delta
from fake_fleet import FakeFleet


@pytest.fixture
def both(client_with):
    """A client of an application whose model another server has, too."""
    return client_with(fleet=FakeFleet(["small"], ["small"]), gateway_script=whole)


def ours(job):
    """What our engine says."""
    return [
        [Delta(0, "Hel", [1])],
        [Delta(0, "lo", [2])],
        [Delta(0, finish_reason="stop")],
    ]


def contents(events) -> list[str]:
    return [json.loads(event)["choices"][0]["delta"].get("content") for event in events if event != b"[DONE]"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_job_that_both_can_run_has_tokens_for_one_and_bytes_for_the_other(both, chat, path, stream):
    body = json.dumps(chat(stream=stream, prompt="hello", seed=5)).encode()
    await both.post(path, body)
    job = both.gateway.job
    assert 1 == len(job.prompts)
    assert sum(map(len, job.prompts)) == job.prompt_tokens
    assert (path, body, stream) == (job.relay.path, job.relay.body, job.relay.stream)


async def test_a_job_that_only_our_engine_can_run_carries_nothing_for_others(client, chat):
    await client.post(CHAT, chat())
    assert client.gateway.job.relay is None


async def test_whoever_answers_whole_writes_the_answer(both, chat):
    assert ANSWER == (await both.post(CHAT, chat())).body
    both.gateway.script = ours
    reply = await both.post(CHAT, chat())
    assert "Hello" == reply.json["choices"][0]["message"]["content"]


async def test_whoever_streams_writes_the_events(both, chat):
    both.gateway.script = streamed
    assert b"".join(EVENTS) == (await both.post(CHAT, chat(stream=True))).body
    both.gateway.script = ours
    reply = await both.post(CHAT, chat(stream=True))
    assert ["", "Hel", "lo", None] == contents(reply.events)
    assert b"[DONE]" == reply.events[-1]


async def test_an_answer_that_goes_on_elsewhere_has_one_beginning_and_one_end(both, chat):
    both.gateway.script = lambda job: [*ours(job)[:1], *streamed(job)[1:]]
    reply = await both.post(CHAT, chat(stream=True))
    assert ["", "Hel", "far", None] == contents(reply.events)
    assert 1 == reply.body.count(b"[DONE]")
    assert 1 == reply.body.count(b'"finish_reason":"stop"')
    assert reply.whole


async def test_an_answer_that_comes_home_has_one_beginning_and_one_end(both, chat):
    both.gateway.script = lambda job: [*streamed(job)[:2], *ours(job)[1:]]
    reply = await both.post(CHAT, chat(stream=True))
    assert ["", "far", "lo", None] == contents(reply.events)
    assert 1 == reply.body.count(b"[DONE]")
    assert 1 == reply.body.count(b'"role":"assistant"')
    assert 1 == reply.body.count(b'"finish_reason":"stop"')


async def test_an_answer_of_which_only_the_end_is_missing_gets_it_from_us(both, chat):
    both.gateway.script = lambda job: [*streamed(job)[:2], ours(job)[-1]]
    reply = await both.post(CHAT, chat(stream=True))
    assert ["", "far", None] == contents(reply.events)
    assert 1 == reply.body.count(b'"finish_reason":"stop"')
    assert b"[DONE]" == reply.events[-1]


async def test_early_comments_do_not_depend_on_who_answers(client_with, chat, autojump_clock):
    client = client_with(
        fleet=FakeFleet(["small"], ["small"]), queue=QueueConfig(keep_alive_s=1.0), gateway_script=ours
    )
    client.gateway.wait_s = 2.0
    reply = await client.post(CHAT, chat(stream=True))
    assert [": queued position=1 estimated_wait=8"] == reply.comments
    assert ["", "Hel", "lo", None] == contents(reply.events)
