"""Invalid bodies: each is a 400 in OpenAI's format that names the field, and never reaches the gateway."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.json import Decoder

from fairlead.api.body import MAX_REWRITTEN_BYTES, parse
from fairlead.api.dialects.openai_chat import ChatCompletionRequest
from fairlead.config import Limits
from fairlead.errors import InvalidRequest

CHAT = "/v1/chat/completions"
MESSAGES = b'"messages":[{"role":"user","content":"hello"}]'


async def refused(client, body: bytes):
    reply = await client.post(CHAT, body)
    assert reply.status == 400, reply.body
    assert reply.headers["content-type"] == "application/json"
    assert client.gateway.jobs == []
    assert set(reply.error) == {"message", "type", "param", "code"}
    is_too_long = "context length" in reply.error["message"]
    code = "context_length_exceeded" if is_too_long else "invalid_request"
    assert (reply.error["type"], reply.error["code"]) == ("invalid_request_error", code)
    if reply.error["param"] is not None:
        assert reply.error["message"].startswith(reply.error["param"])
    return reply.error


DEEP = b"[" * 100_000 + b"]" * 100_000
NOT_JSON = {
    "empty": b"",
    "blank": b" \n\t",
    "an array": b"[]",
    "a string": b'"hello"',
    "null": b"null",
    "a number": b"1",
    "cut short": b'{"messages":[',
    "with something behind it": b"{" + MESSAGES + b"} {}",
    "with a comment": b"{/* */" + MESSAGES + b"}",
    "gzip": b"\x1f\x8b\x08\x00\x00\x00\x00\x00",
    "with a byte order mark": b"\xef\xbb\xbf{" + MESSAGES + b"}",
    "UTF-16": ("{" + MESSAGES.decode() + "}").encode("utf-16"),
    "not UTF-8 outside of strings": b"{\xff" + MESSAGES + b"}",
    "a form": b"model=small&prompt=hello",
    "deep": DEEP,
    "deep in a field that is ignored": b'{"ignored":' + DEEP + b"," + MESSAGES + b"}",
    "deep and then broken": b'{"a":NaN,"b":' + b"[" * 100_000,
    "NaN in a body too long to look for it": b'{"temperature":NaN,"pad":"' + b"x" * 70_000 + b'"}',
}


@pytest.mark.parametrize("name", NOT_JSON)
async def test_body_that_is_no_json_object_is_refused(client, name):
    error = await refused(client, NOT_JSON[name])
    assert error["param"] is None


FIELDS = [
    # not JSON numbers
    (b'"temperature":NaN', "temperature"),
    (b'"top_p":Infinity', "top_p"),
    (b'"seed":-Infinity', "seed"),
    (b'"logit_bias":{"1":NaN}', "logit_bias.1"),
    (b'"tools":[{"type":"function","function":{"name":"f","parameters":{"maximum":NaN}}}]', None),
    (b'"ignored":[{"deep":NaN}]', "ignored[0].deep"),
    # numbers out of range
    (b'"temperature":-0.1', "temperature"),
    (b'"temperature":2.01', "temperature"),
    (b'"temperature":1e999', "temperature"),
    (b'"temperature":1' + b"0" * 400, "temperature"),
    (b'"top_p":0', "top_p"),
    (b'"top_p":1.1', "top_p"),
    (b'"top_k":-2', "top_k"),
    (b'"top_k":1' + b"0" * 400, "top_k"),
    (b'"min_p":-0.1', "min_p"),
    (b'"seed":1' + b"0" * 400, "seed"),
    (b'"seed":1' + b"0" * 5000, "seed"),
    (b'"seed":9223372036854775808', "seed"),
    (b'"n":0', "n"),
    (b'"n":-1', "n"),
    (b'"n":9', "n"),
    (b'"n":1e400', "n"),
    (b'"max_tokens":0', "max_tokens"),
    (b'"max_tokens":-1', "max_tokens"),
    (b'"min_tokens":-1', "min_tokens"),
    (b'"max_tokens":3,"min_tokens":4', "min_tokens"),
    (b'"presence_penalty":2.1', "presence_penalty"),
    (b'"frequency_penalty":-2.1', "frequency_penalty"),
    (b'"repetition_penalty":0', "repetition_penalty"),
    (b'"repetition_penalty":-1', "repetition_penalty"),
    (b'"logit_bias":{"1":101}', "logit_bias"),
    (b'"logit_bias":{"a":1}', "logit_bias"),
    (b'"logit_bias":{"-1":1}', "logit_bias"),
    (b'"logit_bias":{"300":1}', "logit_bias"),
    (b'"stop_token_ids":[300]', "stop_token_ids"),
    (b'"stop_token_ids":[-1]', "stop_token_ids[0]"),
    (b'"logprobs":true,"top_logprobs":21', "top_logprobs"),
    (b'"top_logprobs":2', "top_logprobs"),
    # wrong types
    (b'"temperature":"hot"', "temperature"),
    (b'"temperature":true', "temperature"),
    (b'"n":1.5', "n"),
    (b'"n":"1"', "n"),
    (b'"n":true', "n"),
    (b'"stream":"yes"', "stream"),
    (b'"stream":1', "stream"),
    (b'"model":7', "model"),
    (b'"user":{"id":1}', "user"),
    (b'"stop":[1]', "stop[0]"),
    (b'"stop":{}', "stop"),
    (b'"tools":{}', "tools"),
    (b'"tools":[{"type":"function"}]', "tools[0].function"),
    (b'"stream_options":[]', "stream_options"),
    (b'"logprobs":5', "logprobs"),
    # invalid text
    (b'"user":"\\ud800"', "user"),
    (b'"user":"\\udc00abc"', "user"),
    (b'"user":"\xff"', "user"),
    (b'"user":"\xed\xa0\x80"', "user"),
    (b'"stop":["a","\\ud83d"]', "stop[1]"),
    (b'"ignored":{"a":["\xc3"]}', "ignored.a[0]"),
    (b'"ignored":{"\\ud800":1}', "ignored"),
    (b'"user":"a\x00b"', None),
    # stop
    (b'"stop":""', "stop"),
    (b'"stop":["a",""]', "stop[1]"),
    (b'"stop":' + json.dumps(["s"] * 17).encode(), "stop"),
    (b'"stop":"' + b"x" * 1025 + b'"', "stop"),
    # the form of the answer: more in test_structured.py and test_tools.py
    (b'"response_format":{"type":"json_schema","json_schema":{"name":"x"}}', "response_format.json_schema"),
    (b'"response_format":"json"', "response_format"),
    (b'"tool_choice":"required"', "tool_choice"),
    (b'"tool_choice":{"type":"function","function":{"name":"f"}}', "tool_choice.function.name"),
    (b'"tools":[{"type":"retrieval","function":{"name":"f"}}]', "tools[0].type"),
    (b'"stream_options":{"include_usage":true}', "stream_options"),
    (b'"chat_template_kwargs":{"messages":[]}', "chat_template_kwargs"),
]


@pytest.mark.parametrize(("field", "param"), FIELDS, ids=lambda value: str(value)[:50])
async def test_invalid_field_is_refused_by_name(client, field, param):
    error = await refused(client, b"{" + MESSAGES + b"," + field + b"}")
    if param is not None:
        assert error["param"] == param


IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}
CONVERSATIONS = [
    ([], "messages"),
    (None, "messages"),
    ("hello", "messages"),
    (["hello"], "messages[0]"),
    ([{"content": "hello"}], "messages[0].role"),
    ([{"role": "user"}], "messages[0].content"),
    ([{"role": "user", "content": None}], "messages[0].content"),
    ([{"role": "user", "content": 7}], "messages[0].content"),
    ([{"role": "robot", "content": "hello"}], "messages[0].role"),
    ([{"role": 1, "content": "hello"}], "messages[0].role"),
    ([{"role": "user", "content": "a"}, {"role": "user", "content": [IMAGE]}], "messages[1].content[0].type"),
    ([{"role": "user", "content": [{"type": "text", "text": "a"}, IMAGE]}], "messages[0].content[1].type"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    ([{"role": "user", "content": ["hello"]}], "messages[0].content[0]"),
    ([{"role": "user", "content": "\ud800"}], "messages[0].content"),
    (
        [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [{}]}],
        "messages[1].tool_calls[0].function",
    ),
    ([{"role": "user", "content": "hello " * 5000}], "messages"),
]


@pytest.mark.parametrize(("messages", "param"), CONVERSATIONS, ids=lambda value: str(value)[:50])
async def test_invalid_messages_are_refused_by_their_path(client, messages, param):
    error = await refused(client, json.dumps({"messages": messages}).encode())
    assert error["param"] == param


async def test_refusal_of_a_content_part_names_its_type(client):
    body = {"messages": [{"role": "user", "content": [IMAGE]}]}
    error = await refused(client, json.dumps(body).encode())
    assert "'image_url'" in error["message"]


async def test_tools_nested_as_deep_as_the_parser_allows_are_a_400(client, chat):
    schema: dict = {}
    for _ in range(400):
        schema = {"properties": {"x": schema}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    reply = await client.post(CHAT, chat(tools=tools))
    assert reply.status == 400
    assert reply.error["param"] in {"messages", None}


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages":[{"role":"' + b"x" * 100_000 + b'","content":"hello"}]}',
        b'{"' + b"x" * 10_000 + b'":NaN}',
        b'{"messages":[{"role":"user","content":[{"type":"' + b"x" * 100_000 + b'"}]}]}',
    ],
    ids=["a value", "a key", "a part"],
)
async def test_error_does_not_repeat_long_parts_of_the_request(client, body):
    error = await refused(client, body)
    assert len(json.dumps(error)) < 1000


async def test_of_duplicate_keys_the_last_one_counts(client):
    reply = await client.post(CHAT, b'{"n":5,"n":2,' + MESSAGES + b"}")
    assert (reply.status, client.gateway.job.n) == (200, 2)


async def test_content_type_may_be_anything(client, chat):
    reply = await client.post(CHAT, chat(), headers={"Content-Type": "text/plain"})
    assert reply.status == 200


async def test_body_that_is_not_encoded_as_it_says_is_refused(client, chat):
    reply = await client.post(CHAT, chat(), headers={"Content-Encoding": "gzip"})
    assert (reply.status, reply.error["param"]) == (400, "Content-Encoding")


async def test_body_over_the_limit_is_a_413(client):
    reply = await client.post(CHAT, b" " * (16 * 1024 * 1024 + 1))
    assert (reply.status, reply.error["code"]) == (413, "body_too_large")


decoder = Decoder(ChatCompletionRequest)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["user", "text"]),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.sampled_from(["messages", "role", "content", "n", "stop"]) | st.text(), inner)
    ),
)


def outcome(body: bytes) -> ChatCompletionRequest | InvalidRequest:
    try:
        return parse(body, decoder, Limits())
    except InvalidRequest as error:
        return error


def whole_numbers_as_floats(**more) -> bytes:
    """Return a valid body with 5.0 for 5: in a field, in a list and in a tool, which is not validated."""
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"minimum": 1.0}}}]
    messages = [{"role": "user", "content": "hello"}]
    fields = {"messages": messages, "max_tokens": 5.0, "stop_token_ids": [1, 2.0], "tools": tools}
    return json.dumps(fields | more).encode()


def test_whole_number_may_be_written_with_a_fraction_of_zero():
    request = outcome(whole_numbers_as_floats(temperature=1.0, seed=-3e2))
    assert (request.max_tokens, request.stop_token_ids, request.temperature) == (5, (1, 2), 1.0)
    assert (type(request.max_tokens), request.seed) == (int, -300)
    assert type(request.tools[0].function.parameters["minimum"]) is float  # the template prints it


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"max_tokens": 5.5}, "max_tokens"),
        ({"max_tokens": 0.0}, "max_tokens"),
        ({"max_tokens": 1e300}, "max_tokens"),
        ({"stop_token_ids": [1.0, 2.5]}, "stop_token_ids[1]"),
        ({"stop_token_ids": [[1.0]]}, "stop_token_ids[0]"),
        ({"stop": 1.0}, "stop"),
    ],
)
def test_another_fraction_is_refused_by_name(more, param):
    error = outcome(whole_numbers_as_floats(**more))
    assert isinstance(error, InvalidRequest)
    assert error.param == param


def test_in_a_large_body_whole_numbers_may_not_have_a_fraction():
    assert outcome(whole_numbers_as_floats(user="x" * MAX_REWRITTEN_BYTES)).param == "max_tokens"


@given(st.binary() | json_values.map(lambda value: json.dumps(value).encode()))
def test_any_body_is_a_request_or_an_invalid_request(body):
    assert isinstance(outcome(body), ChatCompletionRequest | InvalidRequest)


@given(st.binary(min_size=1, max_size=20), st.integers(0, 60))
def test_bytes_inserted_into_a_valid_body_raise_no_other_error(noise, path):
    valid = b"{" + MESSAGES + b',"temperature":1}'
    assert isinstance(outcome(valid[:path] + noise + valid[path:]), ChatCompletionRequest | InvalidRequest)
