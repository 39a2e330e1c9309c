"""POST /v1/completions with a suffix: the model writes the text between it and the prompt."""

import dataclasses

import pytest
import tokenizers

from fairlead.language.text.embedding import EmbeddingSettings
from fairlead.language.text.model import TextModel
from fake_fleet import FakeFleet
from server.routes.conftest import client_of, small_model

COMPLETIONS = "/v1/completions"
MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")


@pytest.fixture(scope="module")
def coder(tmp_path_factory) -> TextModel:
    directory = tmp_path_factory.mktemp("coder")
    small_model(directory)
    path = str(directory / "tokenizer.json")
    tokenizer = tokenizers.Tokenizer.from_file(path)
    tokenizer.add_tokens([*MARKS, "<|fim_pad|>"])
    tokenizer.save(path)
    return TextModel.load(directory, name="small")


@pytest.fixture
def client(coder):
    return client_of(coder)


def infill_of(model, prompt, suffix):
    return model.tokenize(f"<|fim_prefix|>{prompt}<|fim_suffix|>{suffix}<|fim_middle|>")


async def test_the_job_has_the_models_own_infilling_prompt_and_ends(client, coder):
    body = {"model": "small", "prompt": "def f(", "suffix": "return 1", "max_tokens": 9}
    reply = await client.post(COMPLETIONS, body)
    assert (reply.status, reply.json["choices"][0]["text"]) == (200, "Hello world")
    job = client.gateway.job
    assert list(job.prompts[0]) == infill_of(coder, "def f(", "return 1")
    pad = coder.tokenizer.token_id("<|fim_pad|>")
    assert {pad, *map(coder.tokenizer.token_id, MARKS)} == set(job.sampling.stop_token_ids)
    assert (job.sampling.max_tokens, job.embed) == (9, False)
    tokens = len(infill_of(coder, "def f(", "return 1"))
    assert reply.json["usage"]["prompt_tokens"] == tokens
    assert reply.json["usage"]["total_tokens"] == tokens + reply.json["usage"]["completion_tokens"]


async def test_stop_token_ids_of_the_request_stay_and_ignore_eos_ends_at_these_only(client, coder):
    await client.post(COMPLETIONS, {"prompt": "a", "suffix": "b", "stop_token_ids": [5]})
    [job] = client.gateway.jobs
    assert job.sampling.stop_token_ids == (5, *coder.infill.ends)
    client.gateway.jobs.clear()
    await client.post(COMPLETIONS, {"prompt": "a", "suffix": "b", "stop_token_ids": [5], "ignore_eos": True})
    assert client.gateway.job.sampling.stop_token_ids == (5,)


async def test_without_a_suffix_or_with_an_empty_one_nothing_changes(client, coder):
    for fields in ({}, {"suffix": None}, {"suffix": ""}):
        client.gateway.jobs.clear()
        assert (await client.post(COMPLETIONS, {"prompt": "<eos>", **fields})).status == 200
        job = client.gateway.job
        assert (list(job.prompts[0]), job.sampling.stop_token_ids) == ([0], ())


async def test_a_stream_has_the_same_text(client, coder):
    reply = await client.post(COMPLETIONS, {"prompt": "a", "suffix": "b", "stream": True})
    assert "".join(chunk["choices"][0]["text"] for chunk in reply.chunks) == "Hello world"
    assert list(client.gateway.job.prompts[0]) == infill_of(coder, "a", "b")


async def test_ollamas_generated_text_has_the_same_prompt(client, coder):
    for prompt in ("def f(", ""):
        client.gateway.jobs.clear()
        body = {"model": "small", "prompt": prompt, "suffix": "return 1", "stream": False}
        reply = await client.post("/api/generate", body)
        assert (reply.status, reply.json["response"]) == (200, "Hello world")
        assert list(client.gateway.job.prompts[0]) == infill_of(coder, prompt, "return 1")
    shown = await client.post("/api/show", {"model": "small"})
    assert shown.json["capabilities"] == ["completion", "insert", "tools"]


async def test_several_prompts_have_n_answers_each_with_the_same_suffix(client, coder):
    reply = await client.post(COMPLETIONS, {"prompt": ["a", "", "c"], "suffix": "b", "n": 2, "logprobs": 1})
    assert reply.status == 200, reply.body
    assert [list(ids) for ids in client.gateway.job.prompts] == [
        infill_of(coder, one, "b") for one in ("a", "", "c")
    ]
    assert [choice["index"] for choice in reply.json["choices"]] == list(range(6))
    assert client.gateway.job.sampling.logprobs == 1


