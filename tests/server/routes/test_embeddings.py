"""POST /v1/embeddings."""

import base64
import dataclasses
import json
import math
import struct

import pytest
import trio
from openai.types import CreateEmbeddingResponse

from fairlead.base.job import Delta
from fairlead.dialects.openai.embeddings import shorten
from fairlead.generation import event_stream
from fairlead.language.text.embedding import EmbeddingSettings
from server.routes.conftest import FakeFleet

EMBEDDINGS = "/v1/embeddings"
WIDTH = 4


def vector_of(index):
    return [1.0 + index, -2.0, 0.5, 2.0]


def script(job):
    """Return the vectors in reverse order of the texts."""
    return [
        [Delta(index, finish_reason="stop", vector=struct.pack("<4f", *vector_of(index)))]
        for index in reversed(range(job.sequences))
    ]


@pytest.fixture
def embedder(model):
    return dataclasses.replace(model, embedding=EmbeddingSettings(WIDTH, normalized=False))


@pytest.fixture
def client(client_with, embedder):
    made = client_with(models={"small": embedder})
    made.gateway.script = script
    return made


async def test_answer_is_what_the_openai_client_expects(client, model):
    reply = await client.post(EMBEDDINGS, {"model": "tiny", "input": ["hello", "one two"], "user": "ana"})
    answer = CreateEmbeddingResponse.model_validate_json(reply.body, strict=True)
    assert [vector_of(0), vector_of(1)] == [one.embedding for one in answer.data]
    assert [(one.index, one.object) for one in answer.data] == [(0, "embedding"), (1, "embedding")]
    tokens = len(model.encode_prompt("hello")) + len(model.encode_prompt("one two"))
    assert (tokens, tokens) == (answer.usage.prompt_tokens, answer.usage.total_tokens)
    assert (answer.object, answer.model) == ("list", "small")
    job = client.gateway.job
    assert job.embed
    assert job.id.startswith("embd-")
    assert (job.tenant, job.model, job.stream) == ("user/ana", "small", False)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("hello", ["hello"]),
        (["hello", "world"], ["hello", "world"]),
        ([72, 73], [[72, 73]]),
        ([[72], [73, 74]], [[72], [73, 74]]),
    ],
)
async def test_input_may_have_four_forms(client, model, given, expected):
    reply = await client.post(EMBEDDINGS, {"input": given})
    assert reply.status == 200
    encoded = [model.encode_prompt(one) if isinstance(one, str) else one for one in expected]
    assert encoded == [list(one) for one in client.gateway.job.prompts]
    assert list(range(len(expected))) == [one["index"] for one in reply.json["data"]]


async def test_base64_is_of_little_endian_float32(client):
    reply = await client.post(EMBEDDINGS, {"input": "hello", "encoding_format": "base64"})
    [one] = reply.json["data"]
    assert struct.pack("<4f", *vector_of(0)) == base64.b64decode(one["embedding"], validate=True)


@pytest.mark.parametrize("dimensions", [1, 3, WIDTH])
@pytest.mark.parametrize("normalized", [True, False])
async def test_fewer_dimensions_are_the_first_ones_normalized_if_the_model_normalizes(
    client_with, embedder, dimensions, normalized
):
    embedder = dataclasses.replace(embedder, embedding=EmbeddingSettings(WIDTH, normalized=normalized))
    client = client_with(models={"small": embedder})
    unit = [number / math.hypot(*vector_of(0)) for number in vector_of(0)]
    whole = unit if normalized else vector_of(0)
    client.gateway.script = lambda _: [[Delta(0, finish_reason="stop", vector=struct.pack("<4f", *whole))]]
    reply = await client.post(EMBEDDINGS, {"input": "hello", "dimensions": dimensions})
    first = whole[:dimensions]
    expected = [number / math.hypot(*first) for number in first] if normalized else first
    assert reply.json["data"][0]["embedding"] == pytest.approx(expected, rel=1e-6)


def test_zero_vector_stays_zero_when_shortened():
    assert bytes(8) == shorten(bytes(16), 2, normalized=True)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": None}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [[]]}, "input[0]"),
        ({"input": ["a", ""]}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": [[1], "a"]}, "input"),
        ({"input": [-1]}, "input[0]"),
        ({"input": [299_000]}, "input"),
        ({"input": [[1, 299_000]]}, "input"),
        ({"input": {"text": "a"}}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": WIDTH + 1}, "dimensions"),
        ({"input": "a", "dimensions": 1.5}, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
    ],
)
async def test_invalid_body_is_refused_by_field(client, fields, param):
    reply = await client.post(EMBEDDINGS, {"model": "small", **fields})
    assert (reply.status, reply.error["code"], reply.error["param"]) == (400, "invalid_request", param)
    assert not client.gateway.jobs


async def test_model_card_has_the_task(client):
    assert (await client.get("/v1/models/small")).json["task"] == "embed"


async def test_large_response_is_written_in_a_thread(client, monkeypatch):
    monkeypatch.setattr(event_stream, "LARGE_VECTORS_BYTES", 4 * 2 * WIDTH)
    threads = []
    run_sync = trio.to_thread.run_sync

    async def spy(function, *arguments, **options):
        threads.append(function)
        return await run_sync(function, *arguments, **options)

    monkeypatch.setattr(trio.to_thread, "run_sync", spy)
    assert len((await client.post(EMBEDDINGS, {"input": ["a"]})).json["data"]) == 1
    assert threads == []
    many = (await client.post(EMBEDDINGS, {"input": ["a"] * 5})).json["data"]
    assert [vector_of(index) for index in range(5)] == [one["embedding"] for one in many]
    assert len(threads) == 1


async def test_model_that_another_server_has_too_may_embed_there(client_with, embedder):
    fleet = FakeFleet(["small"], ["small"])
    client = client_with(models={"small": embedder}, fleet=fleet)
    relayed_body = b'{"theirs": [1,  2]}'
    client.gateway.script = lambda job: [
        [Delta(0, raw=[relayed_body], finish_reason="stop")],
        [Delta(index, finish_reason="stop") for index in range(1, job.sequences)],
    ]
    body = {"model": "small", "input": ["a", "b"], "unheard_of": 1, "stream": True}
    reply = await client.post(EMBEDDINGS, body)
    assert (reply.status, reply.body) == (200, relayed_body)
    job = client.gateway.job
    assert (job.sequences, job.embed) == (2, True)
    assert (
        job.relay.path,
        job.relay.body,
        job.relay.stream,
    ) == (EMBEDDINGS, json.dumps(body).encode(), False)
    client.gateway.script = script
    assert len((await client.post(EMBEDDINGS, body)).json["data"]) == 2
