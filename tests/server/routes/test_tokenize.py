"""`/tokenize` and `/detokenize`: their bounds, what a key is charged, and the turns of tenants."""

import threading

import pytest
import trio

from fairlead.base.config import ApiKey, KeyLimits
from fairlead.generation.offload import LONG_BODY_BYTES
from server.routes.raw_http import until

CHAT, TOKENIZE, DETOKENIZE = "/v1/chat/completions", "/tokenize", "/detokenize"
ANA, BOB = ({"Authorization": f"Bearer sk-{name}"} for name in ("ana", "bob"))
LONG = "hello " * LONG_BODY_BYTES


@pytest.fixture
def limited(client_with):
    """A function that returns a client of an application where one of two keys has these limits."""
    return lambda **limits: client_with(
        ApiKey("sk-ana", user="ana", limits=KeyLimits(**limits)), ApiKey("sk-bob", user="bob")
    )


def remaining(reply, unit):
    return int(reply.headers[f"x-ratelimit-remaining-{unit}"])


# Bounds ------------------------------------------------------------------------------------------------


async def test_text_of_the_whole_context_is_tokenized_and_a_longer_one_refused(client, model):
    ids = model.tokenizer.encode("hello " * 3000)
    text = model.tokenizer.decode(ids[: model.max_model_len])
    reply = await client.post(TOKENIZE, {"prompt": text})
    assert (reply.status, reply.json["count"]) == (200, 4096)
    for prompt in (text + " world", LONG, " " * 16_000_000):
        refused = await client.post(TOKENIZE, {"prompt": prompt})
        assert (refused.status, refused.error["param"]) == (400, "prompt")
        assert "4096 tokens" in refused.error["message"]


async def test_as_many_ids_as_the_context_has_are_detokenized_and_no_more(client):
    assert (await client.post(DETOKENIZE, {"tokens": [40] * 4096})).status == 200
    refused = await client.post(DETOKENIZE, {"tokens": [40] * 4097})
    assert (refused.status, refused.error["param"]) == (400, "tokens")


async def test_long_text_is_refused_without_all_of_it_being_encoded(client, model, monkeypatch):
    encoded = []
    inner = model.tokenizer._tokenizer

    class Spy:
        def __getattr__(self, name):
            return getattr(inner, name)

        def encode_batch_fast(self, texts, **options):
            encoded.extend(map(len, texts))
            return inner.encode_batch_fast(texts, **options)

    monkeypatch.setattr(model.tokenizer, "_tokenizer", Spy())
    monkeypatch.setattr(model.tokenizer, "longest_token_chars", 10**6)
    refused = await client.post(TOKENIZE, {"prompt": "hello " * 2_000_000})
    assert refused.status == 400
    assert sum(encoded) < 100_000


# Charges -----------------------------------------------------------------------------------------------


async def test_both_routes_count_towards_a_keys_request_limit(limited, autojump_clock):
    client = limited(requests_per_minute=3)
    replies = [await client.post(TOKENIZE, {"prompt": "hello"}, headers=ANA) for _ in range(2)]
    replies.append(await client.post(DETOKENIZE, {"tokens": [40]}, headers=ANA))
    assert [remaining(reply, "requests") for reply in replies] == [2, 1, 0]
    for path, body in ((TOKENIZE, {"prompt": "hello"}), (DETOKENIZE, {"tokens": [40]})):
        refused = await client.post(path, body, headers=ANA)
        assert (refused.status, refused.error["code"]) == (429, "rate_limited")
        assert refused.headers["retry-after"] == "60"
        assert (await client.post(path, body, headers=BOB)).status == 200
    await trio.sleep(60)
    assert (await client.post(TOKENIZE, {"prompt": "hello"}, headers=ANA)).status == 200


@pytest.mark.parametrize("text", ["a", "hello world", "one two three " * 100, "語" * 50])
async def test_key_is_charged_for_the_exact_number_of_tokens(limited, text):
    client = limited(tokens_per_minute=10_000)
    reply = await client.post(TOKENIZE, {"prompt": text}, headers=ANA)
    count = reply.json["count"]
    assert 10_000 - count == remaining(reply, "tokens")
    reply = await client.post(DETOKENIZE, {"tokens": reply.json["tokens"]}, headers=ANA)
    assert 10_000 - 2 * count == remaining(reply, "tokens")


