"""POST /v1/rerank, /v2/rerank and /v1/score, by embedding models and by models that score pairs of texts."""

import json
import math
import struct

import pytest

from fairlead.base.job import Delta
from fake_fleet import FakeFleet
from server.routes import remote_responses
from server.routes.comparing import (
    ASK,
    COSINES,
    RERANK,
    RERANK_2,
    SCORE,
    VECTORS,
    embedder_client,
    scorer_client,
)


@pytest.fixture
def client(model):
    return embedder_client(model)


@pytest.fixture
def scorer(model):
    return scorer_client(model)


def approximately(values):
    return pytest.approx(values, abs=1e-6)


# Embedding models -------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [RERANK, RERANK_2, "/rerank"])
async def test_documents_are_sorted_by_their_cosine_with_the_query(client, model, path):
    reply = await client.post(path, {**ASK, "user": "ana"})
    assert reply.status == 200, reply.body
    results = reply.json["results"]
    assert [one["index"] for one in results] == [1, 3, 0, 2]
    assert [one["document"]["text"] for one in results] == ["same", "half", "none", "less"]
    scores = [one["relevance_score"] for one in results]
    assert scores == approximately(sorted(COSINES.values(), reverse=True))
    job = client.gateway.job
    tokens = sum(len(model.encode_prompt(text)) for text in VECTORS)
    assert reply.json["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert (reply.json["id"], reply.json["model"]) == (job.id, "small")
    assert (job.embed, job.tenant, job.id.partition("-")[0], job.stream) == (
        True,
        "user/ana",
        "rerank",
        False,
    )


async def test_documents_may_be_objects_and_be_left_out_of_the_answer(client):
    documents = [{"text": "none", "title": "ignored"}, "same"]
    reply = await client.post(RERANK, {**ASK, "documents": documents})
    assert [one["document"] for one in reply.json["results"]] == [{"text": "same"}, {"text": "none"}]
    reply = await client.post(RERANK, {**ASK, "documents": documents, "return_documents": False})
    assert [set(one) for one in reply.json["results"]] == [{"index", "relevance_score"}] * 2


@pytest.mark.parametrize(("top_n", "expected"), [(1, [1]), (2, [1, 3]), (9, [1, 3, 0, 2]), (0, [1, 3, 0, 2])])
async def test_top_n_is_the_number_of_results(client, top_n, expected):
    reply = await client.post(RERANK, {**ASK, "top_n": top_n})
    assert [one["index"] for one in reply.json["results"]] == expected


async def test_documents_of_equal_relevance_keep_their_order(client):
    reply = await client.post(RERANK, {**ASK, "documents": ["half", "same", "half", "same"]})
    assert [one["index"] for one in reply.json["results"]] == [1, 3, 0, 2]


@pytest.mark.parametrize("path", [SCORE, "/score"])
@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents")])
@pytest.mark.parametrize(
    ("firsts", "seconds", "expected"),
    [
        ("q", "half", [0.96]),
        (["q"], ["half"], [0.96]),
        ("q", ["none", "same", "half"], [0.0, 1.0, 0.96]),
        (["q", "same", "none"], ["less", "half", "half"], [-1.0, 0.96, 7 / 25]),
    ],
)
async def test_one_text_is_scored_with_each_or_each_with_its_own(
    client, path, names, firsts, seconds, expected
):
    reply = await client.post(path, {"model": "small", names[0]: firsts, names[1]: seconds})
    assert reply.status == 200, reply.body
    answer = reply.json
    assert [one["score"] for one in answer["data"]] == approximately(expected)
    assert [(one["index"], one["object"]) for one in answer["data"]] == [
        (index, "score") for index in range(len(expected))
    ]
    job = client.gateway.job
    assert (answer["object"], answer["id"], answer["model"]) == ("list", job.id, "small")
    assert job.id.startswith("score-")
    assert answer["usage"] == {"prompt_tokens": job.prompt_tokens, "total_tokens": job.prompt_tokens}


async def test_a_vector_without_a_direction_has_the_cosine_0(model):
    client = embedder_client(model)
    client.gateway.script = lambda job: [
        [Delta(i, finish_reason="stop", vector=struct.pack("<2f", i, 0)) for i in range(job.sequences)]
    ]
    reply = await client.post(SCORE, {"text_1": "a", "text_2": ["b", "c"]})
    assert [one["score"] for one in reply.json["data"]] == [0.0, 0.0]


# Models that score pairs --------------------------------------------------------------------------------


def sigmoid(number):
    return 1 / (1 + math.exp(-number))


async def test_a_pair_is_one_prompt_and_its_score_the_sigmoid_of_the_models_number(scorer, model):
    reply = await scorer.post(RERANK, {"query": "a b", "documents": ["c", "hello hello ? ?"]})
    assert reply.status == 200, reply.body
    job = scorer.gateway.job
    pairs = [model.tokenizer.encode("a b", second=text) for text in ("c", "hello hello ? ?")]
    assert [list(ids) for ids in job.prompts] == pairs
    results = {one["index"]: one["relevance_score"] for one in reply.json["results"]}
    assert results == approximately({index: sigmoid(len(ids)) for index, ids in enumerate(pairs)})
    assert reply.json["usage"]["total_tokens"] == sum(map(len, pairs))


async def test_each_text_is_scored_with_its_own(scorer, model):
    reply = await scorer.post(SCORE, {"text_1": ["a", "b b"], "text_2": ["c", "d"]})
    pairs = [model.tokenizer.encode(*one[:1], second=one[1]) for one in (("a", "c"), ("b b", "d"))]
    assert [list(ids) for ids in scorer.gateway.job.prompts] == pairs
    assert [one["score"] for one in reply.json["data"]] == approximately([sigmoid(len(ids)) for ids in pairs])


async def test_control_tokens_in_scored_texts_stay_text(scorer):
    await scorer.post(SCORE, {"text_1": "a<eos>", "text_2": "<eos>"})
    assert 0 not in scorer.gateway.job.prompts[0]


async def test_a_model_that_scores_pairs_refuses_embeddings_and_completions(scorer, chat):
    for path, body in (
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", chat()),
    ):
        reply = await scorer.post(path, {"model": "small", **body})
        assert (reply.status, reply.error["param"]) == (400, "model")
        assert "does not make" in reply.error["message"]
    assert scorer.gateway.jobs == []
    assert (await scorer.get("/v1/models/small")).json["task"] == "score"


# Relays -------------------------------------------------------------------------------------------------


async def test_a_model_that_another_server_has_too_may_rank_there(model):
    client = embedder_client(model, fleet=FakeFleet(["small"], ["small"]))
    whole = client.gateway.script
    client.gateway.script = remote_responses.complete_response
    reply = await client.post(RERANK, ASK)
    assert (reply.status, reply.body) == (200, remote_responses.ANSWER)
    job = client.gateway.job
    assert (job.relay.path, job.relay.body, job.embed) == (RERANK, json.dumps(ASK).encode(), True)
    client.gateway.script = whole
    assert len((await client.post(RERANK, ASK)).json["results"]) == 4
