"""OpenAI's package with the Responses API: text, streams, tools, structured output, reasoning, errors."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import openai
import pytest
from openai import AsyncOpenAI, OpenAI, pydantic_function_tool
from openai.types.responses import Response

from clients.conftest import MODEL
from clients.forms import QUESTION, GetWeather, Trip
from e2e.real_server import RealServer
from fairlead.base.errors import NodeFailed, QueueFull
from fairlead.base.job import Delta
from server.routes.conftest import client_of, small_model
from server.routes.raw_http import serving
from server.routes.typed_responses import TYPES, final_response
from server.routes.written_answers import HERMES, call, client_writing

ASK = {"model": MODEL, "input": "Count from 1 to 5.", "temperature": 0}
WEATHER = pydantic_function_tool(GetWeather, name="get_weather")["function"] | {"type": "function"}
REQUIRED = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}


@pytest.fixture(scope="module")
def client(base_url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=base_url, api_key="unused", max_retries=0) as client:
        yield client


def dumped(event):
    """Return an event as it was sent, checked strictly with its type."""
    assert type(event) is TYPES[event.type]
    sent = json.loads(event.to_json())
    TYPES[event.type].model_validate_json(json.dumps(sent), strict=True)
    return sent


# Text ------------------------------------------------------------------------------------------------


def test_text_and_usage_are_those_of_a_chat(client):
    response = client.responses.create(**ASK)
    messages = [{"role": "user", "content": ASK["input"]}]
    chat = client.chat.completions.create(model=MODEL, messages=messages, temperature=0)
    assert "1, 2, 3, 4, 5" in response.output_text
    assert response.output_text == chat.choices[0].message.content
    assert (response.status, response.error) == ("completed", None)
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.usage.output_tokens == chat.usage.completion_tokens
    Response.model_validate_json(response.to_json(), strict=True)


def test_stream_is_the_whole_response(client):
    whole = client.responses.create(**ASK)
    events = [dumped(event) for event in client.responses.create(**ASK, stream=True)]
    final = final_response(events)
    assert final["output"][0]["content"][0]["text"] == whole.output_text
    assert final["usage"]["total_tokens"] == whole.usage.total_tokens


def test_answer_of_a_conversation_is_sent_back_as_it_came(client):
    first = client.responses.create(**ASK)
    conversation = [{"role": "user", "content": ASK["input"]}, *first.output]
    second = client.responses.create(
        **ASK | {"input": [*conversation, {"role": "user", "content": "Again."}]}
    )
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens - 1


def test_response_that_is_cut_is_incomplete(client):
    options = ASK | {"max_output_tokens": 3}
    response = client.responses.create(**options)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.output[0].status == "incomplete"
    *_, last = client.responses.create(**options, stream=True)
    assert last.type == "response.incomplete"
    assert last.response.output_text == response.output_text


def test_instructions_precede_the_input(client):
    plain = client.responses.create(**ASK, max_output_tokens=1).usage.input_tokens
    instructed = client.responses.create(**ASK, max_output_tokens=1, instructions="Be brief.")
    assert instructed.usage.input_tokens > plain
    assert instructed.instructions == "Be brief."


# Structured output and tools -------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_parse_returns_a_pydantic_model(client, seed):
    response = client.responses.parse(
        model=MODEL, input=QUESTION, text_format=Trip, temperature=1, extra_body={"seed": seed}
    )
    assert isinstance(response.output_parsed, Trip)
    assert response.output_parsed == Trip.model_validate_json(response.output_text)


def test_stream_helper_parses_the_text_at_its_end(client):
    with client.responses.stream(model=MODEL, input=QUESTION, text_format=Trip, temperature=0) as stream:
        events = list(stream)
        final = stream.get_final_response()
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 3
    assert deltas[-1].snapshot == final.output_text
    (done,) = (event for event in events if event.type == "response.output_text.done")
    assert isinstance(final.output_parsed, Trip)
    assert done.parsed == final.output_parsed


def test_call_is_answered_with_its_result(client):
    first = client.responses.create(model=MODEL, input=QUESTION, **REQUIRED)
    (called,) = first.output
    assert (called.type, called.name) == ("function_call", "get_weather")
    GetWeather.model_validate_json(called.arguments)
    result = {"type": "function_call_output", "call_id": called.call_id, "output": '{"degrees": 4}'}
    conversation = [{"role": "user", "content": QUESTION}, called, result]
    second = client.responses.create(
        model=MODEL, input=conversation, tools=[WEATHER], max_output_tokens=20, temperature=0
    )
    assert second.usage.input_tokens > first.usage.input_tokens


def test_stream_helper_reports_a_call_as_its_arguments_arrive(client):
    with client.responses.stream(model=MODEL, input=QUESTION, temperature=0, **REQUIRED) as stream:
        events = list(stream)
        final = stream.get_final_response()
    deltas = [event for event in events if event.type == "response.function_call_arguments.delta"]
    (called,) = final.output
    assert len(deltas) > 1
    assert deltas[-1].snapshot == called.arguments
    GetWeather.model_validate_json(called.arguments)


def test_named_function_is_called(client):
    named = {"type": "function", "name": "get_weather"}
    response = client.responses.create(
        model=MODEL, input=QUESTION, tools=[WEATHER], tool_choice=named, temperature=0
    )
    assert [item.name for item in response.output] == ["get_weather"]
    assert response.status == "completed"


# Errors, leaving, many at a time ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"temperature": 9}, "temperature"),
        ({"input": "word " * 5000}, "input"),
        ({"tools": [{"type": "file_search"}]}, "tools[0].type"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": 5}}}}, "text.format"),
    ],
)
def test_wrong_parameter_raises_bad_request_and_names_it(client, wrong, param):
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**ASK | wrong)
    assert refused.value.param.startswith(param)


def test_unknown_model_raises_not_found(client):
    with pytest.raises(openai.NotFoundError) as refused:
        client.responses.create(model="gpt-unknown", input="hello")
    assert refused.value.code == "model_not_found"


def test_leaving_a_stream_frees_the_seat(client, server: RealServer):
    options = {"input": "hello", "model": MODEL, "extra_body": {"ignore_eos": True}}
    stream = client.responses.create(**options, stream=True)
    for event in stream:
        if event.type == "response.output_text.delta":
            break
    stream.close()
    assert not any(server.wait_until_at_rest().values())


def test_thirty_two_concurrent_streams_all_get_the_whole_answer(client, server: RealServer):
    alone = client.responses.create(**ASK)

    def streamed(number: int) -> str:
        events = client.responses.create(**ASK, stream=True, user=f"user-{number % 4}")
        return final_response([dumped(event) for event in events])["output"][0]["content"][0]["text"]

    with ThreadPoolExecutor(32) as pool:
        assert list(pool.map(streamed, range(32))) == [alone.output_text] * 32
    assert not any(server.wait_until_at_rest().values())


# Reasoning and failures, with answers that the test writes --------------------------------------------


@asynccontextmanager
async def client_to(application):
    async with serving(application.app) as server:
        url = "http://{}:{}/v1".format(*server.address)
        async with AsyncOpenAI(base_url=url, api_key="unused", max_retries=0) as client:
            yield client


@pytest.fixture(scope="module")
def hermes(tmp_path_factory):
    return small_model(tmp_path_factory.mktemp("hermes"), HERMES)


async def test_reasoning_and_calls_are_read_and_sent_back(hermes):
    text = "<think>\nIt is easy.\n</think>\n\nLet me see." + call("get_weather", '{"city": "Oslo"}')
    application = client_writing(hermes, text)
    async with client_to(application) as client:
        options = {"model": "small", "tools": [WEATHER], "reasoning": {"effort": "low"}}
        stream = await client.responses.create(input=QUESTION, stream=True, **options)
        final = final_response([dumped(event) async for event in stream])
        response = await client.responses.create(input=QUESTION, **options)
        reasoning, message, called = response.output
        assert reasoning.content[0].text == "It is easy."
        assert message.content[0].text == response.output_text == "Let me see."
        assert [item["type"] for item in final["output"]] == ["reasoning", "message", "function_call"]
        result = {"type": "function_call_output", "call_id": called.call_id, "output": "4"}
        conversation = [{"role": "user", "content": QUESTION}, *response.output, result]
        await client.responses.create(input=conversation, **options)
    prompt = hermes.tokenizer.decode(application.gateway.jobs[-1].prompts[0])
    assert "<think>\nIt is easy.\n</think>\n\nLet me see.<tool_call>" in prompt


async def test_stream_that_fails_ends_with_its_event_and_an_error(hermes):
    failing = client_of(hermes, gateway_script=lambda _job: [[Delta(0, "Hel", [1])], NodeFailed("it failed")])
    events = []

    async def read(stream):
        async for event in stream:
            events.append(dumped(event))  # noqa: PERF401  those before the error count

    async with client_to(failing) as client:
        stream = await client.responses.create(model="small", input="hello", stream=True)
        # Since its third version the package passes on the error of its transport.
        with pytest.raises(Exception, match=r"Connection error|peer closed connection"):
            await read(stream)
    response = final_response(events)
    assert (response["status"], response["error"]["message"]) == ("failed", "it failed")


async def test_refusal_raises_its_own_error(hermes):
    full = client_of(hermes)
    full.gateway.refusal = QueueFull("full", retry_after_s=7)
    async with client_to(full) as client:
        with pytest.raises(openai.RateLimitError) as refused:
            await client.responses.create(model="small", input="hello", stream=True)
    assert (refused.value.code, refused.value.response.headers["retry-after"]) == ("queue_full", "7")
