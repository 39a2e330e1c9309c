"""Token limits of prompts and responses are checked before a request is queued, not after."""

from dataclasses import replace

import pytest

from server.routes.conftest import client_of

CHAT = "/v1/chat/completions"
COMPLETE = "/v1/completions"
# LiteLLM and opencode recognize by these words that a conversation is too long, LangChain by the code.
CONTEXT_EXCEEDED = "this model's maximum context length is 4096 tokens"
INPUT_TOO_LONG = "Input tokens exceed the configured limit of 5 tokens"


@pytest.fixture
def limited(model):
    """A function that returns a client of a model with these token limits."""
    return lambda **limits: client_of(replace(model, **limits))


def prompt(tokens: int) -> dict:
    return {"model": "small", "prompt": [3] * tokens}


async def test_prompt_over_the_limit_is_refused_naming_the_field(limited, chat):
    client = limited(max_input_tokens=5)
    for path, body, param in [
        (COMPLETE, prompt(6), "prompt"),
        (COMPLETE, {"model": "small", "prompt": "hello " * 9}, "prompt"),
        (CHAT, chat(messages=[{"role": "user", "content": "hello " * 9}]), "messages"),
    ]:
        reply = await client.post(path, body)
        assert (reply.status, reply.json["error"]["param"]) == (400, param)
        assert reply.error["code"] == "context_length_exceeded"
        assert INPUT_TOO_LONG in reply.error["message"]
    assert client.gateway.jobs == []


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "hello " * 3000}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 10_000_000}]}, "messages"),
        (COMPLETE, {"prompt": "hello " * 3000}, "prompt"),
        (COMPLETE, {"prompt": [[3], [3] * 4096]}, "prompt"),
    ],
)
async def test_prompt_above_the_context_has_the_code_and_words_that_clients_recognize(
    client, chat, path, fields, param
):
    reply = await client.post(path, (chat() if path == CHAT else {}) | fields)
    error = reply.error
    assert (reply.status, error["param"]) == (400, param)
    assert (error["code"], error["type"]) == ("context_length_exceeded", "invalid_request_error")
    assert CONTEXT_EXCEEDED in error["message"].lower()
    assert client.gateway.jobs == []


async def test_prompt_at_the_limit_is_served(limited):
    client = limited(max_input_tokens=5)
    assert (await client.post(COMPLETE, prompt(5))).status == 200


@pytest.mark.parametrize(
    ("path", "param"), [(CHAT, "max_tokens"), (CHAT, "max_completion_tokens"), (COMPLETE, "max_tokens")]
)
async def test_max_tokens_above_the_remaining_context_is_reduced_to_it(client, model, chat, path, param):
    body = prompt(4000) if path == COMPLETE else chat(messages=[{"role": "user", "content": "hello " * 500}])
    for given in (2**31 - 1, 4096):
        client.gateway.jobs.clear()
        assert (await client.post(path, body | {param: given})).status == 200
        job = client.gateway.job
        assert job.sampling.max_tokens == model.max_model_len - job.prompt_tokens


@pytest.mark.parametrize(
    ("path", "param"), [(CHAT, "max_tokens"), (CHAT, "max_completion_tokens"), (COMPLETE, "max_tokens")]
)
async def test_max_tokens_above_the_configured_limit_is_reduced_to_it(limited, chat, path, param):
    client = limited(max_output_tokens=7)
    body = prompt(3) if path == COMPLETE else chat()
    for given, expected in ((8, 7), (7, 7), (6, 6)):
        client.gateway.jobs.clear()
        assert (await client.post(path, body | {param: given})).status == 200
        assert client.gateway.job.sampling.max_tokens == expected


async def test_short_prompt_beside_a_long_one_keeps_its_max_tokens(client):
    await client.post(COMPLETE, {"model": "small", "prompt": [[3], [3] * 4090], "max_tokens": 100})
    assert client.gateway.job.sampling.max_tokens == 100  # the engine reduces it for the long prompt


async def test_min_tokens_above_the_remaining_context_is_refused(client):
    reply = await client.post(COMPLETE, prompt(4000) | {"min_tokens": 97})
    assert (reply.status, reply.error["param"]) == (400, "min_tokens")


async def test_without_max_tokens_the_configured_limit_applies(limited, chat):
    client = limited(max_output_tokens=7)
    await client.post(CHAT, chat())
    assert client.gateway.job.sampling.max_tokens == 7


async def test_limit_above_the_models_own_changes_nothing(limited, model):
    client = limited(max_input_tokens=100_000, max_output_tokens=100_000)
    await client.post(COMPLETE, prompt(3))
    assert model.max_model_len - 3 == client.gateway.job.sampling.max_tokens
    reply = await client.post(COMPLETE, prompt(model.max_model_len))
    assert (reply.status, reply.json["error"]["param"]) == (400, "prompt")
