"""Forms of answers, tools and their hostile variants, against a real server with the demonstration model."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import jsonschema
import pytest

from e2e.real_server import RealServer, configured, real_server

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Count from 1 to 5."}]
SCHEMA = {
    "type": "object",
    "properties": {
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["small", "large", 'über\n"groß"']},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["count", "kind", "tags"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}
TOOL = {"type": "function", "function": {"name": "count", "parameters": SCHEMA, "strict": True}}
# The longest gap between two tokens of a stream beside hostile requests, on a machine that is busy.
PATIENCE_S = 5.0


def ask(server: RealServer, path: str = CHAT, **fields):
    subject = {"prompt": "Count:"} if path == COMPLETIONS else {"messages": MESSAGES}
    reply = server.http.post(path, json={**subject, **fields})
    assert reply.status_code == 200, reply.text
    return reply.json()


def deltas(server: RealServer, **fields):
    """Return the deltas of a streamed chat, and the reason of its end."""
    found, reason = [], None
    with server.http.stream("POST", CHAT, json={"messages": MESSAGES, "stream": True, **fields}) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                found.append(choice["delta"])
                reason = choice["finish_reason"]
    return found, reason


def text_and_gaps(server: RealServer, **fields):
    """Return the content of a streamed chat, and the seconds between its events."""
    body = {"messages": MESSAGES, "stream": True, **fields}
    times, text = [], ""
    with server.http.stream("POST", CHAT, json=body) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                times.append(time.perf_counter())
                text += json.loads(line.removeprefix("data: "))["choices"][0]["delta"].get("content", "")
    return text, [later - earlier for earlier, later in pairwise(times)]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_answers_of_a_batch_fit_their_schema_at_any_temperature(server: RealServer, path):
    def one(seed: int) -> str:
        answer = ask(server, path, response_format=FORM, temperature=1.5, seed=seed)
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "stop"
        return choice["text"] if path == COMPLETIONS else choice["message"]["content"]

    with ThreadPoolExecutor(16) as pool:
        texts = list(pool.map(one, range(16)))
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert len(set(texts)) > 1
    assert not any(server.wait_until_at_rest().values())


SUMMARY = {
    "type": "object",
    "properties": {"text": {"type": "string", "maxLength": 8000}, "done": {"type": "boolean"}},
    "required": ["text", "done"],
    "additionalProperties": False,
}
SUMMARY_FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": SUMMARY}}


@pytest.mark.parametrize("most", [40, 900])
def test_answer_that_nears_its_limit_is_closed_and_fits_its_schema(server: RealServer, most):
    fields = {"temperature": 1.3, "seed": 3, "max_tokens": most, "response_format": SUMMARY_FORM}
    answer = ask(server, **fields, messages=[{"role": "user", "content": "Write a summary."}])
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(choice["message"]["content"]), SUMMARY)
    assert answer["usage"]["completion_tokens"] <= most


@pytest.mark.parametrize("fronts", [1, 2])
def test_answer_is_cut_at_its_limit_where_closing_is_off(tmp_path, fronts):
    server_settings = {} if fronts == 1 else {"fronts": fronts}
    arguments = configured(tmp_path, {"closeAtLimit": False}, **server_settings)
    with real_server(*arguments) as server:
        fields = {"temperature": 1.3, "seed": 3, "max_tokens": 40, "response_format": SUMMARY_FORM}
        (choice,) = ask(server, **fields)["choices"]
        assert choice["finish_reason"] == "length"


def test_choices_of_a_request_all_fit_the_schema(server: RealServer):
    answer = ask(server, response_format=FORM, n=4, seed=1, temperature=1)
    for choice in answer["choices"]:
        jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)


@pytest.mark.parametrize("seed", range(3))
def test_streamed_call_is_that_of_the_whole_answer(server: RealServer, seed):
    fields = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    fields |= {"seed": seed, "temperature": 1}
    whole = ask(server, **fields)["choices"][0]
    (call,) = whole["message"]["tool_calls"]
    jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)
    found, reason = deltas(server, **fields)
    pieces = [piece for delta in found for piece in delta.get("tool_calls", ())]
    assert pieces[0]["function"] == {"name": "count", "arguments": ""}
    assert "".join(piece["function"]["arguments"] for piece in pieces) == call["function"]["arguments"]
    assert (reason, whole["finish_reason"]) == ("tool_calls", "tool_calls")


def test_grammar_without_any_answer_is_refused(server: RealServer):
    outputs = {"grammar": "start: start"}
    reply = server.http.post(COMPLETIONS, json={"prompt": "a", "structured_outputs": outputs})
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (400, "invalid_request")
    assert error["param"] == "structured_outputs.grammar"


def hostile_bodies() -> list[bytes]:
    deep = b'{"properties":{"a":' * 10_000 + b"{}" + b"}}" * 10_000
    schemas = [
        json.dumps({"enum": ["x" * 16_000_000]}).encode(),
        json.dumps({"properties": {f"p{index}": {} for index in range(100_000)}}).encode(),
        json.dumps({"enum": list(range(100_000))}).encode(),
        deep,
        b'{"$ref":"#"}',
        b'{"type":"xyz"}',
    ]
    form = b'{"messages":[{"role":"user","content":"a"}],"response_format":%s}'
    return [
        form % (b'{"type":"json_schema","json_schema":{"name":"a","schema":%s}}' % one) for one in schemas
    ]


def test_hostile_schemas_are_refused_and_harm_no_other_stream(server: RealServer):
    fields = {"temperature": 0, "max_tokens": 400, "ignore_eos": True}
    alone = text_and_gaps(server, **fields)[0]
    bodies = hostile_bodies()

    def attack() -> list[int]:
        # The refusal of a body of 16 MB may take long on a busy machine; the streams must not.
        return [server.http.post(CHAT, content=body, timeout=240).status_code for body in bodies]

    with ThreadPoolExecutor(2) as pool:
        attacks = [pool.submit(attack) for _ in range(2)]
        while not all(each.done() for each in attacks):
            text, gaps = text_and_gaps(server, **fields)
            assert text == alone
            assert max(gaps) < PATIENCE_S
        assert [each.result() for each in attacks] == [[400] * 6] * 2
    assert not any(server.wait_until_at_rest().values())
