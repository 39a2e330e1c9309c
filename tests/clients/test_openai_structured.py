"""OpenAI's package: answers as pydantic models, tools, and the helper for streams."""

import asyncio
import json
from collections.abc import Iterator

import openai
import pytest
from openai import AsyncOpenAI, OpenAI, pydantic_function_tool

from clients.conftest import MODEL
from clients.forms import QUESTION, GetWeather, Trip

MESSAGES = [{"role": "user", "content": QUESTION}]
WEATHER = pydantic_function_tool(GetWeather, name="get_weather")


@pytest.fixture(scope="module")
def client(base_url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=base_url, api_key="unused", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("seed", range(3))
def test_parse_returns_a_pydantic_model(client, seed):
    answer = client.chat.completions.parse(
        model=MODEL, messages=MESSAGES, response_format=Trip, temperature=1, seed=seed
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    assert isinstance(choice.message.parsed, Trip)
    assert choice.message.parsed == Trip.model_validate_json(choice.message.content)


def test_parse_returns_the_arguments_of_a_required_call(client):
    answer = client.chat.completions.parse(
        model=MODEL, messages=MESSAGES, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False
    )
    (choice,) = answer.choices
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert call.function.name == "get_weather"
    assert isinstance(call.function.parsed_arguments, GetWeather)


def test_parse_raises_an_error_for_an_answer_that_is_cut(client):
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Trip, max_tokens=3)


def test_stream_helper_reports_the_content_as_it_is_parsed(client):
    with client.chat.completions.stream(
        model=MODEL, messages=MESSAGES, response_format=Trip, seed=1
    ) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    kinds = [event.type for event in events]
    assert kinds.count("content.done") == 1
    assert kinds.count("content.delta") > 3
    (done,) = (event for event in events if event.type == "content.done")
    assert done.parsed == final.choices[0].message.parsed
    assert isinstance(done.parsed, Trip)


def test_stream_helper_reports_a_call_as_its_arguments_arrive(client):
    with client.chat.completions.stream(
        model=MODEL,
        messages=MESSAGES,
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        seed=1,
        stream_options={"include_usage": True},
    ) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    deltas = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
    (done,) = (event for event in events if event.type == "tool_calls.function.arguments.done")
    assert "".join(delta.arguments_delta for delta in deltas) == done.arguments
    assert len(deltas) > 1
    assert done.name == "get_weather"
    assert isinstance(done.parsed_arguments, GetWeather)
    (call,) = final.choices[0].message.tool_calls
    assert call.function.arguments == done.arguments
    assert final.choices[0].finish_reason == "tool_calls"
    assert final.usage.completion_tokens > 0


def test_streamed_call_is_that_of_the_whole_answer(client):
    options = {"model": MODEL, "messages": MESSAGES, "tools": [WEATHER], "tool_choice": "required", "seed": 5}
    whole = client.chat.completions.create(**options)
    arguments: dict[int, str] = {}
    for chunk in client.chat.completions.create(**options, stream=True):
        for piece in chunk.choices[0].delta.tool_calls or ():
            arguments[piece.index] = arguments.get(piece.index, "") + (piece.function.arguments or "")
    expected = [call.function.arguments for call in whole.choices[0].message.tool_calls]
    assert list(arguments.values()) == expected


def test_named_function_is_called_and_its_result_is_read(client):
    named = {"type": "function", "function": {"name": "get_weather"}}
    first = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, tools=[WEATHER], tool_choice=named, seed=2
    )
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "stop"
    (call,) = message.tool_calls
    GetWeather.model_validate_json(call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": json.dumps({"degrees": 4})}
    second = client.chat.completions.create(
        model=MODEL, messages=[*MESSAGES, message, result], tools=[WEATHER], max_tokens=20
    )
    assert second.usage.prompt_tokens > first.usage.prompt_tokens


def test_allowed_tools_are_the_only_ones_that_are_called(client):
    other = {"type": "function", "function": {"name": "other", "parameters": {"type": "object"}}}
    allowed = [{"type": "function", "function": {"name": "get_weather"}}]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": allowed}}
    for seed in range(3):
        answer = client.chat.completions.create(
            model=MODEL, messages=MESSAGES, tools=[other, WEATHER], tool_choice=choice, seed=seed
        )
        assert {call.function.name for call in answer.choices[0].message.tool_calls} == {"get_weather"}


@pytest.mark.parametrize(
    ("outputs", "is_valid"),
    [
        ({"choice": ["red", "green"]}, {"red", "green"}.__contains__),
        ({"regex": "[0-9]{4}-[0-9]{2}"}, lambda text: len(text) == 7 and text[4] == "-"),
        ({"grammar": 'start: "a"+ "b"'}, lambda text: text.strip("a") == "b"),
        ({"json": {"type": "integer", "minimum": 3, "maximum": 9}}, lambda text: 3 <= json.loads(text) <= 9),
    ],
    ids=["choice", "regex", "grammar", "json"],
)
def test_constraints_of_vllm_go_in_the_extra_body(client, outputs, is_valid):
    extra = {"structured_outputs": outputs}
    # The most likely answer may be endless where the form allows that.
    options = {"model": MODEL, "temperature": 1, "n": 4, "seed": 3, "max_tokens": 60, "extra_body": extra}
    chat = client.chat.completions.create(messages=MESSAGES, **options)
    text = client.completions.create(prompt="Say:", **options)
    ended = [choice.message.content for choice in chat.choices if choice.finish_reason == "stop"]
    ended += [choice.text for choice in text.choices if choice.finish_reason == "stop"]
    assert ended
    assert all(map(is_valid, ended))


def test_schema_that_cannot_be_obeyed_raises_bad_request_with_its_path(client):
    schema = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, response_format=form)
    assert refused.value.param == "response_format.json_schema.schema.properties.a.not"


def test_asynchronous_client_parses_too(base_url):
    async def ask() -> object:
        async with AsyncOpenAI(base_url=base_url, api_key="unused", max_retries=0) as client:
            asked = [
                client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Trip, seed=seed)
                for seed in range(8)
            ]
            return [answer.choices[0].message.parsed for answer in await asyncio.gather(*asked)]

    answers = asyncio.run(ask())
    assert len(answers) == 8
    assert all(isinstance(answer, Trip) for answer in answers)
