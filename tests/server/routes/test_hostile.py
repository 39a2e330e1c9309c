"""Invalid bodies: each is a 400 in OpenAI's format that names the field, and never reaches the gateway."""

import json

import pytest
from msgspec.json import Decoder

from fairlead.base.config import Limits
from fairlead.base.errors import InvalidRequest
from fairlead.dialects.body import MAX_REWRITTEN_BYTES, parse
from fairlead.dialects.openai.chat import ChatCompletionRequest

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


FIELDS = [
    # not JSON numbers
    (b'"seed":-Infinity', "seed"),
    (b'"logit_bias":{"1":NaN}', "logit_bias.1"),
    (b'"tools":[{"type":"function","function":{"name":"f","parameters":{"maximum":NaN}}}]', None),
    # numbers out of range
    (b'"temperature":1e999', "temperature"),
    (b'"seed":1' + b"0" * 5000, "seed"),
    (b'"n":0', "n"),
    (b'"n":-1', "n"),
    (b'"n":9', "n"),
    (b'"n":1e400', "n"),
    (b'"max_tokens":0', "max_tokens"),
    (b'"max_tokens":-2', "max_tokens"),
    (b'"min_tokens":-1', "min_tokens"),
    (b'"max_tokens":3,"min_tokens":4', "min_tokens"),
    (b'"logit_bias":{"1":101}', "logit_bias"),
    (b'"logit_bias":{"a":1}', "logit_bias"),
    (b'"logit_bias":{"-1":1}', "logit_bias"),
    (b'"logit_bias":{"300":1}', "logit_bias"),
    (b'"stop_token_ids":[300]', "stop_token_ids"),
    (b'"stop_token_ids":[-1]', "stop_token_ids[0]"),
    (b'"logprobs":true,"top_logprobs":21', "top_logprobs"),
    (b'"top_logprobs":2', "top_logprobs"),
    # wrong types
    (b'"n":1.5', "n"),
    (b'"n":"1"', "n"),
    (b'"n":true', "n"),
    (b'"tools":{}', "tools"),
    (b'"tools":[{"type":"function"}]', "tools[0].function"),
    (b'"stream_options":[]', "stream_options"),
    (b'"logprobs":5', "logprobs"),
    # invalid text
    (b'"user":"\\udc00abc"', "user"),
    (b'"user":"\xff"', "user"),
    (b'"user":"\xed\xa0\x80"', "user"),
    (b'"ignored":{"a":["\xc3"]}', "ignored.a[0]"),
    (b'"ignored":{"\\ud800":1}', "ignored"),
    (b'"user":"a\x00b"', None),
    # stop
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


async def test_of_duplicate_keys_the_last_one_counts(client):
    reply = await client.post(CHAT, b'{"n":5,"n":2,' + MESSAGES + b"}")
    assert (reply.status, client.gateway.job.n) == (200, 2)


decoder = Decoder(ChatCompletionRequest)


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
        ({"max_tokens": -2.0}, "max_tokens"),
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
