"""Fields of OpenAI's Responses API: what they change, and which values are refused."""

import json

import jsonschema
import msgspec
import pytest

from fairlead.dialects import unserved
from fairlead.dialects.responses.responses import ResponsesRequest
from fairlead.server.routes import openapi
from fairlead.server.routes.route_table import ROUTES
from fake_fleet import FakeFleet
from server.routes.conftest import client_of, small_model
from server.routes.test_responses import FORM, FUNCTION, grammar_of
from server.routes.typed_responses import RESPONSES
from server.routes.written_answers import HERMES, accepts, refusal, vocabulary_of


@pytest.fixture(scope="module")
def hermes(tmp_path_factory):
    return small_model(tmp_path_factory.mktemp("hermes"), HERMES)


@pytest.fixture
def client(hermes):
    return client_of(hermes)


# Form of the text, sampling, members of the response -------------------------------------------------


@pytest.mark.parametrize(
    ("text", "right", "wrong"),
    [
        ({"format": FORM, "verbosity": "medium"}, '{"a": 5}', '{"a": "b"}'),
        ({"format": {"type": "json_object"}}, '{"x": []}', "[]"),
    ],
)
async def test_form_of_the_text_constrains_the_answer(client, hermes, text, right, wrong):
    grammar = await grammar_of(client, text=text)
    vocabulary = vocabulary_of(hermes)
    assert accepts(hermes, vocabulary, grammar, right)
    assert not accepts(hermes, vocabulary, grammar, wrong)


async def test_constraints_of_vllm_are_served_too(client, hermes):
    grammar = await grammar_of(client, structured_outputs={"regex": "[0-9]+"}, text={})
    assert accepts(hermes, vocabulary_of(hermes), grammar, "42")


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({}, "<|assistant|>"),
        ({"reasoning": {"effort": "high", "summary": "auto"}}, "effort high\n<|assistant|>"),
        ({"reasoning": {"effort": "none"}}, "<|assistant|><think>\n\n</think>\n\n"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "<|assistant|><think>\n\n</think>\n\n"),
    ],
)
async def test_effort_reaches_the_template(client, hermes, fields, end):
    await client.post(RESPONSES, {"input": "hello", **fields})
    assert hermes.tokenizer.decode(client.gateway.job.prompts[0]).endswith(end)


async def test_response_repeats_the_request(client):
    fields = {
        "instructions": "Be brief.",
        "tools": [FUNCTION],
        "tool_choice": {"type": "function", "name": "weather"},
        "parallel_tool_calls": False,
        "text": {"format": FORM},
        "reasoning": {"effort": "low"},
        "max_output_tokens": 50,
        "max_tool_calls": 3,
        "metadata": {"a": "b"},
        "user": "me",
        "safety_identifier": "you",
        "prompt_cache_key": "key",
        "service_tier": "auto",
        "temperature": 0.5,
        "top_p": 0.5,
        "presence_penalty": 0.25,
        "frequency_penalty": -0.5,
        "include": ["reasoning.encrypted_content"],
        "stream_options": {"include_obfuscation": False},
        "store": True,
    }
    response = (await client.post(RESPONSES, {"input": "hello", **fields})).json
    expected = {name: fields[name] for name in fields.keys() & response.keys()}
    expected |= {"reasoning": {"effort": "low", "summary": None}, "service_tier": "default"}
    expected["text"] = {"format": {**FORM, "description": None, "lenient": None}}
    assert {name: response[name] for name in expected} == expected
    assert (response["object"], response["model"], response["truncation"]) == (
        "response",
        "small",
        "disabled",
    )
    assert response["id"] == client.gateway.job.id
    assert response["id"].startswith("resp")
    assert fields.keys() - response.keys() == {"include", "stream_options"}


async def test_harmless_values_are_accepted(client):
    harmless = {
        "truncation": "disabled",
        "background": False,
        "store": False,
        "previous_response_id": None,
        "conversation": None,
        "include": ["file_search_call.results", "web_search_call.results"],
        "top_logprobs": 0,
        "tool_choice": "auto",
        "tools": [],
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "service_tier": "flex",
        "never_heard_of": [1],
    }
    reply = await client.post(RESPONSES, {"input": "hello", **harmless})
    assert reply.status == 200, reply.body


# Hostile bodies --------------------------------------------------------------------------------------

DOCUMENT = json.loads(msgspec.json.encode(openapi.document(ROUTES)))
PROPERTIES = DOCUMENT["components"]["schemas"]["ResponsesRequest"]["properties"]
WRONG = [5, -1, 1.5, 10**30, True, "x", "", [], [5], [[]], [None], {}, {"type": 5}, {"x": {}}, [{"type": []}]]


@pytest.mark.parametrize("name", ResponsesRequest.__struct_fields__)
async def test_value_of_a_wrong_type_is_refused_by_name(client, name):
    schema = {"$ref": "#/properties", "components": DOCUMENT["components"], "properties": PROPERTIES[name]}
    valid = jsonschema.Draft202012Validator(schema)
    wrong = [value for value in WRONG if not valid.is_valid(value)]
    for value in wrong:
        reply = await client.post(RESPONSES, {"input": "hello", name: value})
        assert reply.status == (404 if name == "model" and isinstance(value, str) else 400), (name, value)
        assert reply.error["param"].startswith(name), (name, value, reply.body)
    assert wrong or name in {"model", "input"}
    assert client.gateway.jobs == []


@pytest.mark.parametrize("name", unserved.RESPONSES)
async def test_field_that_is_not_served_is_refused_by_name(client, name):
    is_number = name in {"max_completion_tokens", "max_tokens", "n"}  # the types of all envelopes
    value = 2 if is_number else {"on": True}
    param, message = await refusal(client, RESPONSES, {"input": "hello", name: value})
    assert param == name
    assert message.startswith(f"{name}: is not served")


async def test_verbosity_other_than_the_default_is_refused(client):
    param, message = await refusal(client, RESPONSES, {"input": "hello", "text": {"verbosity": "low"}})
    assert (param, message) == ("text.verbosity", "text.verbosity: is not served")


def test_field_is_served_or_refused_and_never_both():
    assert not set(ResponsesRequest.__struct_fields__) & unserved.RESPONSES.keys()


# Other servers ---------------------------------------------------------------------------------------


async def test_relayed_request_keeps_its_bytes(client_with):
    client = client_with(fleet=FakeFleet(["small"], ["remote"]))
    body = json.dumps({"model": "remote", "input": [{"type": "item_reference", "id": "x"}], "tools": [5]})
    await client.post(RESPONSES, body.encode())
    assert bytes(client.gateway.job.relay.body) == body.encode()
    assert client.gateway.job.relay.path == RESPONSES
