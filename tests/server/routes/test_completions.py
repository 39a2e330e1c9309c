"""POST /v1/completions."""

import pytest
from openai.types import Completion

from fairlead.base.job import Delta, TokenLogprob

COMPLETIONS = "/v1/completions"


async def test_answer_is_what_the_openai_client_expects(client):
    reply = await client.post(COMPLETIONS, {"model": "small", "prompt": "hello", "n": 2, "best_of": 2})
    answer = Completion.model_validate_json(reply.body, strict=True)
    assert answer.id.startswith("cmpl-")
    assert [choice.text for choice in answer.choices] == ["Hello world"] * 2
    assert answer.usage.completion_tokens == 8


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hello", ["hello"]),
        (["hello", "world"], ["hello", "world"]),
        ([72, 73], [[72, 73]]),
        ([[72], [73, 74]], [[72], [73, 74]]),
    ],
)
async def test_prompt_may_have_four_forms(client, model, prompt, expected):
    reply = await client.post(COMPLETIONS, {"prompt": prompt})
    assert reply.status == 200
    encoded = [model.encode_prompt(one) if isinstance(one, str) else one for one in expected]
    assert encoded == [list(one) for one in client.gateway.job.prompts]
    assert len(reply.json["choices"]) == len(expected)


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_puts_each_prompt_before_its_answers(client, model, stream):
    reply = await client.post(
        COMPLETIONS, {"prompt": ["one ", "two "], "n": 2, "echo": True, "stream": stream}
    )
    texts = [""] * 4
    for chunk in reply.chunks if stream else [reply.json]:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == ["one Hello world"] * 2 + ["two Hello world"] * 2


async def test_token_ids_are_echoed_as_their_text(client, model):
    prompt = model.encode_prompt("hello world")
    reply = await client.post(COMPLETIONS, {"prompt": prompt, "echo": True})
    assert reply.json["choices"][0]["text"] == "hello worldHello world"


async def test_stream_has_exactly_these_bytes(client):
    reply = await client.post(COMPLETIONS, {"prompt": "hello", "stream": True})
    head = (
        f'data: {{"id":"{client.gateway.job.id}","object":"text_completion",'
        f'"created":{reply.chunks[0]["created"]},"model":"small","system_fingerprint":null,"choices":['
    )
    expected = [
        head + '{"index":0,"text":"Hello","logprobs":null,"finish_reason":null}]}\n\n',
        head + '{"index":0,"text":" world","logprobs":null,"finish_reason":null}]}\n\n',
        head + '{"index":0,"text":"","logprobs":null,"finish_reason":"stop","stop_reason":null}]}\n\n',
        "data: [DONE]\n\n",
    ]
    assert "".join(expected) == reply.body.decode()


def two_tokens(job):
    first, second = TokenLogprob(40, -0.5, ((41, -0.25),)), TokenLogprob(41, -1.0, ((41, -1.0),))
    return [[Delta(0, "x", [40], [first])], [Delta(0, "y", [41], [second], finish_reason="stop")]]


async def test_logprobs_are_four_parallel_lists(client, model):
    client.gateway.script = two_tokens
    reply = await client.post(COMPLETIONS, {"prompt": "hello", "logprobs": 1})
    Completion.model_validate_json(reply.body, strict=True)
    first, second = model.tokenizer.token(40), model.tokenizer.token(41)
    assert reply.json["choices"][0]["logprobs"] == {
        "tokens": [first, second],
        "token_logprobs": [-0.5, -1.0],
        "top_logprobs": [{first: -0.5, second: -0.25}, {second: -1.0}],
        "text_offset": [0, len(first)],
    }


async def test_text_offsets_continue_across_chunks(client, model):
    client.gateway.script = two_tokens
    reply = await client.post(COMPLETIONS, {"prompt": "hello", "logprobs": 0, "stream": True})
    offsets = [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in reply.chunks]
    assert offsets == [[0], [len(model.tokenizer.token(40))]]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1, [2]]}, "prompt"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": [299, 300]}, "prompt"),
        ({"prompt": [10**30]}, "prompt[0]"),
        ({"prompt": [1.5]}, "prompt[0]"),
        ({"prompt": None}, "prompt"),
        ({}, "prompt"),
        ({"prompt": [1] * 4096}, "prompt"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "best_of": 2}, "best_of"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "x", "echo": False, "max_tokens": 0}, "max_tokens"),
        ({"prompt": "x", "prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt": "x", "prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt": "x", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt": [[1] * 4000] * 8, "prompt_logprobs": 20}, "prompt_logprobs"),
        ({"prompt": [[1] * 4000] * 8, "echo": True, "logprobs": 20}, "logprobs"),
        ({"prompt": "x", "logprobs": 21}, "logprobs"),
        ({"prompt": ["x"] * 9}, "prompt"),
        ({"prompt": ["x"] * 3, "n": 3}, "n"),
    ],
)
async def test_invalid_field_is_refused_by_name(client, fields, param):
    reply = await client.post(COMPLETIONS, fields)
    assert (reply.status, reply.error["param"]) == (400, param)
    overflows = fields.get("prompt") == [1] * 4096
    assert reply.error["code"] == ("context_length_exceeded" if overflows else "invalid_request")
    assert client.gateway.jobs == []


async def test_request_may_fill_the_context_to_its_last_token(client):
    reply = await client.post(COMPLETIONS, {"prompt": [1] * 4000, "max_tokens": 96})
    assert reply.status == 200
    assert client.gateway.job.sampling.max_tokens == 96
