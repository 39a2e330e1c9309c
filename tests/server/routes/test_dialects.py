"""The rules that every dialect obeys. What one dialect has alone is in the tests of that dialect."""

import dataclasses
import json
import re
import struct
from contextlib import suppress

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from fairlead.base import errors
from fairlead.base.config import ApiKey, Limits, QueueConfig
from fairlead.base.errors import Cancelled, InvalidRequest, NodeFailed, QueueFull, QueueTimeout
from fairlead.base.job import Delta, TokenLogprob
from fairlead.generation import event_stream
from fairlead.language.text.embedding import EmbeddingSettings
from fairlead.server.routes.route_table import ROUTES
from fake_fleet import FakeFleet
from server.routes.conftest import FakeGateway, client_of, hello_world, small_model
from server.routes.dialects import CHAT, DIALECTS, TEXTS, VECTORS, Answer
from server.routes.schema_values import ANYTHING
from server.routes.written_answers import HERMES, MISTRAL, accepts, call, vocabulary_of, writing

THOUGHT = "<think>\nIt is easy.\n</think>\n\n"
OSLO = '{"city": "Oslo", "days": 3}'
WEATHER, TIME = call("weather", OSLO), call("time", "{}")
WIDTH = 2
KEYS = (ApiKey("sk-ana", user="ana"), ApiKey("sk-other", models=("other",)))
EARLY_S = 1.0

each = pytest.mark.parametrize("dialect", DIALECTS, ids=str)
each_text = pytest.mark.parametrize("dialect", TEXTS, ids=str)
whole_and_streamed = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
# Each dialect whole, and streamed where it has streams.
each_form = pytest.mark.parametrize(
    ("dialect", "stream"),
    [(one, stream) for one in DIALECTS for stream in (False, True) if one.streamed or not stream],
    ids=lambda value: str(value) if not isinstance(value, bool) else "streamed" if value else "whole",
)


def with_option(name):
    return pytest.mark.parametrize("dialect", [one for one in TEXTS if name in one.options], ids=str)


def with_member(name):
    return pytest.mark.parametrize("dialect", [one for one in TEXTS if getattr(one, name)], ids=str)


# One application -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hermes(tmp_path_factory):
    return small_model(tmp_path_factory.mktemp("hermes"), HERMES)


def served(text_model, *keys, queue=None, **changes):
    """Return a client of a server with a model of texts, one of vectors, and one of another server."""
    embedder = dataclasses.replace(text_model, embedding=EmbeddingSettings(WIDTH, normalized=False))
    return client_of(
        text_model,
        *keys,
        queue=queue,
        models={"small": text_model, "vectors": embedder},
        fleet=FakeFleet(["small", "vectors"], ["remote"]),
        aliases={"tiny": "small", "tiny vectors": "vectors"},
        **changes,
    )


@pytest.fixture(scope="module")
def applications(hermes):
    """The applications of this module: open to all, with keys, and with streams that begin early."""
    return {
        "open": served(hermes),
        "keys": served(hermes, *KEYS),
        "early": served(hermes, queue=QueueConfig(keep_alive_s=EARLY_S)),
    }


@pytest.fixture
def client(applications):
    return renewed(applications["open"])


@pytest.fixture
def client_with_keys(applications):
    return renewed(applications["keys"])


@pytest.fixture
def early_client(applications):
    return renewed(applications["early"])


def renewed(client):
    """Return a client whose gateway has forgotten the tests before."""
    vars(client.gateway).update(vars(FakeGateway(answering)))
    return client


def answering(job):
    """Answer with "Hello world", or with a vector for each text."""
    if not job.embed:
        return hello_world(job)
    vector = struct.pack("<2f", 3.0, 4.0)
    return [[Delta(index, finish_reason="stop", vector=vector)] for index in range(job.sequences)]


def body_of(dialect, **fields):
    return dialect.body(**{"model": "small" if dialect in TEXTS else "vectors", **fields})


