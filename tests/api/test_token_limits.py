"""What the configuration allows a prompt and an answer is said before the queue, not after it."""

from dataclasses import replace

import pytest

from api.conftest import client_of

CHAT = "/v1/chat/completions"
COMPLETE = "/v1/completions"
# By these words LiteLLM and opencode know that the conversation is too long; LangChain knows the code.
CONTEXT_EXCEEDED = "this model's maximum context length is 4096 tokens"
INPUT_TOO_LONG = "Input tokens exceed the configured limit of 5 tokens"


@pytest.fixture
def limited(model):
    """A client of a model whose prompts and answers may have so many tokens."""
    return lambda **limits: client_of(replace(model, **limits))


def prompt(tokens: int) -> dict:
    return {"model": "small", "prompt": [3] * tokens}


async def test_a_prompt_over_the_limit_is_refused_naming_the_field(limited, chat):
    client = limited(max_input_tokens=5)
    for path, body, param in [
        (COMPLETE, prompt(6), "prompt"),
        (COMPLETE, {"model": "small", "prompt": "hello " * 9}, "prompt"),
        (CHAT, chat(messages=[{"role": "user", "content": "hello " * 9}]), "messages"),
    ]:
        reply = await client.post(path, body)
        assert (400, param) == (reply.status, reply.json["error"]["param"])
        assert "context_length_exceeded" == reply.error["code"]
        assert INPUT_TOO_LONG in reply.error["message"]
    assert [] == client.gateway.jobs


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "hello " * 3000}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 10_000_000}]}, "messages"),
        (CHAT, {"max_tokens": 4090}, "max_tokens"),
        (CHAT, {"max_completion_tokens": 2**31 - 1}, "max_completion_tokens"),
        (COMPLETE, {"prompt": "hello " * 3000}, "prompt"),
        (COMPLETE, {"prompt": [[3], [3] * 4096]}, "prompt"),
        (COMPLETE, {"prompt": [3] * 4000, "max_tokens": 97}, "max_tokens"),
    ],
)
async def test_what_exceeds_the_context_has_the_code_and_the_words_that_clients_act_on(
    client, chat, path, fields, param
):
    reply = await client.post(path, (chat() if path == CHAT else {}) | fields)
    error = reply.error
    assert (400, param) == (reply.status, error["param"])
    assert ("context_length_exceeded", "invalid_request_error") == (error["code"], error["type"])
    assert CONTEXT_EXCEEDED in error["message"].lower()
    assert [] == client.gateway.jobs


async def test_an_answer_over_the_configured_limit_is_not_a_matter_of_the_context(limited, chat):
    """A client that shortens its conversation would come back with the same max_tokens."""
    reply = await limited(max_output_tokens=7).post(CHAT, chat(max_tokens=8))
    assert (400, "invalid_request") == (reply.status, reply.error["code"])


async def test_a_prompt_at_the_limit_is_served(limited):
    client = limited(max_input_tokens=5)
    assert 200 == (await client.post(COMPLETE, prompt(5))).status


@pytest.mark.parametrize(
    ("path", "param"), [(CHAT, "max_tokens"), (CHAT, "max_completion_tokens"), (COMPLETE, "max_tokens")]
)
async def test_an_answer_over_the_limit_is_refused_naming_the_field(limited, chat, path, param):
    client = limited(max_output_tokens=7)
    body = prompt(3) if path == COMPLETE else chat()
    reply = await client.post(path, body | {param: 8})
    assert (400, param) == (reply.status, reply.json["error"]["param"])
    assert "7 tokens" in reply.json["error"]["message"]
    assert 200 == (await client.post(path, body | {param: 7})).status
    assert 7 == client.gateway.job.sampling.max_tokens


async def test_without_a_wish_an_answer_may_have_what_the_limit_allows(limited, chat):
    client = limited(max_output_tokens=7)
    await client.post(CHAT, chat())
    assert 7 == client.gateway.job.sampling.max_tokens


async def test_a_limit_above_the_models_own_changes_nothing(limited, model):
    client = limited(max_input_tokens=100_000, max_output_tokens=100_000)
    await client.post(COMPLETE, prompt(3))
    assert model.max_model_len - 3 == client.gateway.job.sampling.max_tokens
    reply = await client.post(COMPLETE, prompt(model.max_model_len))
    assert (400, "prompt") == (reply.status, reply.json["error"]["param"])
