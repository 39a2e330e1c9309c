"""Invalid bodies of Ollama's routes: a 400 in Ollama's form, and its message begins with the field."""

import pytest

from server.routes.ollama_lines import CHAT, GENERATE

MESSAGES = [{"role": "user", "content": "hello"}]
GOOD = {CHAT: {"messages": MESSAGES}, GENERATE: {"prompt": "hello"}}
PATHS = (CHAT, GENERATE)
SCHEMA = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}

# By field: wrong values of the fields that both routes have.
WRONG = {
    "format": [5, True, [], "xml", "JSON"],
    "think": [1, "a lot", [], {}],
    "options": ["hot", 1, []],
    "keep_alive": [True, [], {}, "soon", "x" * 65],
    "logprobs": [1, "yes"],
    "top_logprobs": [-1, 21, "two", 1.5, True],
    "truncate": [1, "yes"],
    "shift": [1, "yes"],
    "options.repeat_last_n": [-2, 1.5, "x"],
    "options.mirostat": [1, 2, "x", True, {}],
    "options.tfs_z": [0.5, "x", []],
    "options.typical_p": [0.5, 0, True],
    "options.penalize_newline": [False, 1],
}
WRONG_OF_CHATS = {
    "messages": ["hello", 7, {}],
    "messages[0]": [["hello"]],
    "messages[0].role": [[{"role": name}] for name in ("robot", 1, None)] + [[{"content": "hello"}]],
    "messages[0].content": [[{"role": "user", "content": value}] for value in (7, ["a"], {}, "\ud800")],
    "messages[0].thinking": [[{"role": "assistant", "thinking": value}] for value in (7, True, [])],
    "messages[0].images": [[{"role": "user", "content": "a", "images": value}] for value in (["x"], 7, "x")],
    "messages[0].tool_name": [[{"role": "tool", "content": "a", "tool_name": value}] for value in (7, [])],
    "messages[0].tool_call_id": [[{"role": "tool", "content": "a", "tool_call_id": 7}]],
    "messages[0].tool_calls": [[{"role": "assistant", "tool_calls": value}] for value in (7, {}, "x")],
    "messages[0].tool_calls[0].function": [[{"role": "assistant", "tool_calls": [{}]}]],
    "messages[0].tool_calls[0].function.name": [
        [{"role": "assistant", "tool_calls": [{"function": {"arguments": {}}}]}]
    ],
    "messages[0].tool_calls[0].function.arguments": [
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": value}}]}]
        for value in ("{}", 7, [])
    ],
    "tools": [{}, "x", 7],
    "tools[0]": [["x"]],
    "tools[0].type": [[{"type": "retrieval", "function": {"name": "f"}}], [{"type": 1, "function": {}}]],
    "tools[0].function": [[{"type": "function"}], [{"function": 7}]],
    "tools[0].function.name": [[{"function": {}}], [{"function": {"name": 7}}]],
    "tools[0].function.description": [[{"function": {"name": "f", "description": 7}}]],
    "tools[0].function.parameters": [[{"function": {"name": "f", "parameters": "x"}}]],
    "tools[1].function.name": [[{"function": {"name": "f"}}] * 2],
}
WRONG_OF_TEXTS = {
    "prompt": [7, ["a"], {}, True, "\ud800"],
    "system": [7, ["a"], {}],
    "raw": [1, "yes"],
    "suffix": [7, ["a"], "after"],
    "images": [["x"], 7],
}
CASES = [(path, field, value) for path in PATHS for field, values in WRONG.items() for value in values]
CASES += [(CHAT, field, value) for field, values in WRONG_OF_CHATS.items() for value in values]
CASES += [(GENERATE, field, value) for field, values in WRONG_OF_TEXTS.items() for value in values]


async def refusal(client, path, body):
    """Return the message of a request's refusal, which is a 400 before the queue."""
    reply = await client.post(path, body)
    assert (reply.status, set(reply.json)) == (400, {"error"}), reply.body
    assert client.gateway.jobs == []
    return reply.json["error"]


@pytest.mark.parametrize(("path", "field", "value"), CASES, ids=lambda value: str(value)[:40])
async def test_wrong_value_is_refused_by_its_field(client, path, field, value):
    top, _, below = field.partition("[")[0].partition(".")
    fields = {top: {below: value}} if below else {top: value}
    message = await refusal(client, path, GOOD[path] | fields)
    assert message.startswith((f"{field}: ", f"{field}[0]: "))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"format": SCHEMA}, "format.properties.a.not"),
        ({"top_logprobs": 2}, "top_logprobs"),
    ],
    ids=str,
)
async def test_combination_that_is_not_served_is_refused_by_its_field(client, path, fields, field):
    assert (await refusal(client, path, GOOD[path] | fields)).startswith(f"{field}: ")


async def test_system_message_is_refused_where_there_is_no_chat(client):
    for field, value in (("raw", True), ("suffix", "after")):
        body = {"prompt": "hello", field: value, "system": "Be brief."}
        assert await refusal(client, GENERATE, body) == f"system: cannot be combined with {field}"


async def test_fields_that_are_not_served_are_named(client):
    message = await refusal(client, GENERATE, {"prompt": "a", "images": ["x"]})
    assert message == "images: is not served"
    message = await refusal(client, CHAT, {"messages": MESSAGES, "options": {"mirostat": 2}})
    assert message == "options.mirostat: is not served"


@pytest.mark.parametrize("path", PATHS)
async def test_null_is_the_same_as_absence_and_unknown_fields_are_ignored(client, path):
    names = {field.partition(".")[0] for field in WRONG} | {"tools", "system", "raw", "suffix"}
    options = {field.partition(".")[2]: None for field in WRONG if "." in field}
    body = GOOD[path] | dict.fromkeys(names - {"options"}) | {"options": options, "never_heard_of": [1]}
    assert (await client.post(path, body)).status == 200