async def answer_of(client, dialect, *, stream=False, **fields):
    reply = await client.post(
        dialect.path, body_of(dialect, stream=stream, **usage(dialect, stream), **fields)
    )
    return dialect.answer(reply, stream=stream)


def route_of(dialect):
    return next(route for route in ROUTES if (route.method, route.path) == ("POST", dialect.path))


def usage(dialect, stream):
    """Return the members with which a stream of OpenAI's older dialects counts its tokens."""
    counts = stream and dialect.path in ("/v1/chat/completions", "/v1/completions")
    return {"stream_options": {"include_usage": True}} if counts else {}


async def refusal(client, dialect, body, status=400):
    """Return the refusal of a request, which reaches no queue."""
    reply = await client.post(dialect.path, body)
    assert reply.status == status, reply.body
    assert reply.headers["content-type"] == "application/json"
    assert client.gateway.jobs == []
    return dialect.failure(reply.json)


# Answers -------------------------------------------------------------------------------------------


@each_text
@whole_and_streamed
async def test_answer_has_its_text_end_and_counts(client, dialect, stream):
    answer = await answer_of(client, dialect, stream=stream)
    prompt_tokens = client.gateway.job.prompt_tokens
    cached = 0 if "cached" in dialect.options else None
    assert answer == Answer("Hello world", end="stop", prompt_tokens=prompt_tokens, tokens=4, cached=cached)
    assert client.gateway.job.stream == stream


@with_option("reasoning")
@whole_and_streamed
async def test_answer_prompt_and_counts_are_those_of_an_openai_chat(client, hermes, dialect, stream):
    tools = [one.with_tools or {} for one in (CHAT, dialect)]
    text = THOUGHT + "Let me see." + (WEATHER + TIME if dialect.with_tools else "")
    client.gateway.script = writing(hermes, text)
    theirs = await answer_of(client, CHAT, **(tools[0] if dialect.with_tools else {}))
    ours = await answer_of(client, dialect, stream=stream, **tools[1])
    chat, job = client.gateway.jobs
    assert (job.prompts, job.parts) == (chat.prompts, chat.parts)
    assert (ours.text, ours.reasoning) == (theirs.text, theirs.reasoning) == ("Let me see.", "It is easy.")
    assert [arguments_of(one) for one in ours.calls] == [arguments_of(one) for one in theirs.calls]
    assert len(ours.calls) == (2 if dialect.with_tools else 0)
    assert (ours.prompt_tokens, ours.tokens) == (theirs.prompt_tokens, theirs.tokens)
    if "calls_end" in dialect.options:
        assert ours.end == theirs.end


def arguments_of(one):
    name, arguments = one
    return name, json.loads(arguments) if isinstance(arguments, str) else arguments


@each_text
@whole_and_streamed
async def test_stop_string_ends_the_answer(client, hermes, dialect, stream):
    client.gateway.script = writing(hermes, "Hello world")
    answer = await answer_of(client, dialect, stream=stream, **dialect.sampled(stop=["wor"]))
    assert (answer.text, answer.end) == ("Hello ", "stop")
    assert client.gateway.job.stop == ("wor",)


@each_text
@whole_and_streamed
async def test_answer_that_is_cut_has_the_reason_length(client, hermes, dialect, stream):
    client.gateway.script = writing(hermes, "Hello", is_cut=True)
    answer = await answer_of(client, dialect, stream=stream)
    assert (answer.text, answer.end) == ("Hello", "length")


@with_option("reasoning")
@whole_and_streamed
async def test_answer_that_is_cut_in_its_reasoning_has_no_text(client, hermes, dialect, stream):
    client.gateway.script = writing(hermes, "<think>\nIt is", is_cut=True)
    answer = await answer_of(client, dialect, stream=stream)
    assert (answer.text, answer.reasoning, answer.end) == ("", "It is", "length")


