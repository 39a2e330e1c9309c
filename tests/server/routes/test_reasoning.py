"""Reasoning in chats: switched and limited by requests, apart from the content in answers."""

import pytest

from server.routes.conftest import client_of, small_model
from server.routes.written_answers import (
    CHAT,
    COMPLETIONS,
    HERMES,
    OPENED,
    accepts,
    call,
    client_writing,
    merged,
    refusal,
    tool,
    vocabulary_of,
)

THOUGHT = "<think>\nIt is easy.\n</think>\n\n"
TOOLS = [tool("weather", strict=True)]
OSLO = call("weather", '{"city": "Oslo"}')
JSON = {"response_format": {"type": "json_object"}}


@pytest.fixture(scope="module")
def thinker(tmp_path_factory):
    return small_model(tmp_path_factory.mktemp("thinker"), HERMES)


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """A model with a template that opens the reasoning in the prompt."""
    return small_model(tmp_path_factory.mktemp("opened"), OPENED)


async def answers_of(model, body, *texts, is_cut=False):
    """Return the whole answer to a request, and the streamed one with its usage."""
    client = client_writing(model, *texts, is_cut=is_cut)
    whole = await client.post(CHAT, body)
    assert whole.status == 200, whole.body
    options = {"stream": True, "stream_options": {"include_usage": True}}
    return whole.json, await client.post(CHAT, body | options)


def part(message, name):
    return message.get(name) or ""


async def test_reasoning_is_apart_from_the_content_and_precedes_it(thinker, chat):
    whole, streamed = await answers_of(thinker, chat(), THOUGHT + "Four.")
    message = whole["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("It is easy.", "Four.")
    assert merged(streamed) == {
        "role": "assistant",
        "reasoning_content": "It is easy.",
        "content": "Four.",
        "finish_reason": "stop",
    }
    names = [next(iter(c["delta"]), "") for chunk in streamed.chunks for c in chunk["choices"]][1:-1]
    assert names == sorted(names, reverse=True)
    assert set(names) == {"reasoning_content", "content"}


async def test_reasoning_that_the_prompt_has_opened_begins_at_once(opened, chat):
    whole, streamed = await answers_of(opened, chat(), "It is easy.\n</think>\n\nFour.")
    message = whole["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("It is easy.", "Four.")
    assert merged(streamed)["reasoning_content"] == "It is easy."


async def test_reasoning_tokens_are_counted_in_the_usage(thinker, chat):
    whole, streamed = await answers_of(thinker, chat(), THOUGHT + "Four.")
    usage = whole["usage"]
    assert streamed.chunks[-1]["usage"] == usage
    counted = usage["completion_tokens_details"]["reasoning_tokens"]
    assert len(thinker.tokenizer.encode("It is easy.")) <= counted <= len(thinker.tokenizer.encode(THOUGHT))
    assert counted < usage["completion_tokens"]


async def test_answer_that_is_cut_in_its_reasoning_has_no_content(thinker, chat):
    whole, _ = await answers_of(thinker, chat(), "<think>\nIt is", is_cut=True)
    choice = whole["choices"][0]
    assert part(choice["message"], "reasoning_content") == "It is"
    assert part(choice["message"], "content") == ""
    assert choice["finish_reason"] == "length"


async def test_stop_strings_do_not_end_the_reasoning(thinker, chat):
    whole, streamed = await answers_of(thinker, chat(stop=["e"]), THOUGHT + "Three.")
    message = whole["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("It is easy.", "Thr")
    assert merged(streamed)["content"] == "Thr"


async def test_reasoning_and_calls_are_both_parsed(thinker, chat):
    whole, streamed = await answers_of(thinker, chat(tools=TOOLS), THOUGHT + OSLO)
    message = whole["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("It is easy.", None)
    assert message["tool_calls"][0]["function"]["arguments"] == '{"city": "Oslo"}'
    assert merged(streamed)["reasoning_content"] == "It is easy."
    assert whole["choices"][0]["finish_reason"] == "tool_calls"


# Requests ---------------------------------------------------------------------------------------------

CASES = [
    (JSON, "{}", "no JSON"),
    ({"tools": TOOLS, "tool_choice": "required"}, OSLO, "no call"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "weather"}}}, OSLO, "{}"),
    ({"structured_outputs": {"regex": "[0-9]+"}}, "42", "many"),
]


@pytest.mark.parametrize(("fields", "answer", "other"), CASES, ids=str)
async def test_grammar_begins_where_the_prompt_ends(thinker, opened, chat, fields, answer, other):
    closed = {"chat_template_kwargs": {"enable_thinking": False}}
    rest = THOUGHT.removeprefix("<think>\n")
    # A model, further fields, and the reasoning that may come first.
    for model, more, thoughts in (
        (thinker, {}, ("", THOUGHT)),
        (opened, {}, (rest,)),
        (opened, closed, ("",)),
    ):
        client = client_of(model)
        await client.post(CHAT, chat(**fields, **more))
        grammar = client.gateway.job.sampling.grammar
        vocabulary = vocabulary_of(model)
        for thought in thoughts:
            assert accepts(model, vocabulary, grammar, thought + answer)
            assert not accepts(model, vocabulary, grammar, thought + other)
        if "" not in thoughts:
            assert not accepts(model, vocabulary, grammar, answer)


async def test_chat_without_a_form_has_no_grammar_but_its_reasoning_is_parsed(thinker, opened, chat):
    for model, is_open in ((thinker, False), (opened, True)):
        client = client_of(model)
        await client.post(CHAT, chat())
        job = client.gateway.job
        assert (job.sampling.grammar, job.parts.in_reasoning, job.parts.tools) == (None, is_open, None)


async def prompt_of(model, body):
    client = client_of(model)
    reply = await client.post(CHAT, body)
    assert reply.status == 200, reply.body
    return model.tokenizer.decode(client.gateway.job.prompts[0])


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({}, "<|assistant|>"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "<|assistant|><think>\n\n</think>\n\n"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "<|assistant|>"),
        ({"reasoning_effort": "none"}, "<|assistant|><think>\n\n</think>\n\n"),
        ({"reasoning_effort": "high"}, "effort high\n<|assistant|>"),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            "effort none\n<|assistant|>",
        ),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "medium"}},
            "effort medium\n<|assistant|>",
        ),
    ],
)
async def test_request_switches_reasoning_through_the_template(thinker, chat, fields, end):
    assert (await prompt_of(thinker, chat(**fields))).endswith(end)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
