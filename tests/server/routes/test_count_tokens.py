"""Anthropic's count of a prompt's tokens, for models of our own engine: exact, bounded and charged."""

import json
from dataclasses import replace

import pytest

from fairlead.base.config import ApiKey, KeyLimits
from fairlead.language.text.embedding import EmbeddingSettings
from fake_fleet import FakeFleet
from server.routes.conftest import client_of, small_model
from server.routes.message_events import COUNT, PATH
from server.routes.remote_responses import complete_response
from server.routes.written_answers import HERMES

BODY = {"model": "small", "messages": [{"role": "user", "content": "hello"}]}
TOOL = {"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}


@pytest.fixture(scope="module")
def hermes(tmp_path_factory):
    return small_model(tmp_path_factory.mktemp("hermes"), HERMES)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"system": "Be kind."},
        {"tools": [TOOL]},
        {"tools": [TOOL], "tool_choice": {"type": "none"}},
        {"thinking": {"type": "disabled"}},
        {"output_config": {"effort": "low"}},
        {"messages": [*BODY["messages"], {"role": "assistant", "content": "The answer"}]},
        {"messages": [{"role": "user", "content": "the quick brown fox " * 500}]},
    ],
)
async def test_count_is_that_of_the_message(hermes, fields):
    client = client_of(hermes)
    counted = await client.post(f"{COUNT}?beta=true", BODY | fields)
    assert (counted.status, client.gateway.jobs) == (200, [])
    answer = await client.post(PATH, BODY | fields | {"max_tokens": 5})
    assert counted.json == {"input_tokens": answer.json["usage"]["input_tokens"]}


async def test_parameters_of_the_answer_have_no_effect(client):
    more = {"max_tokens": 5, "stream": True, "temperature": 0.5, "stop_sequences": ["a"]}
    assert (await client.post(COUNT, BODY | more)).body == (await client.post(COUNT, BODY)).body


async def test_alias_stands_for_its_model(client):
    assert (await client.post(COUNT, BODY | {"model": "tiny"})).status == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
        ({"tools": [{"name": "web_search", "type": "web_search_20250305"}]}, "tools[0].type"),
        ({"messages": [{"role": "user", "content": "hello " * 5000}]}, "messages"),
    ],
)
async def test_faulty_prompt_is_refused_by_its_field(client, fields, param):
    reply = await client.post(COUNT, BODY | fields)
    assert (reply.status, reply.json["type"]) == (400, "error")
    assert (reply.error["type"], reply.error["param"]) == ("invalid_request_error", param)


async def test_unknown_model_is_not_found(client):
    reply = await client.post(COUNT, BODY | {"model": "nothing"})
    assert (reply.status, reply.error["type"]) == (404, "not_found_error")


async def test_model_that_makes_embeddings_has_no_prompts(model):
    embedding = replace(model, embedding=EmbeddingSettings(4, normalized=False))
    reply = await client_of(embedding).post(COUNT, BODY)
    assert (reply.status, reply.error["param"]) == (400, "model")


async def test_count_is_charged_to_the_key_as_a_prompt(model):
    tokens = (await client_of(model).post(COUNT, BODY)).json["input_tokens"]
    estimate = len(json.dumps(BODY)) // 4  # charged until the count is known
    client = client_of(model, ApiKey("sk-1", limits=KeyLimits(tokens_per_minute=tokens + estimate)))
    headers = {"x-api-key": "sk-1"}
    replies = [await client.post(COUNT, BODY, headers=headers) for _ in range(3)]
    assert [reply.status for reply in replies] == [200, 200, 429]
    assert replies[1].headers["x-ratelimit-remaining-tokens"] == str(estimate - tokens)
    assert replies[2].error["type"] == "rate_limit_error"


async def test_refused_count_is_not_charged(model):
    client = client_of(model, ApiKey("sk-1", limits=KeyLimits(tokens_per_minute=10_000)))
    reply = await client.post(COUNT, BODY | {"system": "a" * 9000}, headers={"x-api-key": "sk-1"})
    assert (reply.status, reply.headers["x-ratelimit-remaining-tokens"]) == (400, "10000")


async def test_count_for_a_model_of_another_server_is_relayed(client_with):
    client = client_with(fleet=FakeFleet(["small"], ["remote"]), gateway_script=complete_response)
    body = json.dumps(BODY | {"model": "remote", "unknown": 1}).encode()
    assert (await client.post(COUNT, body)).status == 200
    job = client.gateway.job
    assert (job.relay.path, job.relay.body) == (COUNT, body)


async def test_count_for_a_model_of_both_is_made_here(client_with):
    client = client_with(fleet=FakeFleet(["small"], ["small"]), gateway_script=complete_response)
    reply = await client.post(COUNT, BODY)
    assert (set(reply.json), client.gateway.jobs) == ({"input_tokens"}, [])