@each_text
@whole_and_streamed
async def test_answer_may_be_empty(client, dialect, stream):
    client.gateway.script = lambda job: [[Delta(0, "", [0], finish_reason="stop")]]
    answer = await answer_of(client, dialect, stream=stream)
    assert (answer.text, answer.reasoning, answer.calls, answer.end) == ("", "", [], "stop")


@with_option("cached")
@whole_and_streamed
async def test_cached_tokens_of_the_prompt_are_counted(client, dialect, stream):
    client.gateway.script = lambda job: [[Delta(0, "a", [1], finish_reason="stop", cached_tokens=2)]]
    answer = await answer_of(client, dialect, stream=stream)
    assert (answer.prompt_tokens, answer.cached) == (client.gateway.job.prompt_tokens, 2)


@with_option("ids")
async def test_ids_of_calls_fit_templates_of_mistral(tmp_path, dialect):
    mistral = small_model(tmp_path, MISTRAL)
    client = served(mistral, gateway_script=writing(mistral, f"[TOOL_CALLS]weather[ARGS]{OSLO}"))
    (used,) = (await answer_of(client, dialect, **dialect.with_tools)).ids
    assert re.fullmatch("[0-9a-z]{9}", used)


@with_member("with_tools")
async def test_text_after_a_call_is_kept(client, hermes, dialect):
    client.gateway.script = writing(hermes, WEATHER + "Done.")
    answer = await answer_of(client, dialect, stream=True, **dialect.with_tools)
    assert (answer.text, len(answer.calls)) == ("Done.", 1)


@each_text
async def test_deltas_may_be_merged_anywhere(client, hermes, dialect):
    text = THOUGHT + "Let me see." + (WEATHER if dialect.with_tools else "")
    script = writing(hermes, text)

    def merging(job):
        whole = Delta(0)
        for (delta,) in script(job):
            whole.merge(delta)
        return [[whole]]

    client.gateway.script = script
    apart = await answer_of(client, dialect, stream=True, **(dialect.with_tools or {}))
    client.gateway.script = merging
    together = await answer_of(client, dialect, stream=True, **(dialect.with_tools or {}))
    apart.ids.clear()
    together.ids.clear()
    assert together == apart


@each_text
async def test_text_is_encoded_so_that_it_cannot_end_an_event(client, dialect):
    text = 'a\n\ndata: [DONE]\r\n\r\n"\\ é 🦊 \x00\u2028{}\n'
    client.gateway.script = lambda job: [[Delta(0, text, [1], finish_reason="stop")]]
    assert (await answer_of(client, dialect, stream=True)).text == text


@with_member("scored")
@whole_and_streamed
async def test_log_probabilities_come_with_their_tokens(client, dialect, stream):
    first, second = (TokenLogprob(40 + i, -0.5 - i, ((40 + i, -0.5 - i), (1, -4.0))) for i in range(2))
    client.gateway.script = lambda job: [
        [Delta(0, "H", [40], [first])],
        [Delta(0, "I", [41], [second], finish_reason="stop")],
    ]
    answer = await answer_of(client, dialect, stream=stream, **dialect.scored)
    assert client.gateway.job.sampling.logprobs == 2
    assert answer.logprobs == [-0.5, -1.5]


# Requests ------------------------------------------------------------------------------------------

PARAMETERS = {
    "temperature": 0.5,
    "top_p": 0.25,
    "top_k": 7,
    "min_p": 0.125,
    "seed": 5,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.25,
    "max_tokens": 9,
}


@each_text
async def test_sampling_parameters_reach_the_job(client, dialect):
    await answer_of(client, dialect, **dialect.sampled(**PARAMETERS))
    sampling = client.gateway.job.sampling
    assert {name: getattr(sampling, name) for name in PARAMETERS} == PARAMETERS


