"""Ollama's /api/chat for our own models: requests, answers, streams, tools, reasoning, errors."""

import json

import msgspec
import pytest

from fairlead.base.config import Limits
from fairlead.base.job import CallPiece, Delta, Job, Relay, Sampling
from fairlead.dialects.dialect import AnswerContext, AnswerTimes
from fairlead.dialects.ollama.chat import OllamaChatDialect
from fairlead.dialects.ollama.shapes import OllamaChatAnswer, OllamaText
from fairlead.dialects.ollama.writer import OllamaAnswer
from server.routes.conftest import client_of, small_model
from server.routes.ollama_lines import CHAT, ENDING, checked, lines_of, merged
from server.routes.written_answers import CHAT as OPENAI
from server.routes.written_answers import HERMES, MISTRAL, OPENED, call, client_writing, tool

MESSAGES = [{"role": "user", "content": "hello"}]
OSLO = '{"city": "Oslo", "days": 3}'
TOOLS = [tool("weather"), tool("time", {"type": "object"})]


@pytest.fixture(scope="module")
def hermes(tmp_path_factory):
    return small_model(tmp_path_factory.mktemp("hermes"), HERMES)


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    return small_model(tmp_path_factory.mktemp("opened"), OPENED)


def body(**fields):
    return {"model": "small", "messages": MESSAGES, **fields}


async def answers_of(model, request, *texts, is_cut=False):
    """Return the whole answer to a request, and the lines of the streamed one."""
    client = client_writing(model, *texts, is_cut=is_cut)
    whole = await client.post(CHAT, request | {"stream": False})
    assert (whole.status, whole.headers["content-type"]) == (200, "application/json"), whole.body
    return checked(whole.body, OllamaChatAnswer), lines_of(await client.post(CHAT, request))


# Answers ----------------------------------------------------------------------------------------------


async def test_stream_has_a_line_for_each_delta_and_a_last_one_with_the_counts(client, model):
    lines = lines_of(await client.post(CHAT, body()))
    assert [line["message"]["content"] for line in lines] == ["Hello", " world", ""]
    assert {line["model"] for line in lines} == {"small"}
    prompt_tokens = client.gateway.job.prompt_tokens
    assert (lines[-1]["prompt_eval_count"], lines[-1]["eval_count"]) == (prompt_tokens, 4)
    assert lines[-1]["done_reason"] == "stop"


@pytest.mark.parametrize("stream", [{}, {"stream": None}, {"stream": True}])
async def test_answer_is_streamed_unless_the_request_says_false(client, stream):
    reply = await client.post(CHAT, body(**stream))
    assert merged(lines_of(reply)) == {"role": "assistant", "content": "Hello world"}


async def test_whole_answer_has_the_same_members_as_the_last_line(client):
    reply = await client.post(CHAT, body(stream=False))
    answer = checked(reply.body, OllamaChatAnswer)
    assert answer["message"] == {"role": "assistant", "content": "Hello world"}
    assert answer.keys() - {"model", "created_at", "message", "done"} == ENDING


async def test_durations_contain_the_wait_for_a_seat(client, autojump_clock):
    client.gateway.wait_s = 5.0
    end = lines_of(await client.post(CHAT, body()))[-1]
    assert end["load_duration"] == 5_000_000_000


# Reasoning and tools ----------------------------------------------------------------------------------


async def test_reasoning_precedes_the_content(opened):
    whole, lines = await answers_of(opened, body(), "It is easy.\n</think>\n\nFour.")
    assert whole["message"] == {"role": "assistant", "content": "Four.", "thinking": "It is easy."}
    assert merged(lines) == whole["message"]
    kinds = ["thinking" in line["message"] for line in lines]
    assert kinds == sorted(kinds, reverse=True)


async def test_call_is_one_line_when_its_arguments_are_complete(hermes):
    text = "Let me see." + call("weather", '{"city":\n "Oslo", "days": 3}') + "\n" + call("time", "{}")
    whole, lines = await answers_of(hermes, body(tools=TOOLS), text)
    calls = [line["message"]["tool_calls"] for line in lines if "tool_calls" in line["message"]]
    assert [len(one) for one in calls] == [1, 1]
    functions = [one["function"] for (one,) in calls]
    assert functions == [
        {"index": 0, "name": "weather", "arguments": {"city": "Oslo", "days": 3}},
        {"index": 1, "name": "time", "arguments": {}},
    ]
    assert [one["function"] for one in whole["message"]["tool_calls"]] == functions
    assert (whole["message"]["content"], whole["done_reason"]) == ("Let me see.", "stop")