async def test_reasoning_of_earlier_answers_reaches_the_template(thinker, chat, name):
    messages = [*chat()["messages"], {"role": "assistant", "content": "Four.", name: "It is easy."}]
    assert "<|assistant|><think>\nIt is easy.\n</think>\n\nFour." in await prompt_of(
        thinker, chat(messages=messages)
    )


async def test_budget_becomes_a_limit_with_the_tokens_of_the_marks(thinker, opened, chat):
    for model, is_open in ((thinker, False), (opened, True)):
        client = client_of(model)
        await client.post(CHAT, chat(thinking_token_budget=7))
        limit = client.gateway.job.sampling.reasoning_limit
        assert (limit.max_tokens, limit.is_open) == (7, is_open)
        assert model.tokenizer.decode(limit.begin).strip() == "<think>"
        assert model.tokenizer.decode(limit.end).strip() == "</think>"


async def test_no_budget_is_no_limit(opened, model, chat):
    bodies = [chat(), chat(thinking_token_budget=-1), chat(thinking_token_budget=None)]
    bodies.append(chat(thinking_token_budget=5, chat_template_kwargs={"enable_thinking": False}))
    for body in bodies:
        client = client_of(opened)
        await client.post(CHAT, body)
        assert client.gateway.job.sampling.reasoning_limit is None
    client = client_of(model)  # which does not reason
    await client.post(CHAT, chat(thinking_token_budget=5))
    assert client.gateway.job.sampling.reasoning_limit is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"thinking_token_budget": -2}, "thinking_token_budget"),
        ({"thinking_token_budget": 1.5}, "thinking_token_budget"),
        ({"thinking_token_budget": 2**31}, "thinking_token_budget"),
        ({"reasoning_effort": 5}, "reasoning_effort"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"include_reasoning": False}, "include_reasoning"),
        ({"separate_reasoning": False}, "separate_reasoning"),
        ({"reasoning_format": "none"}, "reasoning_format"),
        ({"messages": [{"role": "assistant", "content": "", "reasoning": 5}]}, "messages[0].reasoning"),
    ],
)
async def test_faulty_field_about_reasoning_is_refused(opened, chat, fields, param):
    assert (await refusal(client_of(opened), CHAT, chat(**fields)))[0] == param


async def test_completion_has_no_reasoning_to_limit(opened):
    body = {"prompt": "a", "thinking_token_budget": 5}
    assert (await refusal(client_of(opened), COMPLETIONS, body))[0] == "thinking_token_budget"


async def test_text_of_a_completion_is_not_divided(opened):
    client = client_writing(opened, THOUGHT + OSLO)
    reply = await client.post(COMPLETIONS, {"prompt": "a"})
    assert reply.json["choices"][0]["text"] == THOUGHT + OSLO
    assert "completion_tokens_details" not in reply.json["usage"]