@each_text
async def test_null_is_the_same_as_absence_and_unknown_fields_are_ignored(client, hermes, dialect):
    await answer_of(client, dialect)
    nulls = dialect.sampled(**dict.fromkeys(set(PARAMETERS) - set(dialect.good)))
    body = {"model": "small", **nulls, "user": None, "unheard_of": [1], "stream": None} | dialect.good
    assert (await client.post(dialect.path, body)).status == 200
    absent, null = client.gateway.jobs
    assert absent.sampling == null.sampling
    assert (null.sampling.temperature, null.sampling.top_k) == (0.7, 20)


@with_member("formed")
async def test_schema_becomes_the_grammar_of_the_answer(client, hermes, dialect):
    await answer_of(client, dialect, **dialect.formed)
    grammar = client.gateway.job.sampling.grammar
    vocabulary = vocabulary_of(hermes)
    assert accepts(hermes, vocabulary, grammar, '{"a": 5}')
    assert not accepts(hermes, vocabulary, grammar, '{"a": "b"}')


@each
async def test_alias_is_a_name_of_its_model(client, dialect):
    name, alias = ("small", "tiny") if dialect in TEXTS else ("vectors", "tiny vectors")
    reply = await client.post(dialect.path, body_of(dialect, model=alias))
    assert reply.status == 200
    assert client.gateway.job.model == reply.json.get("model", name) == name


@each
async def test_with_several_models_one_must_be_named(client, dialect):
    assert (await refusal(client, dialect, body_of(dialect, model=None))).param == "model"


@each
async def test_relayed_request_keeps_its_bytes_and_its_path(client, dialect):
    body = json.dumps(body_of(dialect, model="remote", unheard_of=[1]), indent=2).encode()
    await client.post(dialect.path, body)
    relay = client.gateway.job.relay
    assert (relay.path, bytes(relay.body)) == (dialect.path, body)


@each
async def test_headers_set_priority_no_queue_and_request_id(client, dialect):
    headers = {"X-Priority": "high", "X-No-Queue": "1", "X-Request-Id": "mine", "Content-Type": "text/plain"}
    reply = await client.post(dialect.path, body_of(dialect), headers=headers)
    job = client.gateway.job
    assert (job.priority, job.no_queue, job.request_id) == (0, True, "mine")
    assert (reply.status, reply.headers["x-request-id"]) == (200, "mine")


@each_form
async def test_response_to_a_queued_request_has_wait_headers(client, dialect, stream):
    names = ("x-estimated-wait", "x-queue-position", "x-estimated-wait-p90")
    reply = await client.post(dialect.path, body_of(dialect, stream=stream))
    assert not set(names) & reply.headers.keys()
    gateway = client.gateway
    gateway.estimated_wait_s, gateway.queue_position, gateway.estimated_wait_p90_s = 24, 3, 41
    reply = await client.post(dialect.path, body_of(dialect, stream=stream))
    assert [reply.headers[name] for name in names] == ["24", "3", "41"]


@each
async def test_key_decides_who_may_use_a_model(client_with_keys, dialect):
    client, body = client_with_keys, body_of(dialect)
    assert dialect.failure((reply := await client.post(dialect.path, body)).json).message
    assert reply.status == 401
    reply = await client.post(dialect.path, body, headers={"Authorization": "Bearer sk-other"})
    assert (reply.status, bool(dialect.failure(reply.json).message)) == (403, True)
    assert client.gateway.jobs == []
    reply = await client.post(dialect.path, body, headers={"X-Api-Key": "sk-ana"})
    assert (reply.status, client.gateway.job.tenant) == (200, "ana")


# Refusals of requests ------------------------------------------------------------------------------

