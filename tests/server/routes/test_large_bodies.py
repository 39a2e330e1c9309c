"""Bodies of megabytes: each gets a response, and none blocks the event loop.

Blocking is measured in CPU time of the loop's thread, which does not depend on the load of the machine. How
long a parser in another thread holds the GIL is bounded by the number of values, which is asserted of every
body. `bench/bodies.py` measures elapsed time.
"""

import json
import threading
import time
import tracemalloc
from pathlib import Path

import pytest
import trio

from fairlead.base.config import Config, Limits, ModelConfig
from fairlead.dialects import body as bodies

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
MILLION = 1_000_000
# CPU time of the loop. Without the bounds, the bodies that are refused here took up to two seconds.
LONGEST_STEP_S = 0.25
# Up to this size, a body may be parsed in the event loop's thread.
IN_LOOP_BYTES = 64 * 1024
HELLO = b'"messages":[{"role":"user","content":"hello"}]'


def many(item, count):
    return b"[" + b",".join([item] * count) + b"]"


def ids(count):
    return b"[" + b",".join(b"%d" % (n % 300) for n in range(count)) + b"]"


def members(count):
    return b"{" + b",".join(b'"k%d":1' % n for n in range(count)) + b"}"


def chat(**fields):
    added = b"".join(b',"%s":%s' % (name.encode(), value) for name, value in fields.items())
    return b'{"model":"small",' + HELLO + added + b"}"


def body_of(content, model=b"small"):
    return b'{"model":"%s","messages":[{"role":"user","content":"%s"}]}' % (model, content)


def called(arguments):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}]
    return json.dumps({"model": "small", "messages": messages}).encode()


def tool(parameters):
    return b'[{"type":"function","function":{"name":"f","parameters":{"a":%s}}}]' % parameters


TOO_MANY = {
    "keys of the template's variables": (
        CHAT,
        lambda: chat(chat_template_kwargs=members(400_000)),
        "chat_template_kwargs",
    ),
    "lists in the template's variables": (
        CHAT,
        lambda: chat(chat_template_kwargs=b'{"a":%s}' % many(b"[1]", MILLION)),
        "chat_template_kwargs",
    ),
    "lists in a member that is ignored": (CHAT, lambda: chat(ignored=many(b"[1]", MILLION)), "ignored"),
    "tools": (CHAT, lambda: chat(tools=many(b"{}", MILLION)), "tools"),
    "objects in a tool": (CHAT, lambda: chat(tools=tool(many(b"{}", MILLION))), "tools"),
    "fractions in a tool": (CHAT, lambda: chat(tools=tool(many(b"0.5", 40_000))), "tools"),
    "messages": (
        CHAT,
        lambda: b'{"model":"small","messages":%s}' % many(b'{"role":"user","content":""}', 100_000),
        "messages",
    ),
    "values in a call's arguments": (CHAT, lambda: called("[" + "[1]," * MILLION + "0]"), "messages"),
    "token ids": (COMPLETIONS, lambda: b'{"model":"small","prompt":%s}' % many(b"1", 2 * MILLION), "prompt"),
    "prompts": (COMPLETIONS, lambda: b'{"model":"small","prompt":%s}' % many(b'""', MILLION), "prompt"),
    "token ids to make text of": (
        "/detokenize",
        lambda: b'{"tokens":%s}' % many(b"1", 2 * MILLION),
        "tokens",
    ),
    "relayed token ids": (
        COMPLETIONS,
        lambda: b'{"model":"remote","prompt":%s}' % many(b"1", 2 * MILLION),
        "prompt",
    ),
    "relayed texts": (EMBEDDINGS, lambda: b'{"model":"remote","input":%s}' % many(b'"a"', MILLION), "input"),
    "nested lists": (CHAT, lambda: b"[" * 4 * MILLION, None),
}
LONG = {
    "text": (CHAT, lambda: body_of(b"Hello there. " * 1_200_000), "messages"),
    "text of emoji": (CHAT, lambda: body_of("😀".encode() * 4 * MILLION), "messages"),
    "text of line breaks": (CHAT, lambda: body_of(b"\\n" * 8 * MILLION), "messages"),
    "text of escapes": (CHAT, lambda: body_of(b"\\u00e9" * 2_600_000), "messages"),
    "text to count": (
        "/tokenize",
        lambda: b'{"model":"small","prompt":"%s"}' % (b"hello " * 2_600_000),
        "prompt",
    ),
    "arguments": (CHAT, lambda: called(json.dumps({"text": "x" * 12 * MILLION})), "messages"),
    "role": (
        CHAT,
        lambda: b'{"model":"small","messages":[{"role":"%s"}]}' % (b" - at " * 2_600_000),
        "messages[0].role",
    ),
    "user": (CHAT, lambda: chat(user=b'"%s"' % (b"u" * 15 * MILLION)), "user"),
    "number": (CHAT, lambda: chat(seed=b"1" * 15 * MILLION), "seed"),
    "text that is cut short": (CHAT, lambda: body_of(b"Hello there. " * 1_200_000)[:-1], None),
    "text that is not UTF-8": (CHAT, lambda: body_of(b"x" * 15 * MILLION + b"\xff"), None),
}
ACCEPTED = {
    "keys of the template's variables": (
        CHAT,
        lambda: chat(chat_template_kwargs=b'{"a":%s}' % members(120_000)),
    ),
    "an agent's tools": (CHAT, lambda: chat(ignored=many(tool(members(40))[1:-1], 200))),
    "relayed token ids": (COMPLETIONS, lambda: b'{"model":"remote","prompt":%s}' % ids(MILLION)),
    "relayed texts": (
        EMBEDDINGS,
        lambda: b'{"model":"remote","input":%s}' % many(b'"%s"' % (b"a" * 7_000), 2048),
    ),
    "relayed image": (CHAT, lambda: body_of(b"A" * 15 * MILLION, b"remote")),
}


