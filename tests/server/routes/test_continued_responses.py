"""Responses that continue others, and those of models that other servers have."""

import json

import pytest
import trio

from fairlead.base.config import Config, Limits, ModelConfig
from fairlead.base.errors import NodeFailed
from fairlead.base.job import Delta
from fairlead.generation import offload
from fake_fleet import FakeFleet
from server.routes import remote_responses
from server.routes.responses_client import PATH, body_of, created, events_of, kept, running, script_of


@pytest.fixture
def client(client, model):
    client.model = model
    return client


def prompt_of(client):
    """Return the text of the last job's prompt."""
    job = client.gateway.jobs[-1]
    return client.model.tokenizer.decode(list(job.prompts[0]))


# Continuing ------------------------------------------------------------------------------------------


async def test_response_continues_the_input_and_output_of_the_chain(client):
    answer = await created(client, "one", instructions="only for the first")
    client.gateway.script = script_of("second answer")
    items = [{"role": "user", "content": "two"}, {"role": "user", "content": "three"}]
    second = await created(client, items, previous_response_id=answer["id"])
    third = await created(client, "four", previous_response_id=second["id"], instructions="be brief")
    assert third["previous_response_id"] == second["id"]
    assert prompt_of(client) == (
        "<|system|>be brief\n<|user|>one\n<|assistant|>Hello world\n<|user|>two\n<|user|>three\n"
        "<|assistant|>second answer\n<|user|>four\n<|assistant|>"
    )


async def test_continued_response_needs_no_input(client):
    answer = await created(client, "one")
    reply = await client.post(PATH, {"model": "small", "previous_response_id": answer["id"]})
    assert reply.status == 200
    assert prompt_of(client).endswith("<|assistant|>Hello world\n<|assistant|>")


async def test_two_responses_may_continue_the_same_one(client):
    answer = await created(client, "one")
    for text in ("two", "three"):
        await created(client, text, previous_response_id=answer["id"])
        assert prompt_of(client).count("<|user|>") == 2


async def test_response_that_is_not_stored_may_continue_one_that_is(client):
    answer = await created(client, "one")
    await created(client, "two", previous_response_id=answer["id"], store=False)
    assert prompt_of(client).count("<|user|>") == 2
    assert (await kept(client))[0] == 1


async def test_unknown_previous_response_is_refused_as_by_openai(client):
    reply = await client.post(PATH, body_of(previous_response_id="resp_unknown"))
    assert reply.status == 400
    assert {name: reply.error[name] for name in ("type", "code", "param")} == {
        "type": "invalid_request_error",
        "code": "previous_response_not_found",
        "param": "previous_response_id",
    }
    assert client.gateway.jobs == []


async def test_response_whose_chain_has_a_gap_cannot_be_continued(client):
    first = await created(client)
    second = await created(client, previous_response_id=first["id"])
    await client.send("DELETE", f"{PATH}/{first['id']}", b"")
    reply = await client.post(PATH, body_of(previous_response_id=second["id"]))
    assert (reply.status, reply.error["code"]) == (400, "previous_response_not_found")
    assert first["id"] in reply.error["message"]


async def test_failed_response_cannot_be_continued(client):
    client.gateway.script = lambda job: [[Delta(0, "Hello", [1])], NodeFailed("gone")]
    last = events_of(await client.post(PATH, body_of(stream=True)))[-1]
    reply = await client.post(PATH, body_of(previous_response_id=last["response"]["id"]))
    assert (reply.status, reply.error["param"]) == (400, "previous_response_id")
    assert "failed" in reply.error["message"]


async def test_conversation_as_long_as_no_body_may_be_is_refused(client_with, tmp_path):
    card = ModelConfig(path=tmp_path, name="small")
    client = client_with(config=Config(models=(card,), limits=Limits(body_bytes=4000)))
    answer = await created(client, "x" * 2000)
    reply = await client.post(PATH, body_of("x" * 2000, previous_response_id=answer["id"]))
    assert reply.status == 200
    reply = await client.post(PATH, body_of(previous_response_id=reply.json["id"]))
    assert (reply.status, reply.error["param"]) == (400, "previous_response_id")


async def test_conversation_grows_no_longer_than_a_body_and_one_answer(client_with, tmp_path):
    card = ModelConfig(path=tmp_path, name="small")
    client = client_with(config=Config(models=(card,), limits=Limits(body_bytes=4000)))
    conversation = (await client.post("/v1/conversations", {})).json["id"]
    await created(client, "x" * 1000, conversation=conversation)
    await created(client, "x" * 1000, conversation=conversation)
    reply = await client.post(PATH, body_of("x" * 1500, conversation=conversation))
    assert (reply.status, reply.error["param"]) == (400, "conversation")
    assert "limits.bodyBytes" in reply.error["message"]
    listed = (await client.get(f"/v1/conversations/{conversation}/items")).json["data"]
    assert len(listed) == 4