DEEP = b"[" * 100_000 + b"]" * 100_000
NOT_JSON = {
    "empty": b"",
    "blank": b" \n\t",
    "an array": b"[]",
    "a string": b'"hello"',
    "null": b"null",
    "a number": b"1",
    "cut short": b'{"model":"small",',
    "with something behind it": b'{"model":"small"} {}',
    "with a comment": b'{/* */"model":"small"}',
    "gzip": b"\x1f\x8b\x08\x00\x00\x00\x00\x00",
    "with a byte order mark": b'\xef\xbb\xbf{"model":"small"}',
    "UTF-16": '{"model":"small"}'.encode("utf-16"),
    "not UTF-8 outside of strings": b'{\xff"model":"small"}',
    "a form": b"model=small&prompt=hello",
    "deep": DEEP,
    "deep in a field that is ignored": b'{"ignored":' + DEEP + b',"model":"small"}',
    "deep and then broken": b'{"a":NaN,"b":' + b"[" * 100_000,
    "NaN in a body too long to look for it": b'{"temperature":NaN,"pad":"' + b"x" * 70_000 + b'"}',
}


@each
async def test_body_that_is_no_json_object_is_refused(client, dialect):
    for name, body in NOT_JSON.items():
        failure = await refusal(client, dialect, body)
        assert dialect.is_ollama or failure.param is None, name
        assert len(failure.message) < 1000


# By field: wrong values of what all dialects have.
WRONG = {
    "model": [7, True, [], {}],
    "user": [7, {"id": 1}, "\ud800"],
    "priority": ["now", 1.5, True, []],
    "ignored": [{"a": "\ud800"}, [float("nan")]],
}
WRONG_OF_STREAMS = {"stream": ["yes", 1, [], {}]}
WRONG_PARAMETERS = {
    "temperature": ["hot", True, [], -0.1, 2.01, float("nan"), float("inf"), 10**400],
    "top_p": ["x", True, 0, 1.1],
    "top_k": ["x", True, 1.5, -2, 10**400],
    "min_p": ["x", -0.1, 1.1],
    "seed": ["x", True, 1.5, 2**63, 10**400],
    "presence_penalty": ["x", True, 2.1],
    "frequency_penalty": ["x", -2.1],
    "repetition_penalty": ["x", 0, -1, 101],
    "max_tokens": ["x", True, 1.5, -3, 10**30],
    "stop": [[1], {}, [""], ["a", ""], ["a", "\ud83d"], ["s"] * 17, ["x" * 1025]],
}


@each
async def test_wrong_value_of_a_common_field_is_refused_by_name(client, dialect):
    for field, values in (WRONG | (WRONG_OF_STREAMS if dialect in TEXTS else {})).items():
        for value in values:
            failure = await refusal(client, dialect, json.dumps({**body_of(dialect), field: value}).encode())
            assert is_within(failure.param, field), (field, value, failure)


@each_text
async def test_wrong_sampling_parameter_is_refused_by_name(client, dialect):
    for name, values in WRONG_PARAMETERS.items():
        for value in values:
            body = body_of(dialect, **dialect.sampled(**{name: value}))
            failure = await refusal(client, dialect, json.dumps(body).encode())
            assert is_within(failure.param, dialect.names[name]), (name, value, failure)


def is_within(param, field):
    """Return whether a path is that of a field, or of one of its members."""
    return param is not None and (param == field or param.startswith((f"{field}.", f"{field}[")))


@each
async def test_error_does_not_repeat_long_parts_of_the_request(client, dialect):
    for body in (body_of(dialect, priority="x" * 100_000), {"x" * 10_000: float("nan")}):
        assert len((await refusal(client, dialect, json.dumps(body).encode())).message) < 1000


@each
async def test_model_that_is_not_there_is_a_404(client, dialect):
    for name in ("huge", "x" * 100_000):
        failure = await refusal(client, dialect, body_of(dialect, model=name), 404)
        assert failure.code in ("model_not_found", "")
        assert len(failure.message) < 400


@each
async def test_model_of_another_task_is_refused(client, dialect):
    failure = await refusal(
        client, dialect, body_of(dialect, model="vectors" if dialect in TEXTS else "small")
    )
    assert failure.param == "model"


