"""Fields of other servers' APIs: those that are not served are refused by name, unless they are off."""

import json
from dataclasses import replace

import pytest

from fairlead.base.job import Delta
from fairlead.dialects import unserved
from fairlead.dialects.anthropic.requests import CreateMessageRequest
from fairlead.dialects.openai.chat import ChatCompletionRequest
from fairlead.dialects.openai.completions import CompletionRequest
from fairlead.dialects.openai.embeddings import EmbeddingRequest
from fairlead.dialects.rerank.rerank import RerankRequest
from fairlead.dialects.rerank.score import ScoreRequest
from fairlead.language.text.embedding import EmbeddingSettings
from fairlead.server.routes.tokenize import TokenizeRequest
from fake_fleet import FakeFleet
from server.routes.conftest import client_of

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
ANTHROPIC = "/v1/messages"
RERANK, SCORE = "/v1/rerank", "/v1/score"
MESSAGES = [{"role": "user", "content": "hello"}]
# By path: a minimal valid body, the fields that are refused, and the type of the fields that are served.
ROUTES = {
    CHAT: ({"messages": MESSAGES}, unserved.CHAT, ChatCompletionRequest),
    COMPLETIONS: ({"prompt": "hello"}, unserved.COMPLETION, CompletionRequest),
    EMBEDDINGS: ({"input": "hello"}, unserved.EMBEDDING, EmbeddingRequest),
    ANTHROPIC: ({"messages": MESSAGES, "max_tokens": 9}, unserved.MESSAGES, CreateMessageRequest),
    RERANK: ({"query": "hello", "documents": ["hello"]}, unserved.COMPARISON, RerankRequest),
    SCORE: ({"text_1": "hello", "text_2": "hello"}, unserved.COMPARISON, ScoreRequest),
    "/tokenize": ({"messages": MESSAGES}, unserved.TOKENIZE, TokenizeRequest),
}
# By path: the fields that it serves and others ignore.
SERVED_HERE = {ANTHROPIC: {"metadata"}} | {
    path: {"truncation_side"} for path in (COMPLETIONS, EMBEDDINGS, RERANK, SCORE)
}
EMBEDDED = (EMBEDDINGS, RERANK, SCORE)
FIELDS = [(path, name) for path, (_, fields, _) in ROUTES.items() for name in fields]
# Values that clients send. All other fields get an object, which turns no field off.
EXAMPLES = {
    "structured_outputs": {"json": {"type": "object"}},
    "guided_json": {},
    "guided_choice": ["yes", "no"],
    "grammar": 'root ::= "a"',
    "json_schema": {},
    "bad_words": ["no"],
    "use_beam_search": True,
    "length_penalty": 1.5,
    "n_predict": 5,
    "prompt_logprobs": 0,
    "truncate_prompt_tokens": -1,
    "skip_special_tokens": False,
    "echo": True,
    "best_of": 2,
    "functions": [{"name": "f"}],
    "function_call": {"name": "f"},
    "parallel_tool_calls": False,
    "modalities": ["text", "audio"],
    "mirostat": 1,
    "n": 2,
    "documents": [{"text": "a"}],
}


@pytest.fixture(scope="module")
def clients(model):
    def vector(job):
        return [[Delta(i, finish_reason="stop", vector=b"\0" * 8) for i in range(job.sequences)]]

    embedding = replace(model, embedding=EmbeddingSettings(2, normalized=False))
    return {
        path: client_of(embedding, gateway_script=vector) if path in EMBEDDED else client_of(model)
        for path in ROUTES
    }


@pytest.mark.parametrize(("path", "name"), FIELDS)
async def test_field_that_is_not_served_is_refused_by_name(clients, path, name):
    body, fields, _ = ROUTES[path]
    reply = await clients[path].post(path, body | {name: EXAMPLES.get(name, {"on": True})})
    assert (reply.status, reply.error["code"], reply.error["param"]) == (400, "invalid_request", name)
    assert reply.error["type"] == "invalid_request_error"
    advice = f"; use {fields[name].instead}" if fields[name].instead else ""
    assert reply.error["message"] == f"{name}: is not served{advice}"
    assert clients[path].gateway.jobs == []


