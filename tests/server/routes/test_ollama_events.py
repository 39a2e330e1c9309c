"""The meaning of the lines and whole responses of servers with Ollama's API, and their relaying."""

import json

import pytest

from fairlead.base.errors import NodeFailed, NodeRefused
from fairlead.base.job import Delta, Translation
from fairlead.base.upstream_events import UpstreamError
from fairlead.dialects.event_reader import NOISE, UNKNOWN
from fake_fleet import FakeFleet
from server.routes.conftest import client_of
from server.routes.ollama_lines import lines_of
from upstream_readers import READERS

PATHS = ("/api/chat", "/api/generate")
READER = READERS["/api/chat"]
CALL = {"function": {"name": "f", "arguments": {"a": [1, 2]}}}
LINES = [
    b'{"message": {"role": "assistant", "content": "re"},  "done": false, "unheard_of": 1}\n',
    b'{"message": {"role": "assistant", "content": "mote"}, "done": false}\n',
    b'{"message": {"role": "assistant", "content": ""}, "done": true, "eval_count": 2}\n',
]


def line(**members):
    return json.dumps(members).encode() + b"\n"


@pytest.mark.parametrize(
    ("event", "meaning"),
    [
        (b"\n", NOISE),
        (b"{half\n", UNKNOWN),
        (b'{"done": "yes"}\n', UNKNOWN),
        (b'{"message": "\xff"}\n', UNKNOWN),
        (b'{"message": 5}\n', UNKNOWN),
        (b"5\n", NOISE),
        (b'{"model": "m", "done": false}\n', NOISE),
    ],
)
def test_empty_lines_are_distinguished_from_unreadable_ones(event, meaning):
    assert READER.read_event(event) == meaning


@pytest.mark.parametrize(
    ("members", "text"),
    [
        ({"message": {"content": "a"}}, "a"),
        ({"message": {"content": "", "thinking": "hm"}}, "hm"),
        ({"message": {"content": "", "tool_calls": [CALL]}}, 'f{"a": [1, 2]}'),
        ({"response": "a", "thinking": "hm"}, "hma"),
        ({"message": {"content": ""}}, ""),
    ],
)
def test_everything_that_is_generated_counts_as_text(members, text):
    event = READER.read_event(line(**members, done=False))
    assert (event.text, event.index, event.is_end, event.is_beginning) == (text, 0, False, not text)


@pytest.mark.parametrize(("reason", "finished"), [("stop", "stop"), ("length", "length"), (None, "stop")])
def test_last_line_has_the_reason_and_the_number_of_tokens(reason, finished):
    event = READER.read_event(line(message={"content": ""}, done=True, done_reason=reason, eval_count=7))
    assert (event.is_end, event.finished, event.generated) == (True, finished, 7)


@pytest.mark.parametrize("count", [-1, 1.5, "7", None, [7], 10**20])
def test_impossible_number_of_tokens_counts_as_missing(count):
    assert READER.read_event(line(done=True, eval_count=count)).generated is None


def test_error_is_read_from_a_line_and_from_a_response():
    assert READER.read_event(line(error="out of order")).error == UpstreamError("out of order")
    assert READER.read_response(line(error="out of order")).error == UpstreamError("out of order")


def test_whole_response_is_read():
    answer = READER.read_response(line(response="hello", done=True, eval_count=3))
    assert (answer.generated, answer.content_bytes) == (3, 5)
    assert READER.read_response(b'{"message": {"content": "a"}}').content_bytes == 16
    for body in (b"", b"[]", b"\xff"):
        with pytest.raises(ValueError, match="no JSON object"):
            READER.read_response(body)


@pytest.mark.parametrize(
    "members", [{"message": {"content": "abc"}}, {"response": "abc"}, {"message": {"thinking": "abc"}}]
)
def test_line_is_cut_to_the_end_of_its_text(members):
    cut = json.loads(READER.without_beginning(line(**members, done=False), "c"))
    ((_, value),) = members.items()
    expected = dict.fromkeys(value, "c") if isinstance(value, dict) else "c"
    assert cut == {**dict.fromkeys(members, expected), "done": False}