@pytest.mark.parametrize("dialect", [one for one in DIALECTS if one.uncut is not None], ids=str)
async def test_prompt_that_is_too_long_is_refused_by_its_field(client, dialect):
    fields = dialect.prompt("hello " * 5000) | dialect.uncut
    failure = await refusal(client, dialect, body_of(dialect, **fields))
    assert failure.code in ("context_length_exceeded", "")
    assert dialect.prompt_field == failure.param or dialect.path == "/v1/messages"


@each
async def test_body_that_is_not_encoded_as_it_says_is_refused(client, dialect):
    reply = await client.post(dialect.path, body_of(dialect), headers={"Content-Encoding": "gzip"})
    assert (reply.status, "Content-Encoding" in dialect.failure(reply.json).message) == (400, True)


@each
async def test_body_over_the_limit_is_a_413(client, dialect):
    await refusal(client, dialect, b" " * (16 * 1024 * 1024 + 1), 413)


@each
async def test_other_methods_are_a_405(client, dialect):
    reply = await client.get(dialect.path)
    assert (reply.status, reply.headers["allow"]) == (405, "OPTIONS, POST")


@each
@given(given=st.data())
def test_any_fields_are_a_request_or_an_invalid_request(dialect, given):
    decode = route_of(dialect).dialect.decode
    names = {*dialect.good, "system", "tools", "options", "format", "stop", "n", *dialect.names}
    fields = given.draw(st.dictionaries(st.sampled_from(sorted(names)), ANYTHING, max_size=3))
    with suppress(InvalidRequest):
        assert decode(json.dumps(body_of(dialect) | fields).encode(), Limits()) is not None


@each
@given(noise=st.binary(min_size=1, max_size=20), place=st.integers(0, 60))
def test_bytes_inserted_into_a_valid_body_raise_no_other_error(dialect, noise, place):
    decode = route_of(dialect).dialect.decode
    valid = json.dumps(body_of(dialect)).encode()
    with suppress(InvalidRequest):
        assert decode(valid[:place] + noise + valid[place:], Limits()) is not None


# Failures ------------------------------------------------------------------------------------------


def leaves(kind=errors.FairleadError):
    for child in kind.__subclasses__():
        yield child
        yield from leaves(child)


@each_form
async def test_refusal_before_the_first_byte_has_its_status_code_and_headers(client, dialect, stream):
    for kind in leaves():
        # A budget always says when it renews.
        known = {"retry_after_s": 60} if kind is errors.BudgetExceeded else {}
        client.gateway.refusal = kind("what went wrong", **known)
        reply = await client.post(dialect.path, body_of(dialect, stream=stream))
        failure = dialect.failure(reply.json)
        assert (reply.status, reply.is_complete) == (kind.status, True)
        assert failure.code in (kind.code, "")
        assert failure.message.endswith("what went wrong")
        is_temporary = kind.status in {409, 429, 503} and kind is not errors.Conflict
        assert ("retry-after" in reply.headers) == is_temporary
        assert reply.headers.get("x-should-retry") == ("false" if kind.should_retry is False else None)


@each_form
async def test_full_queue_says_when_to_try_again(client, dialect, stream):
    client.gateway.refusal = QueueFull("full", retry_after_s=17, estimated_wait_s=30)
    reply = await client.post(dialect.path, body_of(dialect, stream=stream))
    assert (reply.status, reply.headers["retry-after"], reply.headers["x-estimated-wait"]) == (
        429,
        "17",
        "30",
    )


@each_form
async def test_bug_is_a_500_without_internals_and_is_logged_once(client, dialect, stream, log):
    client.gateway.refusal = ZeroDivisionError("secret detail")
    reply = await client.post(dialect.path, body_of(dialect, stream=stream), headers={"X-Request-Id": "abc"})
    assert (reply.status, dialect.failure(reply.json).code in ("internal_error", "")) == (500, True)
    assert b"secret" not in reply.body
    assert b"ZeroDivision" not in reply.body
    (entry,) = log
    assert (entry["log_level"], entry["request_id"]) == ("error", "abc")
    assert entry["exc_info"] is client.gateway.refusal