async def test_call_that_is_cut_is_not_shown(hermes):
    text = call("weather", OSLO)[:-30]
    whole, lines = await answers_of(hermes, body(tools=TOOLS), text, is_cut=True)
    assert "tool_calls" not in whole["message"] | merged(lines)
    assert whole["done_reason"] == "length"


@pytest.mark.parametrize(
    ("think", "end"),
    [
        (None, "<|assistant|>"),
        (True, "<|assistant|>"),
        (False, "<|assistant|><think>\n\n</think>\n\n"),
        ("high", "effort high\n<|assistant|>"),
    ],
)
async def test_think_switches_reasoning_through_the_template(hermes, think, end):
    client = client_of(hermes)
    assert (await client.post(CHAT, body(think=think))).status == 200
    assert hermes.tokenizer.decode(client.gateway.job.prompts[0]).endswith(end)


async def prompt_of(model, messages, **fields):
    client = client_of(model)
    reply = await client.post(CHAT, body(messages=messages, **fields))
    assert reply.status == 200, reply.body
    return model.tokenizer.decode(client.gateway.job.prompts[0])


async def test_conversation_with_a_call_is_rendered_as_openais(hermes):
    arguments = json.loads(OSLO)
    ours = [
        *MESSAGES,
        {
            "role": "assistant",
            "content": "",
            "thinking": "Ask.",
            "tool_calls": [{"function": {"name": "weather", "arguments": arguments}}],
        },
        {"role": "tool", "content": "4 degrees", "tool_name": "weather"},
    ]
    function = {"name": "weather", "arguments": OSLO}
    theirs = [
        *MESSAGES,
        {"role": "assistant", "reasoning_content": "Ask.", "tool_calls": [{"id": "a", "function": function}]},
        {"role": "tool", "content": "4 degrees", "tool_call_id": "a"},
    ]
    client = client_of(hermes)
    await client.post(OPENAI, body(messages=theirs, tools=TOOLS))
    expected = hermes.tokenizer.decode(client.gateway.job.prompts[0])
    assert await prompt_of(hermes, ours, tools=TOOLS) == expected


async def test_calls_without_ids_get_ids_that_mistrals_templates_accept(tmp_path):
    called = [{"function": {"name": name, "arguments": {}}} for name in ("a", "b", "a")]
    messages = [*MESSAGES, {"role": "assistant", "tool_calls": called}]
    assert "[ARGS]" in await prompt_of(small_model(tmp_path, MISTRAL), messages)


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        ([{"tool_name": "b"}, {"tool_name": "a"}, {"tool_name": "a"}], [("b", 1), ("a", 0), ("a", 2)]),
        ([{}, {}, {}, {}], [("a", 0), ("b", 1), ("a", 2), (None, None)]),
        ([{"tool_call_id": "mine"}, {"tool_name": "c"}], [(None, "mine"), ("c", None)]),
        ([{"tool_call_id": "000000001"}, {}], [("b", 1), ("a", 0)]),
    ],
)
def test_result_belongs_to_the_named_call_or_the_first_without_one(results, expected):
    called = [{"function": {"name": name, "arguments": {}}} for name in ("a", "b", "a")]
    messages = [*MESSAGES, {"role": "assistant", "tool_calls": called}]
    messages += [{"role": "tool", "content": "x", **result} for result in results]
    decoded = OllamaChatDialect().decode(json.dumps(body(messages=messages)).encode(), Limits())
    ids = [f"{each:09d}" if isinstance(each, int) else each for _, each in expected]
    found = [(one.get("name"), one.get("tool_call_id")) for one in decoded.messages[2:]]
    assert found == list(zip([name for name, _ in expected], ids, strict=True))


