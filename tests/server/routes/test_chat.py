"""POST /v1/chat/completions: the job made from a request, and the response, whole and streamed."""

import json
import threading

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from fairlead.base.job import Delta, Sampling, TokenLogprob
from fairlead.dialects.openai import chat as openai_chat
from fairlead.generation import event_stream

CHAT = "/v1/chat/completions"


async def test_answer_is_what_the_openai_client_expects(client, chat):
    reply = await client.post(CHAT, chat(n=2))
    answer = ChatCompletion.model_validate_json(reply.body, strict=True)
    assert reply.status == 200
    assert reply.headers["content-type"] == "application/json"
    assert answer.id == client.gateway.job.id
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == "small"
    assert answer.system_fingerprint is None
    assert [choice.message.content for choice in answer.choices] == ["Hello world"] * 2
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}
    prompt_tokens = client.gateway.job.prompt_tokens
    assert answer.usage.prompt_tokens == prompt_tokens
    assert answer.usage.completion_tokens == 8
    assert answer.usage.total_tokens == prompt_tokens + 8


async def test_stream_has_exactly_these_bytes(client, chat):
    reply = await client.post(CHAT, chat(stream=True, stream_options={"include_usage": True}))
    job = client.gateway.job
    created = reply.chunks[0]["created"]
    head = (
        f'data: {{"id":"{job.id}","object":"chat.completion.chunk","created":{created},'
        '"model":"small","system_fingerprint":null,"choices":['
    )
    tail = '},"logprobs":null,"finish_reason":null}],"usage":null}\n\n'
    prompt, total = job.prompt_tokens, job.prompt_tokens + 4
    usage = (
        f'{{"prompt_tokens":{prompt},"completion_tokens":4,"total_tokens":{total},'
        '"prompt_tokens_details":{"cached_tokens":0}}'
    )
    expected = [
        head + '{"index":0,"delta":{"role":"assistant","content":""' + tail,
        head + '{"index":0,"delta":{"content":"Hello"' + tail,
        head + '{"index":0,"delta":{"content":" world"' + tail,
        head + '{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop","stop_reason":null}],'
        '"usage":null}\n\n',
        head + '],"usage":' + usage + "}\n\n",
        "data: [DONE]\n\n",
    ]
    assert "".join(expected) == reply.body.decode()
    assert reply.headers["content-type"] == "text/event-stream"
    assert reply.headers["cache-control"] == "no-cache"
    assert reply.headers["x-accel-buffering"] == "no"
    assert reply.is_complete


async def test_last_delta_is_empty_and_comes_after_the_last_text_and_its_logprobs(client, chat):
    logprob = TokenLogprob(40, -0.5)
    client.gateway.script = lambda job: [[Delta(0, "Hi", [40], [logprob], finish_reason="length")]]
    reply = await client.post(CHAT, chat(stream=True, logprobs=True))
    _, text, last = (chunk["choices"][0] for chunk in reply.chunks)
    assert (text["delta"], text["finish_reason"]) == ({"content": "Hi"}, None)
    assert [entry["logprob"] for entry in text["logprobs"]["content"]] == [-0.5]
    assert last == {
        "index": 0,
        "delta": {},
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
    }


@pytest.mark.parametrize("stream", [False, True])
async def test_cached_tokens_of_a_prompt_are_counted_once_for_all_choices(client, chat, stream):
    client.gateway.script = lambda job: [
        [Delta(index, "a", [1], finish_reason="stop", cached_tokens=16 * (index + 1)) for index in range(2)]
    ]
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    reply = await client.post(CHAT, chat(n=2, **options))
    answer = reply.chunks[-1] if stream else reply.json
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}


async def test_all_available_deltas_are_sent_in_one_piece(client, chat):
    reply = await client.post(CHAT, chat(stream=True, n=3))
    assert [piece.count(b"\n\n") for piece in reply.pieces] == [6, 3, 3, 1]


async def test_chunks_are_what_the_openai_client_expects(client, chat):
    reply = await client.post(
        CHAT, chat(stream=True, n=2, stream_options={"include_usage": True, "continuous_usage_stats": True})
    )
    chunks = [ChatCompletionChunk.model_validate_json(event, strict=True) for event in reply.events[:-1]]
    texts = {0: "", 1: ""}
    for chunk in chunks[:-1]:
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
    assert texts == {0: "Hello world", 1: "Hello world"}
    assert [choice.delta.role for chunk in chunks for choice in chunk.choices if choice.delta.role] == [
        "assistant"
    ] * 2
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage]
    assert counts == sorted(counts)
    assert counts[-1] == 8
    assert chunks[-1].choices == []