@each
async def test_whole_answer_that_fails_has_no_partial_text(client, dialect):
    client.gateway.script = lambda job: [*answering(job)[:-1], NodeFailed("the node died")]
    reply = await client.post(dialect.path, body_of(dialect))
    assert (reply.status, dialect.failure(reply.json).message) == (502, "the node died")
    assert b"Hello" not in reply.body


@each_text
@pytest.mark.parametrize("text", ["", "Hel"], ids=["before the text", "within the text"])
async def test_failure_in_a_stream_is_its_last_event_and_cuts_it(client, dialect, text):
    for error in (NodeFailed("the node died"), QueueTimeout("late"), Cancelled("by its id")):
        client.gateway.script = lambda job, error=error: [[Delta(0, text, [1])], error]
        reply = await client.post(dialect.path, body_of(dialect, stream=True))
        failure = dialect.last_error(reply)
        assert (reply.status, reply.is_complete) == (200, False)
        assert failure.message == error.message
        assert failure.code in (error.code, "")


@each_text
async def test_bug_in_a_stream_is_its_last_event_without_internals(client, dialect, log, monkeypatch):
    def fail(deltas):
        if any(delta.finish_reason for delta in deltas):
            raise ZeroDivisionError("secret detail")
        return False

    monkeypatch.setattr(event_stream, "is_large", fail)  # all dialects' deltas pass through it
    reply = await client.post(dialect.path, body_of(dialect, stream=True))
    assert dialect.last_error(reply).code in ("internal_error", "")
    assert b"ZeroDivision" not in reply.body
    assert b"secret" not in reply.body
    assert not reply.is_complete
    assert [type(entry["exc_info"]) for entry in log] == [ZeroDivisionError]


@each_text
async def test_refusal_after_an_early_beginning_is_the_last_event(early_client, dialect, autojump_clock):
    gateway = early_client.gateway
    gateway.wait_s, gateway.refusal = 1.5 * EARLY_S, QueueTimeout("too long")
    reply = await early_client.post(dialect.path, body_of(dialect, stream=True))
    assert (reply.status, reply.is_complete) == (200, False)
    assert dialect.last_error(reply).message == "too long"


@each_text
async def test_stream_that_is_cancelled_by_its_id_says_so(client, dialect):
    client.gateway.script = lambda job: [[Delta(0, "Hel", [1])], None]
    replies = []

    async def stream():
        headers = {"X-Request-Id": "mine"}
        replies.append(await client.post(dialect.path, body_of(dialect, stream=True), headers=headers))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(stream)
        await trio.testing.wait_all_tasks_blocked()
        assert (await client.post("/v1/requests/mine/cancel", b"")).status == 200
    assert dialect.last_error(replies[0]).message == "the request was cancelled"


@each_form
@pytest.mark.parametrize("steps", [0, 1], ids=["waiting", "running"])
async def test_client_that_leaves_ends_its_job(client, dialect, stream, steps):
    client.gateway.script = lambda job: [*answering(job)[:steps], None]
    left = trio.Event()
    body = body_of(dialect, stream=stream) | ({"input": ["a", "b"]} if "embed" in dialect.name else {})
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: client.post(dialect.path, body, disconnected=left))
        await trio.testing.wait_all_tasks_blocked()
        assert (len(client.gateway.jobs), client.gateway.ended) == (1, 0)
        left.set()
    assert client.gateway.ended == 1


@pytest.mark.parametrize("dialect", VECTORS, ids=str)
async def test_vector_of_another_length_is_a_failure_of_the_node(client, dialect):
    client.gateway.script = lambda job: [
        [Delta(index, finish_reason="stop", vector=b"12345678abcd")] for index in range(job.sequences)
    ]
    reply = await client.post(dialect.path, body_of(dialect))
    assert (reply.status, dialect.failure(reply.json).code in ("node_failed", "")) == (502, True)