async def test_nothing_is_encoded_for_a_key_that_has_used_up_its_tokens(limited, model, monkeypatch):
    client = limited(tokens_per_minute=100)
    assert remaining(await client.post(DETOKENIZE, {"tokens": [40] * 100}, headers=ANA), "tokens") == 0
    monkeypatch.delattr(type(model.tokenizer), "encode")  # a call of it would fail
    bodies = [
        (TOKENIZE, {"prompt": "hello"}),
        (TOKENIZE, {"messages": [{"role": "user", "content": "hello"}]}),
        (TOKENIZE, {"prompt": LONG}),
        (CHAT, {"messages": [{"role": "user", "content": LONG}]}),
        ("/v1/completions", {"prompt": LONG}),
    ]
    for path, body in bodies:
        refused = await client.post(path, body, headers=ANA)
        assert (refused.status, refused.error["code"]) == (429, "rate_limited")


@pytest.mark.parametrize(
    ("path", "body"),
    [(TOKENIZE, {"prompt": LONG}), (DETOKENIZE, {"tokens": [300]}), (DETOKENIZE, {"tokens": [40] * 5000})],
)
async def test_refused_request_costs_nothing(limited, path, body):
    client = limited(tokens_per_minute=10_000, requests_per_minute=5)
    reply = await client.post(path, body, headers=ANA)
    assert (reply.status, remaining(reply, "tokens"), remaining(reply, "requests")) == (400, 10_000, 5)


async def test_more_tokens_than_a_minute_allows_are_an_invalid_request(limited):
    client = limited(tokens_per_minute=100)
    refused = await client.post(DETOKENIZE, {"tokens": [40] * 101}, headers=ANA)
    assert (refused.status, refused.error["param"]) == (400, "tokens")


# Turns -------------------------------------------------------------------------------------------------


class Gate:
    """Blocks the threads that encode, until it is opened."""

    def __init__(self, model, monkeypatch):
        self.opened = threading.Event()
        self.blocked = 0
        encode = model.tokenizer.encode

        def gated(text, **options):
            self.blocked += 1
            self.opened.wait()
            return encode(text, **options)

        monkeypatch.setattr(model.tokenizer, "encode", gated, raising=False)
        monkeypatch.setattr(model.tokenizer, "may_fit", lambda *_: True, raising=False)


@pytest.fixture
def gate(model, monkeypatch):
    gate = Gate(model, monkeypatch)
    yield gate
    gate.opened.set()


def turns_of(client):
    return client.app._views["POST", TOKENIZE].__self__._jobs.offload._encoding.turns


async def test_one_tenants_long_texts_do_not_delay_anothers(client_with, gate):
    client = client_with(ApiKey("sk-ana", user="ana"), ApiKey("sk-bob", user="bob"))
    threads = turns_of(client)
    text = {"prompt": "x" * LONG_BODY_BYTES}
    async with trio.open_nursery() as nursery:
        for _ in range(6):
            nursery.start_soon(lambda: client.post(TOKENIZE, text, headers=ANA))
        await until(lambda: gate.blocked == 1 and threads.waiting == 5)
        assert threads.running == 1
        nursery.start_soon(lambda: client.post(TOKENIZE, text, headers=BOB))
        await until(lambda: gate.blocked == 2)
        assert (threads.running, threads.waiting) == (2, 5)
        gate.opened.set()


async def test_disconnect_ends_the_wait_for_a_turn(client_with, gate):
    client = client_with(ApiKey("sk-ana", user="ana"))
    threads = turns_of(client)
    text = {"prompt": "x" * LONG_BODY_BYTES}
    remaining = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: client.post(TOKENIZE, text, headers=ANA))
        await until(lambda: gate.blocked)
        nursery.start_soon(lambda: client.post(TOKENIZE, text, headers=ANA, disconnected=remaining))
        await until(lambda: threads.waiting == 1)
        remaining.set()
        await until(lambda: threads.waiting == 0)
        assert threads.running == 1
        gate.opened.set()