async def test_without_stream_options_no_chunk_has_usage(client, chat):
    reply = await client.post(CHAT, chat(stream=True))
    assert b"usage" not in reply.body


async def test_deltas_without_visible_text_make_no_chunk(client, chat):
    client.gateway.script = lambda job: [
        [Delta(0, "a", [1])],
        [Delta(0, "", [2])],
        [Delta(0, "b", [3], finish_reason="length")],
    ]
    reply = await client.post(CHAT, chat(stream=True, stream_options={"include_usage": True}))
    deltas = [chunk["choices"][0]["delta"] for chunk in reply.chunks[:-1]]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "a"}, {"content": "b"}, {}]
    assert reply.chunks[-2]["choices"][0]["finish_reason"] == "length"
    assert reply.chunks[-1]["usage"]["completion_tokens"] == 3


def with_logprobs(job):
    h, i = TokenLogprob(40, -0.5, ((40, -0.5), (41, -1.5))), TokenLogprob(41, float("-inf"), ((40, -0.1),))
    return [[Delta(0, "H", [40], [h])], [Delta(0, "I", [41], [i], finish_reason="stop")]]


async def test_logprobs_come_with_their_tokens_and_bytes(client, chat, model):
    client.gateway.script = with_logprobs
    reply = await client.post(CHAT, chat(logprobs=True, top_logprobs=2))
    ChatCompletion.model_validate_json(reply.body, strict=True)
    assert client.gateway.job.sampling.logprobs == 2
    first, second = reply.json["choices"][0]["logprobs"]["content"]
    text = model.tokenizer.token
    assert first["token"] == text(40)
    assert first["bytes"] == list(model.tokenizer.token_bytes(40))
    assert first["logprob"] == -0.5
    assert [(text(40), -0.5), (text(41), -1.5)] == [
        (top["token"], top["logprob"]) for top in first["top_logprobs"]
    ]
    assert second["logprob"] == -9999.0


async def test_large_answer_is_written_in_a_thread(client, chat, monkeypatch):
    client.gateway.script = with_logprobs
    whole = (await client.post(CHAT, chat(logprobs=True, top_logprobs=2))).json["choices"]
    monkeypatch.setattr(event_stream, "MANY_LOGPROBS", 1)
    threads = []
    write = openai_chat.ChatDialect.write_response
    monkeypatch.setattr(
        openai_chat.ChatDialect,
        "write_response",
        lambda *given: threads.append(threading.current_thread()) or write(*given),
    )
    assert whole == (await client.post(CHAT, chat(logprobs=True, top_logprobs=2))).json["choices"]
    assert [threading.current_thread()] != threads


async def test_many_deltas_of_a_stream_are_written_in_a_thread(client, chat, monkeypatch):
    def all_at_once(job):
        (first,), (second,) = with_logprobs(job)
        return [[first, second]]

    client.gateway.script = all_at_once
    body = chat(logprobs=True, top_logprobs=2, stream=True)
    events = (await client.post(CHAT, body)).chunks[1:]
    monkeypatch.setattr(event_stream, "MANY_LOGPROBS", 1)
    threads = []
    write = openai_chat.ChatChunks.write
    monkeypatch.setattr(
        openai_chat.ChatChunks,
        "write",
        lambda *given: threads.append(threading.current_thread()) or write(*given),
    )
    in_thread = (await client.post(CHAT, body)).chunks[1:]
    assert [event["choices"] for event in events] == [event["choices"] for event in in_thread]
    assert threading.current_thread() not in threads[:1]


async def test_streamed_logprobs_are_those_of_the_whole_answer(client, chat):
    client.gateway.script = with_logprobs
    whole = await client.post(CHAT, chat(logprobs=True, top_logprobs=2))
    client.gateway.jobs.clear()
    streamed = await client.post(CHAT, chat(logprobs=True, top_logprobs=2, stream=True))
    for event in streamed.events[:-1]:
        ChatCompletionChunk.model_validate_json(event, strict=True)
    entries = [chunk["choices"][0]["logprobs"] for chunk in streamed.chunks]
    content = [entry for logprobs in entries if logprobs for entry in logprobs["content"]]
    assert content == whole.json["choices"][0]["logprobs"]["content"]


async def test_stop_string_is_reported_as_the_stop_reason(client, chat):
    client.gateway.script = lambda job: [[Delta(0, "x", [1], finish_reason="stop", stop_reason="END")]]
    reply = await client.post(CHAT, chat(stop="END"))
    assert client.gateway.job.stop == ("END",)
    assert reply.json["choices"][0]["stop_reason"] == "END"
    client.gateway.jobs.clear()
    reply = await client.post(CHAT, chat(stop=["END", "STOP"], stream=True))
    assert client.gateway.job.stop == ("END", "STOP")
    assert reply.chunks[-1]["choices"][0]["stop_reason"] == "END"


