"""Ollama's package: texts, chats, streams, tools, schemas, reasoning, embeddings, models, errors."""

import asyncio
import dataclasses
import json
from collections.abc import Callable, Iterator

import pytest
import trio

pytest.importorskip("ollama", exc_type=ImportError)

import ollama

from clients.conftest import MODEL
from clients.forms import QUESTION, Trip
from e2e.real_server import RealServer, until
from fairlead.language.text.embedding import EmbeddingSettings
from server.routes.conftest import client_of, small_model
from server.routes.raw_http import serving
from server.routes.test_embeddings import WIDTH, script
from server.routes.written_answers import HERMES, call, client_writing

MESSAGES = [{"role": "user", "content": QUESTION}]
SHORT = {"num_predict": 8, "seed": 1, "temperature": 0}


@pytest.fixture(scope="module")
def client(server: RealServer) -> Iterator[ollama.Client]:
    with ollama.Client(server.url) as client:
        yield client


def get_weather(city: str, unit: str = "C") -> str:
    """Return the weather of a city.

    Args:
        city: its name
        unit: of the temperature
    """
    return f"4 {unit} in {city}"


async def with_client(app, use: Callable[[ollama.Client], object]) -> object:
    """Return what `use` returns, called in a thread with a client of an application on a real socket."""
    async with serving(app) as listening:
        host, port = listening.address

        def run() -> object:
            with ollama.Client(f"http://{host}:{port}") as client:
                return use(client)

        return await trio.to_thread.run_sync(run)


# Answers ----------------------------------------------------------------------------------------------


def test_text_is_generated(client):
    answer = client.generate(MODEL, QUESTION, system="Be brief.", options=SHORT)
    assert (answer.done, answer.done_reason, answer.eval_count) == (True, "length", 8)
    assert answer.response
    assert answer.total_duration >= answer.prompt_eval_duration + answer.eval_duration > 0


def test_streamed_text_is_that_of_the_whole_answer(client):
    whole = client.generate(MODEL, QUESTION, options=SHORT)
    pieces = list(client.generate(MODEL, QUESTION, options=SHORT, stream=True))
    # How many there are depends on how fast the client reads.
    assert [piece.done for piece in pieces] == [*[False] * (len(pieces) - 1), True]
    assert pieces[0].response
    assert "".join(piece.response for piece in pieces) == whole.response
    assert pieces[-1].eval_count == whole.eval_count
    assert pieces[-1].prompt_eval_count == whole.prompt_eval_count


def test_raw_text_is_continued(client):
    assert client.generate(MODEL, "One, two,", raw=True, options=SHORT).eval_count == 8


def test_chat_and_its_counts_are_those_of_openais_chat(client, server):
    ours = client.chat(MODEL, MESSAGES, options=SHORT)
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 8, "temperature": 0}
    theirs = server.http.post("/v1/chat/completions", json=body).json()
    assert ours.message.content == theirs["choices"][0]["message"]["content"]
    assert ours.prompt_eval_count == theirs["usage"]["prompt_tokens"]
    assert ours.eval_count == theirs["usage"]["completion_tokens"]


