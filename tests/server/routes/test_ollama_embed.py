"""Ollama's /api/embed and /api/embeddings for our own models."""

import dataclasses
import math

import msgspec
import pytest

from fairlead.dialects.ollama.shapes import OllamaEmbedding, OllamaEmbeddings
from fairlead.language.text.embedding import EmbeddingSettings
from server.routes.test_embeddings import WIDTH, script, vector_of

EMBED, EMBEDDINGS = "/api/embed", "/api/embeddings"


@pytest.fixture
def client(client_with, model):
    embedder = dataclasses.replace(model, embedding=EmbeddingSettings(WIDTH, normalized=False))
    made = client_with(models={"small": embedder})
    made.gateway.script = script
    return made


def scaled(numbers):
    return [number / math.hypot(*numbers) for number in numbers]


async def test_vectors_have_length_one_and_the_order_of_their_texts(client, model):
    reply = await client.post(EMBED, {"model": "tiny", "input": ["hello", "one two"], "truncate": True})
    answer = msgspec.json.decode(reply.body, type=OllamaEmbeddings, strict=True)
    assert answer.embeddings == [pytest.approx(scaled(vector_of(index))) for index in range(2)]
    tokens = len(model.encode_prompt("hello")) + len(model.encode_prompt("one two"))
    assert (answer.model, answer.prompt_eval_count) == ("small", tokens)
    assert answer.total_duration >= answer.load_duration >= 0
    assert client.gateway.job.embed


async def test_one_text_has_one_vector(client):
    reply = await client.post(EMBED, {"model": "small:latest", "input": "hello"})
    assert reply.json["embeddings"] == [pytest.approx(scaled(vector_of(0)))]


async def test_dimensions_shorten_each_vector(client):
    reply = await client.post(EMBED, {"input": "hello", "dimensions": 2})
    assert reply.json["embeddings"] == [pytest.approx(scaled(vector_of(0)[:2]))]


async def test_older_route_returns_the_vector_as_the_model_makes_it(client):
    reply = await client.post(EMBEDDINGS, {"model": "small", "prompt": "hello"})
    assert reply.json == {"embedding": vector_of(0)}
    msgspec.json.decode(reply.body, type=OllamaEmbedding, strict=True)


@pytest.mark.parametrize(
    ("path", "body", "answer"),
    [
        (EMBED, {"input": ""}, {"model": "small", "embeddings": []}),
        (EMBED, {"input": []}, {"model": "small", "embeddings": []}),
        (EMBED, {}, {"model": "small", "embeddings": []}),
        (EMBEDDINGS, {"prompt": ""}, {"embedding": []}),
    ],
)
async def test_request_without_a_text_loads_the_model(client, path, body, answer):
    assert (await client.post(path, {"model": "small", **body})).json == answer
    assert client.gateway.jobs == []


@pytest.mark.parametrize(
    ("path", "fields", "field"),
    [
        (EMBED, {"input": 7}, "input"),
        (EMBED, {"input": [7]}, "input[0]"),
        (EMBED, {"input": ["a", ""]}, "input"),
        (EMBED, {"input": ["a"] * 2049}, "input"),
        (EMBED, {"dimensions": 0}, "dimensions"),
        (EMBED, {"dimensions": WIDTH + 1}, "dimensions"),
        (EMBED, {"truncate": 1}, "truncate"),
        (EMBED, {"options": 1}, "options"),
        (EMBED, {"keep_alive": {}}, "keep_alive"),
        (EMBED, {"model": 1}, "model"),
        (EMBEDDINGS, {"prompt": 7}, "prompt"),
        (EMBEDDINGS, {"prompt": ["a"]}, "prompt"),
        (EMBEDDINGS, {"options": []}, "options"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_invalid_field_is_refused_by_name(client, path, fields, field):
    good = {"input": "hello"} if path == EMBED else {"prompt": "hello"}
    reply = await client.post(path, good | fields)
    assert (reply.status, set(reply.json)) == (400, {"error"})
    assert reply.json["error"].startswith(f"{field}: ")
    assert client.gateway.jobs == []
