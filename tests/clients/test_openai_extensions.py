"""OpenAI's package with vLLM's and llama.cpp's further fields, in its `extra_body`."""

from collections.abc import Iterator

import pytest
from openai import OpenAI

from clients.conftest import MODEL

MESSAGES = [{"role": "user", "content": "What is Fairlead?"}]


@pytest.fixture(scope="module")
def client(base_url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=base_url, api_key="unused", max_retries=0) as client:
        yield client


def chat(client, messages=MESSAGES, **body):
    """Return a greedy answer, and its token ids with those of the prompt."""
    answer = client.chat.completions.create(
        model=MODEL,
        messages=messages,
        temperature=0,
        max_tokens=body.pop("max_tokens", 8),
        extra_body={"return_token_ids": True, **body},
    )
    return answer.choices[0].message.content, answer.choices[0].token_ids, answer.prompt_token_ids


def test_token_ids_are_those_that_the_model_wrote(client, server):
    text, ids, prompt = chat(client)
    body = {"model": MODEL, "tokens": ids}
    assert server.http.post("/detokenize", json=body).json()["prompt"] == text
    body = {"model": MODEL, "messages": MESSAGES}
    assert server.http.post("/tokenize", json=body).json()["tokens"] == prompt


def test_streamed_token_ids_are_those_of_the_whole_answer(client):
    _, ids, prompt = chat(client)
    stream = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        temperature=0,
        max_tokens=8,
        stream=True,
        extra_body={"return_token_ids": True},
    )
    chunks = list(stream)
    assert chunks[0].prompt_token_ids == prompt
    assert [id_ for chunk in chunks for one in chunk.choices for id_ in getattr(one, "token_ids", ())] == ids


def test_message_is_continued_where_it_stops(client):
    whole, ids, prompt = chat(client, max_tokens=12)
    assert len(ids) == 12
    beginning, _, _ = chat(client, max_tokens=6)
    messages = [*MESSAGES, {"role": "assistant", "content": beginning}]
    rest, _, longer = chat(
        client, messages, max_tokens=6, continue_final_message=True, add_generation_prompt=False
    )
    assert longer[: len(prompt)] == prompt
    assert len(longer) > len(prompt)
    assert beginning + rest == whole


def test_only_allowed_tokens_are_written(client):
    _, ids, _ = chat(client)
    allowed = sorted(set(ids))[:3]
    _, written, _ = chat(client, allowed_token_ids=allowed, max_tokens=20)
    assert len(written) == 20
    assert set(written) <= set(allowed)


def test_prompt_is_cut_to_its_end(client):
    answer = client.completions.create(
        model=MODEL,
        prompt="word " * 20_000,
        max_tokens=3,
        extra_body={"truncate_prompt_tokens": 50, "return_token_ids": True},
    )
    assert answer.usage.prompt_tokens == len(answer.choices[0].prompt_token_ids) == 50


def test_field_without_effect_is_named(client):
    answer = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=MESSAGES, max_tokens=1, extra_body={"temprature": 1}
    )
    assert answer.headers["warning"] == '299 - "fields without effect: temprature"'


def test_prediction_is_ignored_in_silence(client):
    answer = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=MESSAGES, max_tokens=1, prediction={"type": "content", "content": "a"}
    )
    assert "warning" not in answer.headers


def test_native_completion_is_that_of_openais_route(client, server):
    body = {"prompt": "Fairlead is", "n_predict": 10, "temperature": 0, "return_tokens": True}
    native = server.http.post("/completion", json=body).json()
    answer = client.completions.create(
        model=MODEL,
        prompt="Fairlead is",
        max_tokens=10,
        temperature=0,
        extra_body={"return_token_ids": True},
    )
    (choice,) = answer.choices
    assert (native["content"], native["tokens"]) == (choice.text, choice.token_ids)
    assert native["tokens_evaluated"] == answer.usage.prompt_tokens


def test_chat_through_llama_cpps_routes_is_that_of_a_chat(client, server):
    text, _, ids = chat(client)
    prompt = server.http.post("/apply-template", json={"messages": MESSAGES}).json()["prompt"]
    assert server.http.post("/tokenize", json={"prompt": prompt}).json()["tokens"] == ids
    body = {"prompt": prompt, "n_predict": 8, "temperature": 0}
    assert server.http.post("/completion", json=body).json()["content"] == text


def test_slots_and_props_agree_with_the_seats(server):
    props = server.http.get("/props").json()
    slots = server.http.get("/slots").json()
    assert len(slots) == props["total_slots"] == server.running()["seats"] > 0
    assert not any(slot["is_processing"] for slot in slots)


def test_invocation_is_a_chat(client, server):
    text, _, _ = chat(client)
    body = {"messages": MESSAGES, "max_tokens": 8, "temperature": 0}
    answer = server.http.post("/invocations", json=body).json()
    assert answer["choices"][0]["message"]["content"] == text