async def test_every_sampling_field_reaches_the_engine(client, chat):
    await client.post(
        CHAT,
        chat(
            max_tokens=7,
            min_tokens=2,
            temperature=0,
            top_p=0.5,
            top_k=-1,
            min_p=0.1,
            seed=-5,
            presence_penalty=-2,
            frequency_penalty=2,
            repetition_penalty=1.1,
            logit_bias={"5": -100, "6": 1},
            stop_token_ids=[3, 4],
            ignore_eos=True,
        ),
    )
    assert client.gateway.job.sampling == Sampling(
        max_tokens=7,
        min_tokens=2,
        temperature=0.0,
        top_p=0.5,
        top_k=0,
        min_p=0.1,
        seed=-5,
        presence_penalty=-2.0,
        frequency_penalty=2.0,
        repetition_penalty=1.1,
        logit_bias={5: -100.0, 6: 1.0},
        stop_token_ids=(3, 4),
        ignore_eos=True,
    )


async def test_max_completion_tokens_takes_precedence_over_max_tokens(client, chat):
    await client.post(CHAT, chat(max_tokens=5, max_completion_tokens=6))
    assert client.gateway.job.sampling.max_tokens == 6


async def test_known_and_unknown_fields_that_change_nothing_are_ignored(client, chat):
    ignored = {"store": True, "metadata": {"a": "b"}, "service_tier": "auto", "parallel_tool_calls": True}
    reply = await client.post(
        CHAT, chat(**ignored, reasoning_effort="low", response_format={"type": "text"}, new=[1])
    )
    assert reply.status == 200


async def prompt_of(client, model, **body):
    client.gateway.jobs.clear()
    reply = await client.post(CHAT, {"model": "small", **body})
    assert reply.status == 200, reply.body
    (prompt,) = client.gateway.job.prompts
    return model.tokenizer.decode(prompt)


async def test_messages_of_all_roles_reach_the_template(client, model):
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "2"},
        {"role": "assistant", "content": "three"},
        {"role": "user", "content": "four", "name": "bob"},
    ]
    assert await prompt_of(client, model, messages=messages) == (
        "<|system|>be brief\n"
        "<|user|>a\nb\n"
        '<|assistant|>{"name": "f", "parameters": {"x": 1}}\n'
        "<|tool|>2\n"
        "<|assistant|>three\n"
        "<|user|>four\n"
        "<|assistant|>"
    )


async def test_tools_reach_the_template_unless_the_model_must_not_call_them(client, model):
    function = {"name": "f", "description": "does", "parameters": {"type": "object", "properties": {}}}
    request = {
        "messages": [{"role": "user", "content": "go"}],
        "tools": [{"type": "function", "function": function}],
    }
    written = json.dumps(request["tools"])
    assert written in await prompt_of(client, model, **request)
    assert written in await prompt_of(client, model, **request, tool_choice="auto")
    assert "does" not in await prompt_of(client, model, **request, tool_choice="none")


async def test_template_variables_are_passed_to_the_template(client, model):
    messages = [{"role": "user", "content": "go"}]
    prompt = await prompt_of(client, model, messages=messages, chat_template_kwargs={"mood": "gay"})
    assert "(gay)" in prompt


async def test_long_body_or_prompt_is_encoded_in_a_thread_with_the_same_result(client, model):
    # An unknown field makes the body long, but not the prompt.
    messages = [{"role": "user", "content": "hello"}]
    assert (
        await prompt_of(client, model, messages=messages, padding="x" * 30_000)
        == "<|user|>hello\n<|assistant|>"
    )
    reply = await client.post(CHAT, {"messages": [{"role": "user", "content": "hello " * 20_000}]})
    assert (reply.status, reply.error["param"]) == (400, "messages")


@pytest.mark.parametrize(
    ("path", "module"), [(CHAT, "dialects.openai.chat"), ("/tokenize", "server.routes.tokenize")]
)
async def test_many_messages_are_prepared_in_a_thread(client, monkeypatch, path, module):
    threads = []
    prepared = openai_chat.template_messages

    def spy(messages):
        threads.append(threading.current_thread())
        return prepared(messages)

    monkeypatch.setattr(f"fairlead.{module}.template_messages", spy)
    message = {"role": "user", "content": "a"}
    assert (await client.post(path, {"messages": [message]})).status == 200
    await client.post(path, {"messages": [message] * 2_000})
    assert [thread is threading.main_thread() for thread in threads] == [True, False]


async def test_with_one_model_its_name_may_be_omitted(client):
    reply = await client.post(CHAT, {"messages": [{"role": "user", "content": "hello"}]})
    assert reply.json["model"] == "small"
