"""POST /v1/embeddings."""

import base64
import dataclasses
import json
import math
import struct

import pytest
import trio
from openai.types import CreateEmbeddingResponse

from api.conftest import FakeFleet
from fairlead.api import answers, embeddings
from fairlead.config import ApiKey
from fairlead.errors import NodeFailed, QueueFull
from fairlead.job import Delta
from fairlead.text.embedding import Embedding

EMBEDDINGS = "/v1/embeddings"
WIDTH = 4


def vector_of(index):
    return [1.0 + index, -2.0, 0.5, 2.0]


def script(job):
    """The last text's vector comes first."""
    return [
        [Delta(index, finish_reason="stop", vector=struct.pack("<4f", *vector_of(index)))]
        for index in reversed(range(job.sequences))
    ]


@pytest.fixture
def embedder(model):
    return dataclasses.replace(model, embedding=Embedding(WIDTH, normalized=False))


@pytest.fixture
def client(client_with, embedder):
    made = client_with(models={"small": embedder})
    made.gateway.script = script
    return made


async def test_an_answer_is_what_the_openai_client_expects(client, model):
    reply = await client.post(EMBEDDINGS, {"model": "tiny", "input": ["hello", "one two"], "user": "ana"})
    answer = CreateEmbeddingResponse.model_validate_json(reply.body, strict=True)
    assert [vector_of(0), vector_of(1)] == [one.embedding for one in answer.data]
    assert [(0, "embedding"), (1, "embedding")] == [(one.index, one.object) for one in answer.data]
    tokens = len(model.encode_prompt("hello")) + len(model.encode_prompt("one two"))
    assert (tokens, tokens) == (answer.usage.prompt_tokens, answer.usage.total_tokens)
    assert ("list", "small") == (answer.object, answer.model)
    job = client.gateway.job
    assert job.embed
    assert job.id.startswith("embd-")
    assert ("user/ana", "small", False) == (job.tenant, job.model, job.stream)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("hello", ["hello"]),
        (["hello", "world"], ["hello", "world"]),
        ([72, 73], [[72, 73]]),
        ([[72], [73, 74]], [[72], [73, 74]]),
    ],
)
async def test_an_input_comes_in_four_forms(client, model, given, expected):
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
async def test_fewer_dimensions_are_the_first_ones_and_as_long_as_before(
    client_with, embedder, dimensions, normalized
):
    embedder = dataclasses.replace(embedder, embedding=Embedding(WIDTH, normalized=normalized))
    client = client_with(models={"small": embedder})
    unit = [number / math.hypot(*vector_of(0)) for number in vector_of(0)]
    whole = unit if normalized else vector_of(0)
    client.gateway.script = lambda _: [[Delta(0, finish_reason="stop", vector=struct.pack("<4f", *whole))]]
    reply = await client.post(EMBEDDINGS, {"input": "hello", "dimensions": dimensions})
    first = whole[:dimensions]
    expected = [number / math.hypot(*first) for number in first] if normalized else first
    assert reply.json["data"][0]["embedding"] == pytest.approx(expected, rel=1e-6)


def test_a_vector_of_nothing_has_no_direction():
    assert bytes(8) == embeddings.shortened(bytes(16), 2, normalized=True)


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
        ({"input": "a", "user": 7}, "user"),
        ({"input": "a", "priority": "now"}, "priority"),
    ],
)
async def test_a_body_that_does_not_fit_is_refused_with_the_field(client, fields, param):
    reply = await client.post(EMBEDDINGS, {"model": "small", **fields})
    assert (400, "invalid_request", param) == (reply.status, reply.error["code"], reply.error["param"])
    assert not client.gateway.jobs


async def test_a_text_that_is_too_long_has_openais_code_for_it(client):
    reply = await client.post(EMBEDDINGS, {"model": "small", "input": ["a", "word " * 5000]})
    assert (400, "context_length_exceeded", "input") == (
        reply.status,
        reply.error["code"],
        reply.error["param"],
    )
    assert not client.gateway.jobs