@pytest.mark.parametrize(
    "form",
    ["json", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}],
    ids=["json", "schema"],
)
async def test_format_becomes_a_grammar(client, form):
    assert (await client.post(CHAT, body(format=form))).status == 200
    assert client.gateway.job.sampling.grammar is not None


@pytest.mark.parametrize("form", [None, ""])
async def test_empty_format_is_any_text(client, form):
    assert (await client.post(CHAT, body(format=form))).status == 200
    assert client.gateway.job.sampling.grammar is None


@pytest.mark.parametrize("is_chat", [True, False])
def test_answer_that_was_translated_from_another_dialect_needs_no_model(is_chat):
    job = Job(
        "chat-1", "A", "remote", (), Sampling(max_tokens=9), relay=Relay(CHAT, b"{}"), prompt_estimate=5
    )
    calls = [CallPiece(0, "f", '{"a":'), CallPiece(0, None, " 1}")]
    deltas = [
        Delta(0, reasoning="Hm.", relayed_tokens=2, reasoning_tokens=2),
        Delta(0, "Hello", relayed_tokens=1, calls=calls if is_chat else []),
        Delta(0, relayed_tokens=1, finish_reason="stop"),
        Delta(0, relayed_tokens=3),
    ]
    kind = OllamaChatAnswer if is_chat else OllamaText
    whole = checked(OllamaAnswer(AnswerContext(job, None, 0), chat=is_chat).whole(deltas[:3]), kind)
    writer = OllamaAnswer(AnswerContext(job, None, 0, times=AnswerTimes()), chat=is_chat)
    lines = b"".join([*(writer.write([delta]) for delta in deltas), writer.end()]).splitlines()
    *_, end = (checked(line, kind) for line in lines)
    assert (whole["eval_count"], end["eval_count"], end["prompt_eval_count"]) == (4, 7, 5)
    message = whole["message"] if is_chat else whole
    assert message["thinking"] == "Hm."
    assert (message["content"] if is_chat else message["response"]) == "Hello"


# Options ----------------------------------------------------------------------------------------------


async def sampling_of(client, options):
    client.gateway.jobs.clear()
    reply = await client.post(CHAT, body(options=options))
    assert reply.status == 200, reply.body
    return client.gateway.job.sampling


async def test_absent_options_are_the_models_own_and_ignored_ones_change_nothing(client, model):
    absent = await sampling_of(client, None)
    assert (absent.temperature, absent.top_k) == (model.defaults.temperature, model.defaults.top_k)
    ignored = {"num_ctx": 2048, "num_gpu": 1, "num_thread": 4, "num_keep": 5, "never_heard_of": []}
    off = {"mirostat": 0, "tfs_z": 1, "typical_p": 1.0, "penalize_newline": True, "mirostat_tau": 5.0}
    none = {"num_predict": -1, "seed": -1, "stop": [], "repeat_last_n": -1, "top_k": None}
    assert await sampling_of(client, ignored | off | none) == absent
    assert await sampling_of(client, {"num_predict": -2}) == absent
    assert await sampling_of(client, {"num_predict": 0}) == absent


@pytest.mark.parametrize("window", [-1, 0, 1, 64])
async def test_repeat_last_n_reaches_the_job_beside_its_penalties(client, window):
    options = {"repeat_penalty": 1.5, "presence_penalty": 1, "frequency_penalty": 0.5}
    asked = await sampling_of(client, options | {"repeat_last_n": window})
    assert (asked.repetition_penalty, asked.presence_penalty, asked.frequency_penalty) == (1.5, 1, 0.5)
    assert asked.repeat_last_n == window


# The pipeline -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["small", "small:latest", "tiny", "tiny:latest"])
async def test_model_may_be_named_with_the_tag_latest(client, name):
    assert (await client.post(CHAT, body(model=name))).status == 200
    assert client.gateway.job.model == "small"


async def test_a_served_name_with_the_tag_is_found_without_it(client_with, model):
    client = client_with(models={"llama:latest": model}, aliases={})
    assert (await client.post(CHAT, body(model="llama"))).status == 200
    assert client.gateway.job.model == "llama:latest"


def test_object_without_content_is_no_valid_line():
    with pytest.raises(msgspec.ValidationError):
        checked(b'{"model": "a", "created_at": "Z", "done": false}', OllamaChatAnswer)
