"""vLLM's `return_token_ids`: the ids of an answer's tokens and of its prompt, whole and streamed."""

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from fairlead.base.job import CallPiece, Delta

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ANSWER = [10, 11, 12, 0]  # the last one ends the answer


async def test_chat_has_the_ids_of_prompt_and_answers(client, chat):
    reply = await client.post(CHAT, chat(n=2, return_token_ids=True))
    ChatCompletion.model_validate_json(reply.body, strict=True)
    assert reply.json["prompt_token_ids"] == list(client.gateway.job.prompts[0])
    assert [choice["token_ids"] for choice in reply.json["choices"]] == [ANSWER] * 2


async def test_completion_has_the_ids_of_each_prompt_and_its_answers(client, model):
    body = {"prompt": ["hello", "one two"], "n": 2, "return_token_ids": True}
    reply = await client.post(COMPLETIONS, body)
    Completion.model_validate_json(reply.body, strict=True)
    prompts = [model.encode_prompt(text) for text in ("hello", "hello", "one two", "one two")]
    assert [choice["prompt_token_ids"] for choice in reply.json["choices"]] == prompts
    assert [choice["token_ids"] for choice in reply.json["choices"]] == [ANSWER] * 4


@pytest.mark.parametrize("usage", [None, {"include_usage": True}])
async def test_streamed_chat_has_them_all_once(client, chat, usage):
    body = chat(n=2, stream=True, stream_options=usage, return_token_ids=True)
    reply = await client.post(CHAT, body)
    ids, prompts, texts = {0: [], 1: []}, {}, {0: "", 1: ""}
    for chunk in reply.chunks:
        ChatCompletionChunk.model_validate(chunk)
        for choice in chunk["choices"]:
            ids[choice["index"]] += choice.get("token_ids") or []
            texts[choice["index"]] += choice["delta"].get("content") or ""
            if "prompt_token_ids" in chunk:
                assert prompts.setdefault(choice["index"], chunk["prompt_token_ids"])
    assert ids == {0: ANSWER, 1: ANSWER}
    assert texts == {0: "Hello world", 1: "Hello world"}
    assert prompts == {index: list(client.gateway.job.prompts[0]) for index in (0, 1)}


@pytest.mark.parametrize("fields", [{}, {"echo": True}, {"logprobs": 1}])
async def test_streamed_completion_has_them_all_once(client, model, fields):
    body = {"prompt": ["hello", "one two"], "stream": True, "return_token_ids": True} | fields
    reply = await client.post(COMPLETIONS, body)
    ids, prompts = {0: [], 1: []}, {}
    for chunk in reply.chunks:
        for choice in chunk["choices"]:
            ids[choice["index"]] += choice.get("token_ids") or []
            if "prompt_token_ids" in choice:
                assert choice["index"] not in prompts
                prompts[choice["index"]] = choice["prompt_token_ids"]
    assert ids == {0: ANSWER, 1: ANSWER}
    assert prompts == {0: model.encode_prompt("hello"), 1: model.encode_prompt("one two")}


async def test_tokens_without_text_are_listed_too(client, chat):
    client.gateway.script = lambda _job: [
        [Delta(0, "", [10], reasoning="so", reasoning_tokens=1)],
        [Delta(0, "", [11])],
        [Delta(0, "", [12], calls=[CallPiece(0, "f", "{}")])],
        [Delta(0, "!", [13, 0], finish_reason="stop")],
    ]
    reply = await client.post(CHAT, chat(stream=True, return_token_ids=True))
    choices = [choice for chunk in reply.chunks for choice in chunk["choices"]]
    assert [id_ for choice in choices for id_ in choice.get("token_ids") or []] == [10, 11, 12, 13, 0]


@pytest.mark.parametrize("off", [{}, {"return_token_ids": None}, {"return_token_ids": False}])
@pytest.mark.parametrize("stream", [False, True])
async def test_nobody_else_gets_them(client, chat, off, stream):
    for path, body in ((CHAT, chat(stream=stream)), (COMPLETIONS, {"prompt": "hello", "stream": stream})):
        assert b"token_ids" not in (await client.post(path, body | off)).body