async def test_the_answer_may_have_a_form(client):
    reply = await client.post(
        COMPLETIONS, {"prompt": "a", "suffix": "b", "structured_outputs": {"choice": ["x", "y"]}}
    )
    assert reply.status == 200, reply.body
    assert client.gateway.job.sampling.grammar is not None


@pytest.mark.parametrize("field", ["prompt", "suffix"])
async def test_spelled_marks_stay_text_unless_the_request_has_them_parsed(client, coder, field):
    body = {"prompt": "a", "suffix": "b"} | {field: "x<|fim_middle|><eos>"}
    middle = coder.tokenizer.token_id("<|fim_middle|>")
    for fields, expected in (({}, 1), ({"special_tokens": "text"}, 1), ({"special_tokens": "parse"}, 2)):
        client.gateway.jobs.clear()
        assert (await client.post(COMPLETIONS, body | fields)).status == 200
        ids = list(client.gateway.job.prompts[0])
        assert (ids.count(middle), ids.count(0)) == (expected, expected - 1)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": 7}, "suffix"),
        ({"suffix": ["b"]}, "suffix"),
        ({"suffix": {"text": "b"}}, "suffix"),
        ({"suffix": True}, "suffix"),
        ({"suffix": "\ud800"}, "suffix"),
        ({"echo": True}, "echo"),
        ({"echo": True, "max_tokens": 0}, "echo"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, 2]}, "prompt"),
        ({"prompt": [[1, 2]]}, "prompt"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ["a"] * 9}, "prompt"),
        ({"n": 9}, "n"),
        ({"best_of": 3}, "best_of"),
        ({"special_tokens": "none"}, "special_tokens"),
    ],
)
async def test_an_invalid_body_is_refused_by_field(client, fields, param):
    reply = await client.post(COMPLETIONS, {"prompt": "a", "suffix": "b", **fields})
    assert (reply.status, reply.error["code"], reply.error["param"]) == (400, "invalid_request", param)
    assert client.gateway.jobs == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "word " * 5000}, "suffix"),
        ({"prompt": "word " * 5000}, "prompt"),
        ({"prompt": "? " * 1500, "suffix": "? " * 1000}, "prompt"),
    ],
)
async def test_texts_that_are_too_long_together_name_the_longer_one(client, fields, param):
    reply = await client.post(COMPLETIONS, {"prompt": "a", "suffix": "b", **fields})
    code, found = reply.error["code"], reply.error["param"]
    assert (reply.status, code, found) == (400, "context_length_exceeded", param)
    assert client.gateway.jobs == []


async def test_a_model_without_infilling_tokens_refuses_a_suffix(client_with):
    client = client_with()
    reply = await client.post(COMPLETIONS, {"prompt": "a", "suffix": "b"})
    assert (reply.status, reply.error["param"]) == (400, "suffix")
    assert reply.error["message"] == "suffix: this model has no fill-in-the-middle tokens"
    assert client.gateway.jobs == []


async def test_the_model_card_says_that_a_model_can_infill(client, client_with):
    assert (await client.get("/v1/models/small")).json["infill"] is True
    assert "infill" not in (await client_with().get("/v1/models/small")).json


async def test_an_embedding_model_refuses_a_suffix_as_it_does_all_completions(coder):
    client = client_of(dataclasses.replace(coder, embedding=EmbeddingSettings(4, normalized=True)))
    reply = await client.post(COMPLETIONS, {"prompt": "a", "suffix": "b"})
    assert (reply.status, reply.error["param"]) == (400, "model")


async def test_a_relayed_suffix_is_passed_on_unchanged(relay_client):
    body = b'{"model": "remote", "prompt": "a",  "suffix": "b", "echo": true}'
    assert (await relay_client.post(COMPLETIONS, body)).status == 200
    assert relay_client.gateway.job.relay.body == body


async def test_a_model_that_another_server_has_too_keeps_the_body_for_it(coder):
    client = client_of(coder, fleet=FakeFleet(["small"], ["small"]))
    body = b'{"model": "small", "prompt": "a",  "suffix": "b"}'
    assert (await client.post(COMPLETIONS, body)).status == 200
    job = client.gateway.job
    assert (job.relay.body, list(job.prompts[0])) == (body, infill_of(coder, "a", "b"))


@pytest.mark.parametrize("path", ["/infill", "/v1/infill"])
async def test_the_route_of_llama_cpp_is_not_served(client, path):
    assert (await client.post(path, {"input_prefix": "a", "input_suffix": "b"})).status == 404
