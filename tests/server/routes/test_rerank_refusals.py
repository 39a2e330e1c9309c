"""Requests to compare texts that are refused: each is a 400 that names the field."""

import pytest

from server.routes.comparing import ASK, RERANK, SCORE, embedder_client, scorer_client


@pytest.fixture
def client(model):
    return embedder_client(model)


@pytest.fixture
def scorer(model):
    return scorer_client(model)


WRONG = [7, True, 1.5, [], {}, [7], [[]], {"text": 7}, "\ud800"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        *(({"query": value}, "query") for value in (*WRONG, "", None, ["q"])),
        *(({"documents": value}, "documents") for value in (7, True, "text", {}, None, [], ["a", ""])),
        ({"documents": ["a"] * 2049}, "documents"),
        ({"documents": [7]}, "documents[0]"),
        ({"documents": ["a", None]}, "documents[1]"),
        ({"documents": ["a", ["b"]]}, "documents[1]"),
        ({"documents": [{"content": "a"}]}, "documents[0].text"),
        ({"documents": [{"text": 7}]}, "documents[0].text"),
        ({"documents": [{"text": ""}]}, "documents"),
        *(({"top_n": value}, "top_n") for value in (-1, 1.5, "1", True, [], 2**31)),
        *(({"return_documents": value}, "return_documents") for value in (1, "yes", [])),
        ({"stream": 1}, "stream"),
        ({"top_k": 3}, "top_k"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ],
)
async def test_an_invalid_ranking_is_refused_by_field(client, fields, param):
    reply = await client.post(RERANK, {**ASK, **fields})
    assert (reply.status, reply.error["code"], reply.error["param"]) == (400, "invalid_request", param)
    assert not client.gateway.jobs


@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents")])
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize(
    "value", [7, True, {}, {"text": "a"}, "\ud800", "", [], ["a", ""], ["a"] * 2049, None]
)
async def test_an_invalid_text_is_refused_by_field(client, names, place, value):
    body = dict.fromkeys(names, "a") | {names[place]: value}
    reply = await client.post(SCORE, body)
    assert (reply.status, reply.error["code"], reply.error["param"]) == (400, "invalid_request", names[place])
    assert not client.gateway.jobs


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text_1"),
        ({"text_1": "a"}, "text_2"),
        ({"documents": "a"}, "queries"),
        ({"text_1": ["a", 7], "text_2": "b"}, "text_1[1]"),
        ({"text_1": "a", "text_2": ["b", []]}, "text_2[1]"),
        ({"text_1": "a", "text_2": "b", "documents": "c"}, "text_1"),
        ({"text_1": ["a", "b"], "text_2": "c"}, "text_1"),
        ({"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "text_1"),
        ({"queries": ["a", "b"], "documents": ["c", "d", "e"]}, "queries"),
        ({"data_1": "a", "data_2": "b"}, "data_1"),
    ],
)
async def test_texts_that_do_not_match_are_refused_by_field(client, body, param):
    reply = await client.post(SCORE, body)
    assert (reply.status, reply.error["code"], reply.error["param"]) == (400, "invalid_request", param)
    assert not client.gateway.jobs


LONG = "word " * 5000


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (RERANK, {"query": LONG, "documents": ["a"]}, "query"),
        (RERANK, {"query": "a", "documents": ["a", LONG]}, "documents"),
        (SCORE, {"text_1": LONG, "text_2": "a"}, "text_1"),
        (SCORE, {"queries": "a", "documents": LONG}, "documents"),
    ],
)
async def test_a_text_that_is_too_long_is_refused_by_field(client, scorer, path, body, param):
    for one in (client, scorer):
        reply = await one.post(path, body)
        found = (reply.status, reply.error["code"], reply.error["param"])
        assert found == (400, "context_length_exceeded", param)
        assert not one.gateway.jobs


async def test_a_pair_that_is_too_long_together_is_refused(scorer):
    reply = await scorer.post(RERANK, {"query": "? " * 1500, "documents": ["? " * 1500]})
    found = (reply.status, reply.error["code"], reply.error["param"])
    assert found == (400, "context_length_exceeded", "documents")


async def test_all_texts_together_are_bounded(model, scorer):
    documents = ["? " * 1000] * 600
    for client in (embedder_client(model), scorer):
        reply = await client.post(RERANK, {"query": "a", "documents": documents})
        assert (reply.status, reply.error["param"]) == (400, "documents")
        assert "tokens are too many" in reply.error["message"]