async def test_long_history_is_read_and_encoded_in_threads(client, monkeypatch):
    """Its body is short."""
    threads = []
    run = trio.to_thread.run_sync

    async def run_sync(function, *arguments, **options):
        threads.append(arguments)
        return await run(function, *arguments, **options)

    answer = await created(client, "word " * 500)
    monkeypatch.setattr(trio.to_thread, "run_sync", run_sync)
    monkeypatch.setattr("fairlead.server.responses.routes.LARGE_BODY_BYTES", 2000)
    monkeypatch.setattr(offload, "LONG_BODY_BYTES", 2000)
    await created(client, "hello", store=False)
    assert threads == []
    await created(client, previous_response_id=answer["id"])
    assert len(threads) > 2


# Relayed models --------------------------------------------------------------------------------------


async def test_response_of_a_relayed_model_is_its_servers(relay_client):
    body = {"model": "remote", "input": "hello", "previous_response_id": "theirs", "background": True}
    reply = await relay_client.post(PATH, body)
    assert (reply.status, reply.body) == (200, remote_responses.ANSWER)
    assert json.loads(relay_client.gateway.job.relay.body) == body
    assert await kept(relay_client) == (0, 0)


async def test_response_that_another_server_gave_is_not_kept(client_with):
    client = client_with(
        fleet=FakeFleet(["small"], ["small"]), gateway_script=remote_responses.complete_response
    )
    reply = await client.post(PATH, body_of())
    assert (reply.status, reply.body) == (200, remote_responses.ANSWER)
    assert await kept(client) == (0, 0)


async def test_continued_response_is_not_relayed_where_it_cannot_be_translated(client_with):
    client = client_with(fleet=FakeFleet(["small"], ["small"]))
    answer = await created(client)
    assert client.gateway.job.relay is not None
    await created(client, previous_response_id=answer["id"])
    assert client.gateway.jobs[-1].relay is None


@pytest.mark.parametrize("name", ["small", "remote"])
async def test_continued_response_is_relayed_as_a_chat_with_its_history(client_with, name):
    fleet = FakeFleet(["small"], ["small", "remote"], dialects=("openai",))
    client = client_with(fleet=fleet, gateway_script=script_of("an answer"))
    answer = await created(client, "one", model=name)
    assert not client.gateway.jobs[-1].relay.only_chat
    assert (await client.get(f"{PATH}/{answer['id']}")).json == answer
    await created(client, "two", model=name, previous_response_id=answer["id"])
    relay = client.gateway.jobs[-1].relay
    assert relay.only_chat
    assert [message["content"] for message in json.loads(relay.chat.body)["messages"]] == [
        "one",
        "an answer",
        "two",
    ]


@pytest.mark.parametrize("field", ["previous_response_id", "background"])
async def test_request_that_cannot_be_translated_is_relayed_unless_it_needs_what_is_kept(client_with, field):
    fleet = FakeFleet(["small"], ["remote"], dialects=("openai",))
    client = client_with(fleet=fleet, gateway_script=script_of("an answer"))
    answer = await created(client)
    client.gateway.script = remote_responses.complete_response
    body = body_of(model="remote", include=["message.output_text.logprobs"])
    reply = await client.post(PATH, body)
    assert (reply.status, reply.body) == (200, remote_responses.ANSWER)
    assert (await kept(client))[0] == 1
    async with running(client):
        value = True if field == "background" else answer["id"]
        reply = await client.post(PATH, {**body, field: value})
        assert (reply.status, reply.error["param"]) == (400, field)
        assert (await kept(client))[0] == 1


async def test_input_is_counted_as_a_response_would_count_it(client):
    answer = await created(client, "one")
    tools = [{"type": "function", "name": "weather", "parameters": {"type": "object"}}]
    for fields in (
        {"input": "two"},
        {"input": "two", "instructions": "be brief", "tools": tools},
        {"input": "two", "previous_response_id": answer["id"]},
        {"previous_response_id": answer["id"]},
    ):
        body = {"model": "small", **fields}
        counted = await client.post(f"{PATH}/input_tokens", body)
        response = (await client.post(PATH, body)).json
        expected = {"object": "response.input_tokens", "input_tokens": response["usage"]["input_tokens"]}
        assert (counted.status, counted.json) == (200, expected)
    refused = await client.post(f"{PATH}/input_tokens", {"model": "small", "input": 7})
    assert (refused.status, refused.error["param"]) == (400, "input")
    unknown = await client.post(f"{PATH}/input_tokens", {"input": "a", "previous_response_id": "resp_none"})
    assert (unknown.status, unknown.error["param"]) == (400, "previous_response_id")
