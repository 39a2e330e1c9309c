"""Anthropic's package: messages, streams, tools, thinking, schemas, token counts, and errors as exceptions.

Its models read every event strictly, which its client does not.
"""

import asyncio
import json
import shutil
from collections.abc import Iterator

import pytest
from pydantic import TypeAdapter

from clients.conftest import MODEL
from clients.forms import QUESTION, GetWeather, Trip
from clients.packages import package
from e2e.real_server import RealServer, configured, real_server
from fairlead.base.config import demonstration_model

anthropic = package("anthropic")

MESSAGES = [{"role": "user", "content": QUESTION}]
ASKED = {"model": MODEL, "messages": MESSAGES, "max_tokens": 20}
GREEDY = {"extra_body": {"temperature": 0}}  # the package has no argument for it
WEATHER = {
    "name": "get_weather",
    "description": "Return the weather of a city.",
    "input_schema": GetWeather.model_json_schema(),
    "strict": True,
}
CALLING = {"tools": [WEATHER], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
# Begins every answer with reasoning, unless that is disabled.
THINKING = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking is not false %}<think>\n"
    "{% else %}<think>\n</think>\n{% endif %}{% endif %}"
)


def client_of(running: RealServer, key: str = "unused") -> "anthropic.Anthropic":
    return anthropic.Anthropic(base_url=running.url, api_key=key, max_retries=0)


@pytest.fixture(scope="module")
def client(server: RealServer) -> Iterator["anthropic.Anthropic"]:
    with client_of(server) as client:
        yield client


@pytest.fixture(scope="module")
def thinking_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """A server with keys, of which `sk-slow` allows one request a minute, and a model that reasons."""
    folder = tmp_path_factory.mktemp("thinking")
    directory = folder / "model"
    shutil.copytree(demonstration_model(), directory)
    settings = directory / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": THINKING}))
    keys = [{"key": "sk-any"}, {"key": "sk-slow", "limits": {"requestsPerMinute": 1}}]
    with real_server(*configured(folder, {"path": str(directory)}, apiKeys=keys)) as running:
        yield running


@pytest.fixture(scope="module")
def thinker(thinking_server: RealServer) -> Iterator["anthropic.Anthropic"]:
    with client_of(thinking_server, "sk-any") as client:
        yield client


# Text ----------------------------------------------------------------------------------------------


def test_message_is_that_of_a_chat(client, server):
    message = client.messages.create(**ASKED, **GREEDY, system="Be kind.")
    chat = server.http.post(
        "/v1/chat/completions",
        json={
            "model": MODEL,
            "messages": [{"role": "system", "content": "Be kind."}, *MESSAGES],
            "max_tokens": 20,
            "temperature": 0,
        },
    ).json()
    (block,) = message.content
    assert block.text == chat["choices"][0]["message"]["content"]
    assert (message.stop_reason, message.role, message.model) == ("max_tokens", "assistant", MODEL)
    usage = message.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == chat["usage"]["prompt_tokens"]
    assert usage.output_tokens == chat["usage"]["completion_tokens"] == 20
    assert message._request_id