@pytest.mark.parametrize(
    "members",
    [
        {"message": {"content": "a", "thinking": "b"}},
        {"message": {"content": "a", "tool_calls": [CALL]}},
        {"message": {"tool_calls": [CALL]}},
    ],
)
def test_line_with_several_texts_is_never_cut(members):
    with pytest.raises(ValueError, match="several pieces of text"):
        READER.without_beginning(line(**members), "b")


# Relaying ---------------------------------------------------------------------------------------------


@pytest.fixture
def relayed(model):
    script = [[Delta(0, "remote", raw=LINES[:2])], [Delta(0, raw=LINES[2:], finish_reason="stop")]]
    fleet = FakeFleet(["small"], ["remote"], dialects=("openai", "ollama"))
    return client_of(model, fleet=fleet, gateway_script=lambda job: script)


@pytest.mark.parametrize("path", PATHS)
async def test_stream_of_another_server_is_relayed_unchanged(relayed, path):
    body = {"model": "remote", "messages": [{}], "prompt": "a", "images": ["x"], "keep_alive": 5}
    body["options"] = {"num_predict": 7, "temperature": 0, "seed": 3, "mirostat": 2}
    reply = await relayed.post(path, body)
    assert (reply.status, reply.headers["content-type"]) == (200, "application/x-ndjson")
    assert reply.body == b"".join(LINES)
    job = relayed.gateway.job
    assert (job.relay.path, json.loads(job.relay.body)) == (path, body)
    assert (job.sampling.max_tokens, job.sampling.temperature, job.sampling.seed) == (7, 0, 3)


async def test_limit_that_is_none_and_a_random_seed_are_relayed_as_such(relayed):
    options = {"num_predict": -1, "seed": -1}
    await relayed.post("/api/chat", {"model": "remote", "messages": [{}], "options": options})
    assert (relayed.gateway.job.sampling.max_tokens, relayed.gateway.job.sampling.seed) == (256, None)


@pytest.mark.parametrize("path", PATHS)
async def test_request_is_translated_for_a_server_that_has_only_openais_chats(model, path):
    counts = Translation("openai", 21)
    script = [
        [Delta(0, "Hello", relayed_tokens=1, translation=Translation("openai"))],
        [Delta(0, relayed_tokens=4, finish_reason="stop", translation=counts)],
    ]
    fleet = FakeFleet(["small"], ["remote"], dialects=("openai",))
    client = client_of(model, fleet=fleet, gateway_script=lambda job: script)
    body = {"model": "remote", "messages": [{"role": "user", "content": "hello"}], "prompt": "hello"}
    lines = lines_of(await client.post(path, body | {"options": {"num_predict": 9}}))
    relayed = json.loads(client.gateway.job.relay.chat.body)
    assert relayed["messages"] == [{"role": "user", "content": "hello"}]
    assert (relayed["max_tokens"], relayed["stream"]) == (9, True)
    assert (lines[-1]["prompt_eval_count"], lines[-1]["eval_count"]) == (21, 5)
    whole = (await client.post(path, body | {"stream": False})).json
    content = whole["message"]["content"] if path == "/api/chat" else whole["response"]
    assert (content, whole["eval_count"]) == ("Hello", 5)


async def test_failure_of_another_server_is_a_line(relayed):
    relayed.gateway.script = lambda job: [[Delta(0, "re", raw=LINES[:1])], NodeFailed("gone")]
    reply = await relayed.post("/api/chat", {"model": "remote", "messages": [{}]})
    assert (reply.body, reply.is_complete) == (LINES[0] + b'{"error":"gone"}\n', False)


async def test_refusal_of_another_server_is_passed_on(relayed):
    relayed.gateway.refusal = NodeRefused("it answered 404", status=404, body=b'{"error": "not  here"}')
    reply = await relayed.post("/api/chat", {"model": "remote", "messages": [{}]})
    assert (reply.status, reply.body) == (404, b'{"error": "not  here"}')
