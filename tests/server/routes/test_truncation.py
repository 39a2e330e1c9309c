"""Texts that are too long are cut where the request says so, and refused otherwise."""

import dataclasses

import pytest

from fairlead.language.text.embedding import EmbeddingSettings
from server.routes.comparing import embedder_client, scorer_client
from server.routes.conftest import client_of
from server.routes.test_embeddings import script

COMPLETIONS, EMBEDDINGS, RERANK, SCORE = "/v1/completions", "/v1/embeddings", "/v1/rerank", "/v1/score"
WORDS = "the quick brown fox one two three hello world "
LONG = WORDS * 1000


@pytest.fixture
def embedder(client_with, model):
    made = client_with(
        models={"small": dataclasses.replace(model, embedding=EmbeddingSettings(4, normalized=False))}
    )
    made.gateway.script = script
    return made


def prompts_of(client):
    return [list(prompt) for prompt in client.gateway.job.prompts]


@pytest.mark.parametrize("text", [WORDS, LONG], ids=["short", "long"])
@pytest.mark.parametrize(("side", "expected"), [(None, "left"), ("left", "left"), ("right", "right")])
async def test_completion_keeps_the_end_of_its_prompt(model, text, side, expected):
    client = client_of(model)
    body = {"prompt": [text, "hello"], "truncate_prompt_tokens": 7, "truncation_side": side}
    reply = await client.post(COMPLETIONS, body)
    assert reply.status == 200, reply.body
    ids = model.tokenizer.encode(text)
    cut = ids[-7:] if expected == "left" else ids[:7]
    assert prompts_of(client) == [cut, model.encode_prompt("hello")]
    assert reply.json["usage"]["prompt_tokens"] == 7 + len(model.encode_prompt("hello"))


async def test_token_ids_are_cut_as_texts_are(model):
    client = client_of(model)
    await client.post(COMPLETIONS, {"prompt": [5, 6, 7, 8], "truncate_prompt_tokens": 2})
    assert prompts_of(client) == [[7, 8]]


async def test_echo_is_of_the_cut_prompt(model):
    client = client_of(model)
    body = {"prompt": LONG, "truncate_prompt_tokens": 5, "echo": True}
    reply = await client.post(COMPLETIONS, body)
    shown = model.tokenizer.decode(model.tokenizer.encode(LONG)[-5:])
    assert reply.json["choices"][0]["text"] == shown + "Hello world"


@pytest.mark.parametrize(("max_tokens", "room"), [(None, 4095), (96, 4000), (9999, 1)])
async def test_as_many_as_fit_leave_room_for_the_answer(model, max_tokens, room):
    client = client_of(model)
    await client.post(COMPLETIONS, {"prompt": LONG, "truncate_prompt_tokens": -1, "max_tokens": max_tokens})
    assert prompts_of(client) == [model.tokenizer.encode(LONG)[-room:]]


@pytest.mark.parametrize(
    ("path", "fields", "side"),
    [
        (EMBEDDINGS, {"truncate_prompt_tokens": -1}, "right"),
        (EMBEDDINGS, {"truncate_prompt_tokens": -1, "truncation_side": "left"}, "left"),
        ("/api/embed", {"truncate": True}, "right"),
        ("/api/embed", {}, "right"),
    ],
)
async def test_embedding_keeps_the_beginning_of_its_texts(embedder, model, path, fields, side):
    reply = await embedder.post(path, {"input": ["hello", LONG]} | fields)
    assert reply.status == 200, reply.body
    ids = model.tokenizer.encode(LONG)
    cut = ids[:4095] if side == "right" else ids[-4095:]
    assert prompts_of(embedder) == [model.encode_prompt("hello"), cut]


async def test_older_route_of_ollama_cuts_its_text(embedder, model):
    assert (await embedder.post("/api/embeddings", {"prompt": LONG})).status == 200
    assert prompts_of(embedder) == [model.tokenizer.encode(LONG)[:4095]]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (EMBEDDINGS, {"input": LONG}, "input"),
        (COMPLETIONS, {"prompt": LONG}, "prompt"),
    ],
)
async def test_too_long_a_text_is_refused_without_truncation(client_with, embedder, path, body, param):
    client = embedder if path == EMBEDDINGS else client_with()
    reply = await client.post(path, body)
    assert (reply.status, reply.error["code"], reply.error["param"]) == (
        400,
        "context_length_exceeded",
        param,
    )


async def test_ollama_refuses_too_long_a_text_if_it_may_not_be_cut(embedder):
    reply = await embedder.post("/api/embed", {"input": LONG, "truncate": False})
    assert reply.status == 400
    assert reply.json["error"].startswith("input: ")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"truncate_prompt_tokens": 0}, "must be at least 1, or -1 for as many as fit"),
        ({"truncate_prompt_tokens": 4096}, "a prompt of this model may have 4095 tokens"),
        ({"truncate_prompt_tokens": -2}, "expected `int` >= -1"),
    ],
)
async def test_wrong_number_is_refused_by_its_field(client_with, embedder, fields, message):
    for client, path, body in ((client_with(), COMPLETIONS, "prompt"), (embedder, EMBEDDINGS, "input")):
        reply = await client.post(path, {body: LONG} | fields)
        assert (reply.status, reply.error["message"]) == (400, f"truncate_prompt_tokens: {message}")


async def test_truncation_of_the_text_before_a_suffix_is_refused(client_with):
    body = {"prompt": "a", "suffix": "b", "truncate_prompt_tokens": 2}
    reply = await client_with().post(COMPLETIONS, body)
    assert reply.error["message"] == "truncate_prompt_tokens: cannot be combined with suffix"


async def test_embedding_models_compare_cut_texts(model):
    client = embedder_client(model)
    body = {"query": "hello", "documents": [LONG, "world"], "truncate_prompt_tokens": 6}
    await client.post(RERANK, body)
    ids = model.tokenizer.encode(LONG)
    assert prompts_of(client) == [model.encode_prompt("hello"), ids[:6], model.encode_prompt("world")]


@pytest.mark.parametrize("side", ["left", "right"])
async def test_document_is_cut_beside_its_whole_query(model, side):
    client = scorer_client(model)
    texts = {"query": "hello", "documents": [LONG, "world"]}
    body = texts | {"truncate_prompt_tokens": 40, "truncation_side": side}
    reply = await client.post(RERANK, body)
    assert reply.status == 200, reply.body
    long, short = prompts_of(client)
    assert 30 < len(long) <= 40
    assert len(short) < 40
    text = model.tokenizer.decode(long, skip_special_tokens=False)
    assert "hello" in text
    shown = WORDS.strip()[:10] if side == "right" else WORDS.strip()[-10:]
    assert shown in text


async def test_query_that_leaves_no_room_is_refused_by_its_field(model):
    client = scorer_client(model)
    body = {"text_1": WORDS * 5, "text_2": "hello", "truncate_prompt_tokens": 12}
    reply = await client.post(SCORE, body)
    assert reply.error["message"] == "text_1: leaves no room for text_2 within 12 tokens"