def test_streamed_chat_is_that_of_the_whole_answer(client):
    whole = client.chat(MODEL, MESSAGES, options=SHORT)
    pieces = list(client.chat(MODEL, MESSAGES, options=SHORT, stream=True))
    assert "".join(piece.message.content for piece in pieces) == whole.message.content
    assert [piece.done for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def test_answer_has_the_form_of_a_schema(client):
    schema = Trip.model_json_schema()
    answer = client.chat(MODEL, MESSAGES, format=schema, options={"temperature": 1, "seed": 2})
    assert answer.done_reason == "stop"
    assert Trip.model_validate_json(answer.message.content)


def test_answer_may_be_any_json(client):
    answer = client.generate(MODEL, QUESTION, format="json", options={"seed": 2, "num_predict": 60})
    if answer.done_reason == "stop":
        assert isinstance(json.loads(answer.response), dict)
    assert answer.response.startswith("{")


@pytest.mark.parametrize("think", [True, False, "low"])
def test_reasoning_can_be_switched(client, think):
    assert client.chat(MODEL, MESSAGES, think=think, options=SHORT).done


async def test_reasoning_and_calls_are_read_and_results_are_sent_back(tmp_path):
    model = small_model(tmp_path, HERMES)
    text = "<think>\nLook.\n</think>\n\nSo:" + call("get_weather", '{"city": "Oslo"}')
    app = client_writing(model, text)

    def use(client: ollama.Client) -> None:
        messages = list(MESSAGES)
        first = client.chat("small", messages, tools=[get_weather], think=True)
        assert (first.message.thinking, first.message.content) == ("Look.", "So:")
        (called,) = first.message.tool_calls
        assert (called.function.name, called.function.arguments) == ("get_weather", {"city": "Oslo"})
        result = get_weather(**called.function.arguments)
        messages += [first.message, {"role": "tool", "content": result, "tool_name": "get_weather"}]
        second = client.chat("small", messages, tools=[get_weather])
        assert second.prompt_eval_count > first.prompt_eval_count
        pieces = list(client.chat("small", messages, tools=[get_weather], stream=True))
        (streamed,) = (piece.message.tool_calls for piece in pieces if piece.message.tool_calls)
        assert streamed == first.message.tool_calls
        assert "".join(piece.message.thinking or "" for piece in pieces) == "Look."

    await with_client(app.app, use)
    prompt = model.tokenizer.decode(app.gateway.jobs[-1].prompts[0])
    assert "4 C in Oslo" in prompt


def test_window_of_the_penalties_lets_tokens_come_again(client):
    """Within a window as long as the answer no token comes twice, as the penalty is extreme."""

    def repeats(window: int) -> bool:
        options = {**SHORT, "num_predict": 30, "repeat_penalty": 100.0, "repeat_last_n": window}
        answer = client.generate(MODEL, "a, b, a, b,", raw=True, options=options, logprobs=True)
        tokens = [entry.token for entry in answer.logprobs]
        return len(set(tokens)) < len(tokens)

    assert repeats(0)
    assert repeats(1)
    assert not repeats(1000)
    assert not repeats(-1)


def test_template_and_context_are_ignored(client):
    plain = client.generate(MODEL, QUESTION, options=SHORT)
    other = client.generate(MODEL, QUESTION, options=SHORT, template="{{ .Prompt }}", context=[1, 2])
    assert other.response == plain.response


async def test_text_that_is_too_long_is_cut_unless_the_client_forbids_it(tmp_path):
    embedder = dataclasses.replace(
        small_model(tmp_path), embedding=EmbeddingSettings(WIDTH, normalized=False)
    )
    app = client_of(embedder, gateway_script=script)

    def use(client: ollama.Client) -> None:
        text = "hello world " * 5000
        assert client.embed("small", text).prompt_eval_count == embedder.longest_prompt
        assert client.embed("small", text, truncate=True).prompt_eval_count == embedder.longest_prompt
        assert client.embeddings("small", text).embedding
        with pytest.raises(ollama.ResponseError, match="input: "):
            client.embed("small", text, truncate=False)

    await with_client(app.app, use)


async def test_texts_are_embedded(tmp_path):
    embedder = dataclasses.replace(
        small_model(tmp_path), embedding=EmbeddingSettings(WIDTH, normalized=False)
    )
    app = client_of(embedder, gateway_script=script).app

    def use(client: ollama.Client) -> None:
        answer = client.embed("small", ["hello", "one two"])
        assert [len(vector) for vector in answer.embeddings] == [WIDTH, WIDTH]
        assert answer.prompt_eval_count > 0
        assert len(client.embed("small", "hello", dimensions=2).embeddings[0]) == 2
        assert len(client.embeddings("small", "hello").embedding) == WIDTH

    await with_client(app, use)


# Models -----------------------------------------------------------------------------------------------


def test_models_are_listed_and_described(client):
    (listed,) = client.list().models
    assert listed.model == MODEL
    assert listed.size > 0
    assert listed.modified_at is not None
    shown = client.show(MODEL)
    assert "completion" in shown.capabilities
    assert shown.modelinfo["general.architecture"] == shown.details.family
    assert "message" in shown.template


def test_model_is_unloaded_and_loaded_by_requests_without_content(client):
    assert client.generate(MODEL, keep_alive=0).done_reason == "unload"
    assert client.ps().models == []
    assert client.chat(MODEL, keep_alive="5m").done_reason == "load"
    (running,) = client.ps().models
    assert (running.model, running.size > 0) == (MODEL, True)
    assert running.expires_at is not None
    assert client.generate(MODEL, keep_alive=-1).done_reason == "load"
    (kept,) = client.ps().models
    assert kept.expires_at > running.expires_at
    assert client.generate(MODEL, QUESTION, options=SHORT, keep_alive=0).response
    until(lambda: not client.ps().models)
    assert client.generate(MODEL, QUESTION, options=SHORT, keep_alive=-1).response


# Errors -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_unknown_model_is_a_404(client, stream):
    with pytest.raises(ollama.ResponseError, match="is not served here") as raised:
        list(client.chat("nothing", MESSAGES, stream=stream))
    assert raised.value.status_code == 404


def test_invalid_options_are_a_400_with_the_field(client):
    with pytest.raises(ollama.ResponseError, match=r"^options\.temperature: ") as raised:
        client.chat(MODEL, MESSAGES, options={"temperature": 9})
    assert raised.value.status_code == 400


@pytest.mark.parametrize("name", ["pull", "push", "delete"])
def test_what_changes_models_is_a_501(client, name):
    with pytest.raises(ollama.ResponseError, match="is not served") as raised:
        getattr(client, name)(MODEL)
    assert raised.value.status_code == 501


# Load -------------------------------------------------------------------------------------------------


def test_leaving_a_stream_frees_its_seat(client, server):
    stream = client.chat(MODEL, MESSAGES, stream=True, options={"num_predict": -1, "temperature": 1})
    next(stream)
    stream.close()
    assert not any(server.wait_until_at_rest().values())


def test_many_clients_are_answered_at_a_time(server):
    async def ask() -> list[str]:
        async with ollama.AsyncClient(server.url) as client:
            answers = await asyncio.gather(*(client.chat(MODEL, MESSAGES, options=SHORT) for _ in range(32)))
            return [answer.message.content for answer in answers]

    assert len(set(asyncio.run(ask()))) == 1