class Loop(trio.abc.Instrument):
    """Records the longest CPU time of one step of a task."""

    def __init__(self):
        self.longest_s, self.begun_s = 0.0, time.thread_time()

    def before_task_step(self, _task):
        self.begun_s = time.thread_time()

    def after_task_step(self, _task):
        self.longest_s = max(self.longest_s, time.thread_time() - self.begun_s)


@pytest.fixture
def parsed(monkeypatch):
    """For each parsed body: its values, its token ids, and whether the loop's thread parsed it."""
    found = []

    class Decoder:
        def __init__(self, decoder):
            self.decoder = decoder

        def decode(self, body):
            counts = bodies.count(body, bodies.TOKEN_LISTS)
            found.append((counts.values, sum(counts.apart), threading.current_thread() is loop))
            return self.decoder.decode(body)

    parse, loop = bodies.parse, threading.current_thread()
    monkeypatch.setattr(
        "fairlead.dialects.body.parse", lambda body, decoder, limits: parse(body, Decoder(decoder), limits)
    )
    return found


async def post(client, path, body):
    """Return the reply. Fail if it blocked the loop."""
    watch = Loop()
    trio.lowlevel.add_instrument(watch)
    reply = await client.post(path, body)
    trio.lowlevel.remove_instrument(watch)
    assert watch.longest_s < LONGEST_STEP_S
    return reply


def check(parsed, body):
    limits = Limits()
    assert all(values <= limits.body_values and ids <= limits.request_tokens for values, ids, _ in parsed)
    assert not any(in_loop for *_, in_loop in parsed if len(body) > IN_LOOP_BYTES)


@pytest.mark.parametrize("name", TOO_MANY)
async def test_too_many_values_are_refused_by_the_name_of_their_member(relay_client, parsed, name):
    path, make, param = TOO_MANY[name]
    body = make()
    reply = await post(relay_client, path, body)
    assert (reply.status, reply.error["param"]) == (400, param)
    assert relay_client.gateway.jobs == []
    check(parsed, body)


@pytest.mark.parametrize("name", LONG)
async def test_value_that_is_too_long_is_refused_by_name(relay_client, parsed, name):
    path, make, param = LONG[name]
    body = make()
    reply = await post(relay_client, path, body)
    assert (reply.status, reply.error["param"]) == (400, param)
    assert len(reply.body) < 2000
    check(parsed, body)


@pytest.mark.parametrize("name", ACCEPTED)
async def test_large_body_within_the_bounds_is_served(relay_client, parsed, name):
    path, make = ACCEPTED[name]
    body = make()
    reply = await post(relay_client, path, body)
    assert reply.status == 200
    check(parsed, body)


async def test_bounds_are_configurable(client_with, chat):
    config = Config(models=(ModelConfig(Path(), "small"),), limits=Limits(body_values=20, request_tokens=5))
    client = client_with(config=config)
    assert (await client.post(CHAT, chat())).status == 200
    refused = await client.post(CHAT, chat(ignored=[1] * 20))
    assert (refused.status, refused.error["param"]) == (400, "ignored")
    assert "may have 20" in refused.error["message"]
    assert (await client.post(COMPLETIONS, {"prompt": [1] * 5})).status == 200
    for prompt in ([1] * 6, ["one two three"] * 3):
        refused = await client.post(COMPLETIONS, {"prompt": prompt})
        assert (refused.status, refused.error["param"]) == (400, "prompt")
        assert "may have 5" in refused.error["message"]


@pytest.mark.parametrize(
    ("most", "item", "body", "param"),
    [
        (16_384, {"role": "user", "content": "a"}, lambda many: {"messages": many}, "messages"),
        (
            4096,
            {"type": "text", "text": "a"},
            lambda many: {"messages": [{"role": "user", "content": many}]},
            "messages[0].content",
        ),
        (2048, {"type": "function", "function": {"name": "f"}}, lambda many: {"tools": many}, "tools"),
        (
            1024,
            {"id": "a", "function": {"name": "f", "arguments": "{}"}},
            lambda many: {"messages": [{"role": "assistant", "tool_calls": many}]},
            "messages[0].tool_calls",
        ),
    ],
)
async def test_parts_of_a_chat_have_bounds_of_their_own(relay_client, chat, most, item, body, param):
    refused = await relay_client.post(CHAT, chat(**body([item] * (most + 1))))
    assert (refused.status, refused.error["param"]) == (400, param)
    assert f"<= {most}" in refused.error["message"]
    within = await relay_client.post(CHAT, chat(max_tokens=4096, **body([item] * most)))
    assert f"<= {most}" not in within.error["message"]  # refused by a later check


async def test_template_has_a_bounded_number_of_variables(client, chat):
    refused = await client.post(CHAT, chat(chat_template_kwargs={f"k{n}": 1 for n in range(1025)}))
    assert (refused.status, refused.error["param"]) == (400, "chat_template_kwargs")
    assert (
        await client.post(CHAT, chat(chat_template_kwargs={f"k{n}": 1 for n in range(1024)}))
    ).status == 200


# The second parser, which locates a fault -------------------------------------------------------------


async def test_only_the_path_to_the_fault_is_built(client):
    """17,000 values under a key of 30,000 letters: a path for each would take half a gigabyte."""
    tracemalloc.start()
    body = b'{"deep":{"er":[0,NaN]},"' + b"k" * 30_000 + b'":' + many(b"1", 17_000) + b"}"
    reply = await client.post(CHAT, body)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (reply.status, reply.error["param"]) == (400, "deep.er[1]")
    assert peak < 10_000_000