def test_stream_has_the_message_that_is_sent_whole(client):
    whole = client.messages.create(**ASKED, **GREEDY)
    with client.messages.stream(**ASKED, **GREEDY) as stream:
        texts = list(stream.text_stream)
        final = stream.get_final_message()
    assert len(texts) > 3
    assert "".join(texts) == final.content[0].text == whole.content[0].text
    assert (final.stop_reason, final.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_stop_sequence_is_named(client):
    whole = client.messages.create(**ASKED, **GREEDY)
    word = whole.content[0].text.split()[1]
    stopped = client.messages.create(**ASKED, **GREEDY, stop_sequences=[word])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", word)
    assert whole.content[0].text.startswith(stopped.content[0].text)


def test_beginning_of_the_answer_is_continued(client):
    whole = client.messages.create(**ASKED, **GREEDY)
    begun, space, rest = whole.content[0].text.partition(" ")
    rest = space + rest
    messages = [*MESSAGES, {"role": "assistant", "content": begun}]
    continued = client.messages.create(**ASKED | {"messages": messages}, **GREEDY)
    assert continued.content[0].text[: len(rest)] == rest[: len(continued.content[0].text)]


def test_count_is_that_of_the_prompt(client):
    prompt = {"system": "Be kind.", "messages": MESSAGES, **CALLING}
    counted = client.messages.count_tokens(model=MODEL, **prompt)
    usage = client.messages.create(model=MODEL, max_tokens=50, **prompt).usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


# Tools and schemas ---------------------------------------------------------------------------------


def test_tool_is_used_and_its_result_is_read(client):
    options = {**CALLING, **GREEDY, "max_tokens": 100}
    first = client.messages.create(**ASKED | options)
    assert first.stop_reason == "tool_use"
    (used,) = first.content
    assert (used.type, used.name) == ("tool_use", "get_weather")
    GetWeather.model_validate(used.input)
    result = {
        "type": "tool_result",
        "tool_use_id": used.id,
        "content": [{"type": "text", "text": "4 degrees"}],
    }
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    second = client.messages.create(**ASKED | {"messages": messages, "tools": [WEATHER]})
    assert second.usage.input_tokens + second.usage.cache_read_input_tokens > first.usage.input_tokens


def test_stream_reports_a_call_as_its_input_arrives(client):
    options = {**CALLING, **GREEDY, "max_tokens": 100}
    whole = client.messages.create(**ASKED | options)
    with client.messages.stream(**ASKED | options) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    assert len(pieces) > 1
    assert json.loads("".join(pieces)) == final.content[0].input == whole.content[0].input
    assert final.stop_reason == "tool_use"


@pytest.mark.parametrize("seed", range(3))
def test_parse_returns_a_pydantic_model(client, seed):
    answer = client.messages.parse(
        **ASKED | {"max_tokens": 100}, output_format=GetWeather, extra_body={"temperature": 1, "seed": seed}
    )
    assert answer.stop_reason == "end_turn"
    assert isinstance(answer.parsed_output, GetWeather)


# Thinking ------------------------------------------------------------------------------------------


def test_thinking_is_a_signed_block_before_the_text(thinker):
    thinking = {"type": "enabled", "budget_tokens": 2}
    options = {"max_tokens": 30, "thinking": thinking, **GREEDY}
    whole = thinker.messages.create(**ASKED | options)
    thought, said = whole.content
    assert (thought.type, said.type) == ("thinking", "text")
    assert thought.thinking
    assert thought.signature
    assert 2 <= whole.usage.output_tokens_details.thinking_tokens < whole.usage.output_tokens
    with thinker.messages.stream(**ASKED | options) as stream:
        final = stream.get_final_message()
    assert [block.type for block in final.content] == ["thinking", "text"]
    assert (final.content[0].thinking, final.content[1].text) == (thought.thinking, said.text)
    assert final.content[0].signature
    messages = [*MESSAGES, {"role": "assistant", "content": final.content}, *MESSAGES]
    assert thinker.messages.create(**ASKED | {"messages": messages}).usage.output_tokens > 0


def test_disabled_thinking_leaves_only_text(thinker):
    answer = thinker.messages.create(**ASKED, thinking={"type": "disabled"})
    assert [block.type for block in answer.content] == ["text"]


# Events --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_tokens": 1},
        {"stop_sequences": ["e"]},
        {**CALLING, "max_tokens": 100},
        {**CALLING, "max_tokens": 12},
        {"output_config": {"format": {"type": "json_schema", "schema": Trip.model_json_schema()}}},
        {"thinking": {"type": "enabled", "budget_tokens": 5}},
        {"thinking": {"type": "enabled", "budget_tokens": 5, "display": "omitted"}},
    ],
    ids=str,
)
def test_every_event_is_of_the_types_of_the_package(server, thinking_server, fields):
    running = thinking_server if "thinking" in fields else server
    headers = {"x-api-key": "sk-any"}
    body = ASKED | fields | {"temperature": 0}
    reply = running.http.post("/v1/messages", json=body | {"stream": True}, headers=headers)
    assert reply.status_code == 200, reply.text
    read_event = TypeAdapter(anthropic.types.RawMessageStreamEvent).validate_json
    for event in reply.text.strip().split("\n\n"):
        name, data = event.split("\n")
        read = read_event(data.removeprefix("data: "), strict=True)
        assert name == f"event: {read.type}"
        assert not unknown(read), read
    whole = anthropic.types.Message.model_validate_json(
        running.http.post("/v1/messages", json=body, headers=headers).text, strict=True
    )
    assert not unknown(whole)


def unknown(value: object) -> list[str]:
    """Return the members that the package's models do not have, anywhere in a value."""
    if isinstance(value, list):
        return [name for one in value for name in unknown(one)]
    if not hasattr(value, "model_extra"):
        return []
    own = [name for name in value.model_extra or {} if not name.startswith("_")]
    return own + [name for one in dict(value).values() for name in unknown(one)]


# Errors and load -----------------------------------------------------------------------------------


def test_faulty_requests_raise_their_exceptions(client):
    image = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.create(**ASKED | {"messages": [{"role": "user", "content": [image]}]})
    assert "messages[0].content[0].type" in refused.value.message
    assert refused.value.request_id
    assert refused.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**ASKED | {"model": "nothing"})
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client.messages.create(**ASKED | {"messages": [{"role": "user", "content": "long " * 3000}]})


def test_keys_and_limits_raise_their_exceptions(thinking_server):
    with client_of(thinking_server, "sk-wrong") as wrong, pytest.raises(anthropic.AuthenticationError):
        wrong.messages.create(**ASKED)
    with client_of(thinking_server, "sk-slow") as slow:
        slow.messages.create(**ASKED)
        with pytest.raises(anthropic.RateLimitError) as refused:
            slow.messages.create(**ASKED)
    assert refused.value.body["error"]["type"] == "rate_limit_error"
    assert int(refused.value.response.headers["retry-after"]) > 0


def test_client_that_leaves_a_stream_frees_its_seat(client, server):
    with client.messages.stream(**ASKED | {"max_tokens": 900}, extra_body={"ignore_eos": True}) as stream:
        next(iter(stream.text_stream))
    assert not any(server.wait_until_at_rest().values())


def test_many_messages_at_a_time(server):
    async def ask() -> list["anthropic.types.Message"]:
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key="unused", max_retries=0) as client:

            async def one(number: int) -> "anthropic.types.Message":
                options = ASKED | GREEDY
                if number % 2:
                    return await client.messages.create(**options)
                async with client.messages.stream(**options) as stream:
                    return await stream.get_final_message()

            return await asyncio.gather(*map(one, range(32)))

    answers = asyncio.run(ask())
    assert len(answers) == 32
    assert len({answer.content[0].text for answer in answers}) == 1
    assert {answer.usage.output_tokens for answer in answers} == {answers[0].usage.output_tokens}
