"""Ollama's /api/generate for our own models."""

import pytest

from fairlead.dialects.ollama.shapes import OllamaText
from server.routes.conftest import small_model
from server.routes.ollama_lines import ENDING, GENERATE, checked, lines_of
from server.routes.written_answers import COMPLETIONS, HERMES, client_writing


@pytest.fixture(scope="module")
def hermes(tmp_path_factory):
    return small_model(tmp_path_factory.mktemp("hermes"), HERMES)


def body(**fields):
    return {"model": "small", "prompt": "hello", **fields}


async def prompt_of(client, **fields):
    reply = await client.post(GENERATE, body(**fields))
    assert reply.status == 200, reply.body
    return client.gateway.jobs[-1].prompts[0]


async def test_stream_has_a_line_for_each_delta_and_a_last_one_with_the_counts(client):
    lines = lines_of(await client.post(GENERATE, body()))
    assert [line["response"] for line in lines] == ["Hello", " world", ""]
    assert lines[-1]["eval_count"] == 4
    assert lines[-1]["prompt_eval_count"] == client.gateway.job.prompt_tokens


async def test_whole_answer_has_the_same_members_as_the_last_line(client):
    reply = await client.post(GENERATE, body(stream=False))
    assert reply.headers["content-type"] == "application/json"
    answer = checked(reply.body, OllamaText)
    assert (answer["response"], answer["done"]) == ("Hello world", True)
    assert answer.keys() == {"model", "created_at", "response", "done"} | ENDING


async def test_prompt_is_a_chat_with_the_system_message(client, model):
    chat = model.encode_chat([{"role": "user", "content": "hello"}])
    assert list(await prompt_of(client)) == chat
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
    assert list(await prompt_of(client, system="Be brief.")) == model.encode_chat(messages)


async def test_raw_prompt_is_that_of_a_completion(client, model):
    raw = await prompt_of(client, raw=True, prompt="hello <eos>")
    await client.post(COMPLETIONS, {"prompt": "hello <eos>"})
    assert list(raw) == list(client.gateway.jobs[-1].prompts[0])


async def test_reasoning_is_apart_from_the_response_but_not_in_raw_answers(hermes):
    text = "<think>\nIt is easy.\n</think>\n\nFour."
    client = client_writing(hermes, text)
    whole = (await client.post(GENERATE, body(stream=False))).json
    assert (whole["thinking"], whole["response"]) == ("It is easy.", "Four.")
    lines = lines_of(await client.post(GENERATE, body()))
    assert "".join(line.get("thinking", "") for line in lines) == "It is easy."
    assert "".join(line["response"] for line in lines) == "Four."
    raw = (await client.post(GENERATE, body(stream=False, raw=True))).json
    assert (raw["response"], "thinking" in raw) == (text, False)


@pytest.mark.parametrize("raw", [False, True])
async def test_format_becomes_a_grammar(client, raw):
    await prompt_of(client, raw=raw, format={"type": "object"})
    assert client.gateway.job.sampling.grammar is not None


@pytest.mark.parametrize("off", [{"suffix": ""}, {"template": ""}, {"context": []}, {"images": []}])
async def test_values_that_mean_off_are_accepted(client, off):
    await prompt_of(client, **off)