async def test_a_model_that_makes_text_makes_no_embeddings(client_with, model):
    reply = await client_with().post(EMBEDDINGS, {"model": "small", "input": "a"})
    assert (400, "invalid_request", "model") == (reply.status, reply.error["code"], reply.error["param"])
    assert "does not make embeddings" in reply.error["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_model_that_makes_embeddings_makes_no_text(client, chat, path):
    reply = await client.post(path, {**chat(), "prompt": "hello"})
    assert (400, "invalid_request", "model") == (reply.status, reply.error["code"], reply.error["param"])
    assert not client.gateway.jobs


async def test_the_list_of_models_says_what_each_is_for(client):
    assert "embed" == (await client.get("/v1/models/small")).json["task"]


async def test_an_unknown_model_and_another_method_are_errors_of_the_dialect(client):
    reply = await client.post(EMBEDDINGS, {"model": "large", "input": "a"})
    assert (404, "model_not_found") == (reply.status, reply.error["code"])
    reply = await client.get(EMBEDDINGS)
    assert (405, "POST") == (reply.status, reply.headers["allow"].removeprefix("OPTIONS, "))


async def test_a_key_that_may_not_use_the_model_is_told_so(client_with, embedder):
    client = client_with(ApiKey(key="k", models=("other",)), models={"small": embedder})
    headers = {"Authorization": "Bearer k"}
    reply = await client.post(EMBEDDINGS, {"model": "small", "input": "a"}, headers=headers)
    assert (403, "forbidden") == (reply.status, reply.error["code"])


async def test_headers_say_the_priority_and_that_one_will_not_wait(client):
    headers = {"X-Priority": "high", "X-No-Queue": "1", "X-Request-Id": "mine"}
    reply = await client.post(EMBEDDINGS, {"input": "a"}, headers=headers)
    job = client.gateway.job
    assert (0, True, "mine", "mine") == (
        job.priority,
        job.no_queue,
        job.request_id,
        reply.headers["x-request-id"],
    )


async def test_who_had_to_wait_is_told_so(client):
    client.gateway.estimated_wait_s, client.gateway.queue_position = 24, 3
    reply = await client.post(EMBEDDINGS, {"input": "a"})
    assert ("24", "3") == (reply.headers["x-estimated-wait"], reply.headers["x-queue-position"])


@pytest.mark.parametrize("error", [QueueFull("full", retry_after_s=3), NodeFailed("it died")])
async def test_an_error_is_the_whole_answer_whenever_it_comes(client, error):
    client.gateway.refusal = error
    reply = await client.post(EMBEDDINGS, {"input": ["a", "b"]})
    assert (error.status, error.code) == (reply.status, reply.error["code"])
    client.gateway.refusal = None
    client.gateway.script = lambda job: [*script(job)[:1], error]
    reply = await client.post(EMBEDDINGS, {"input": ["a", "b"]})
    assert (error.status, error.code) == (reply.status, reply.error["code"])


async def test_a_vector_of_another_length_is_the_nodes_fault(client):
    client.gateway.script = lambda _: [[Delta(0, finish_reason="stop", vector=b"1234")]]
    reply = await client.post(EMBEDDINGS, {"input": "a"})
    assert (502, "node_failed") == (reply.status, reply.error["code"])


@pytest.mark.parametrize("steps", [0, 1])
async def test_a_client_that_leaves_ends_its_job(client, autojump_clock, steps):
    client.gateway.script = lambda job: [*script(job)[:steps], None]
    left = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: client.post(EMBEDDINGS, {"input": ["a", "b"]}, left=left))
        await trio.testing.wait_all_tasks_blocked()
        assert 0 == client.gateway.ended
        left.set()
    assert 1 == client.gateway.ended


async def test_a_large_answer_is_written_while_others_have_their_turn(client, monkeypatch):
    monkeypatch.setattr(answers, "LARGE_VECTORS_BYTES", 4 * 2 * WIDTH)
    threads = []
    run_sync = trio.to_thread.run_sync

    async def spy(function, *arguments, **options):
        threads.append(function)
        return await run_sync(function, *arguments, **options)

    monkeypatch.setattr(trio.to_thread, "run_sync", spy)
    assert 1 == len((await client.post(EMBEDDINGS, {"input": ["a"]})).json["data"])
    assert [] == threads
    many = (await client.post(EMBEDDINGS, {"input": ["a"] * 5})).json["data"]
    assert [vector_of(index) for index in range(5)] == [one["embedding"] for one in many]
    assert 1 == len(threads)


async def test_a_model_that_another_server_has_too_may_be_embedded_there(client_with, embedder):
    fleet = FakeFleet(["small"], ["small"])
    client = client_with(models={"small": embedder}, fleet=fleet)
    theirs = b'{"theirs": [1,  2]}'
    client.gateway.script = lambda job: [
        [Delta(0, raw=[theirs], finish_reason="stop")],
        [Delta(index, finish_reason="stop") for index in range(1, job.sequences)],
    ]
    body = {"model": "small", "input": ["a", "b"], "unheard_of": 1, "stream": True}
    reply = await client.post(EMBEDDINGS, body)
    assert (200, theirs) == (reply.status, reply.body)
    job = client.gateway.job
    assert (2, True) == (job.sequences, job.embed)
    assert (EMBEDDINGS, json.dumps(body).encode(), False) == (
        job.relay.path,
        job.relay.body,
        job.relay.stream,
    )
    client.gateway.script = script
    assert 2 == len((await client.post(EMBEDDINGS, body)).json["data"])