@pytest.mark.parametrize("path", ROUTES)
async def test_null_and_values_that_mean_off_are_accepted(clients, path):
    client = clients[path]
    body, fields, _ = ROUTES[path]
    most = max(len(field.off) for field in fields.values())
    bodies = [dict.fromkeys(fields)]
    bodies += [{name: field.off[i] for name, field in fields.items() if field.off[i:]} for i in range(most)]
    for off in bodies:
        assert off
        reply = await client.post(path, body | off)
        assert reply.status == 200, reply.body
    client.gateway.jobs.clear()


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        ("best_of", 1.0, 200),
        ("best_of", True, 400),
        ("use_beam_search", 0, 400),
        ("length_penalty", 1, 200),
        ("length_penalty", 1.0000001, 400),
        ("functions", [[]], 400),
        ("modalities", ["text", "text"], 400),
        ("grammar", " ", 400),
        ("grammar", "\ud800", 400),
        ("grammar", "x" * 1_000_000, 400),
    ],
)
async def test_only_the_exact_value_is_accepted_as_off(clients, chat, name, value, status):
    reply = await clients[CHAT].post(CHAT, chat(**{name: value}))
    assert reply.status == status
    clients[CHAT].gateway.jobs.clear()


@pytest.mark.parametrize("path", ROUTES)
async def test_fields_without_effect_and_unknown_fields_are_ignored(clients, path):
    body, _, _ = ROUTES[path]
    known = dict.fromkeys(unserved.IGNORED.keys() - SERVED_HERE.get(path, set()), "anything")
    reply = await clients[path].post(path, body | known | {"never_heard_of": [1]})
    assert reply.status == 200, reply.body
    clients[path].gateway.jobs.clear()


@pytest.mark.parametrize("path", ROUTES)
def test_field_is_served_refused_or_ignored_and_never_two_of_these(path):
    _, fields, request = ROUTES[path]
    assert not fields.keys() & unserved.IGNORED.keys()
    ignored = unserved.IGNORED.keys() - SERVED_HERE.get(path, set())
    assert not set(request.__struct_fields__) & (fields.keys() | ignored)


async def test_relayed_request_keeps_all_of_its_fields(relay_client):
    body = {"model": "remote", "messages": MESSAGES, **dict.fromkeys(unserved.CHAT, "on")}
    assert (await relay_client.post(CHAT, body)).status == 200
    assert json.loads(relay_client.gateway.job.relay.body) == body


async def test_field_that_our_engine_lacks_is_refused_even_if_another_server_has_it(client_with):
    both = FakeFleet(["small"], ["small"])
    client = client_with(fleet=both)
    reply = await client.post(CHAT, {"model": "small", "messages": MESSAGES, "json_schema": {}})
    assert (reply.status, reply.error["param"]) == (400, "json_schema")


# Control tokens in raw prompts ------------------------------------------------------------------------


async def test_control_tokens_of_a_raw_prompt_are_parsed_unless_the_request_selects_text(client, model):
    prompt = "hello <eos>"
    for fields in ({}, {"special_tokens": "parse"}, {"special_tokens": None}):
        client.gateway.jobs.clear()
        assert (await client.post(COMPLETIONS, {"prompt": prompt, **fields})).status == 200
        assert list(client.gateway.job.prompts[0]) == [*model.encode_prompt("hello "), 0]
    client.gateway.jobs.clear()
    await client.post(COMPLETIONS, {"prompt": [prompt, "<eos>"], "special_tokens": "text"})
    for ids, text in zip(client.gateway.job.prompts, (prompt, "<eos>"), strict=True):
        assert 0 not in ids
        assert model.tokenizer.decode(ids) == text


async def test_tokenize_returns_the_tokens_that_a_request_would_have(client, model):
    async def tokens(**fields):
        reply = await client.post("/tokenize", fields)
        assert reply.status == 200, reply.body
        return reply.json["tokens"]

    assert await tokens(prompt="<eos>") == [0]
    assert 0 not in await tokens(prompt="<eos>", special_tokens="text")
    messages = [{"role": "user", "content": "<eos>"}]
    await client.post(CHAT, {"messages": messages})
    assert list(client.gateway.job.prompts[0]) == await tokens(messages=messages)
    assert 0 not in client.gateway.job.prompts[0]


@pytest.mark.parametrize("field", [{"special_tokens": "text"}, {"add_special_tokens": True}])
async def test_fields_for_raw_prompts_are_refused_with_messages(client, field):
    reply = await client.post("/tokenize", {"messages": MESSAGES, **field})
    assert (reply.status, reply.error["param"]) == (400, next(iter(field)))


@pytest.mark.parametrize("value", ["", "TEXT", "none", 1, True, []])
async def test_special_tokens_must_be_text_or_parse(client, value):
    for path, body in ((COMPLETIONS, {"prompt": "a"}), ("/tokenize", {"prompt": "a"})):
        reply = await client.post(path, body | {"special_tokens": value})
        assert (reply.status, reply.error["param"]) == (400, "special_tokens")


async def test_models_setting_allows_control_tokens_in_chats(model):
    client = client_of(replace(model, special_tokens="parse"))
    await client.post(CHAT, {"messages": [{"role": "user", "content": "<eos>"}]})
    assert 0 in client.gateway.job.prompts[0]
