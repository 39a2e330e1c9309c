"""`/tokenize` and `/detokenize`: what bounds them, what they cost their key, and whose turn it is."""

import threading

import pytest
import trio

from api.raw_http import until
from fairlead.api.edge import LONG_BODY_BYTES
from fairlead.config import ApiKey, KeyLimits

CHAT, TOKENIZE, DETOKENIZE = "/v1/chat/completions", "/tokenize", "/detokenize"
ANA, BOB = ({"Authorization": f"Bearer sk-{name}"} for name in ("ana", "bob"))
LONG = "hello " * LONG_BODY_BYTES


@pytest.fixture
def limited(client_with):
    """A client of an application where one of two keys has these limits."""
    return lambda **limits: client_with(
        ApiKey("sk-ana", user="ana", limits=KeyLimits(**limits)), ApiKey("sk-bob", user="bob")
    )


def left(reply, unit):
    return int(reply.headers[f"x-ratelimit-remaining-{unit}"])


# Bounds ------------------------------------------------------------------------------------------------


async def test_a_text_of_the_whole_context_is_tokenized_and_a_longer_one_refused(client, model):
    ids = model.tokenizer.encode("hello " * 3000)
    text = model.tokenizer.decode(ids[: model.max_model_len])
    reply = await client.post(TOKENIZE, {"prompt": text})
    assert (200, 4096) == (reply.status, reply.json["count"])
    for prompt in (text + " world", LONG, " " * 16_000_000):
        refused = await client.post(TOKENIZE, {"prompt": prompt})
        assert (400, "prompt") == (refused.status, refused.error["param"])
        assert "4096 tokens" in refused.error["message"]


async def test_as_many_ids_as_the_context_has_are_detokenized_and_no_more(client):
    assert 200 == (await client.post(DETOKENIZE, {"tokens": [40] * 4096})).status
    refused = await client.post(DETOKENIZE, {"tokens": [40] * 4097})
    assert (400, "tokens") == (refused.status, refused.error["param"])


async def test_a_long_text_is_refused_without_all_of_it_being_encoded(client, model, monkeypatch):
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
    assert 400 == refused.status
    assert sum(encoded) < 100_000


# What it costs -----------------------------------------------------------------------------------------


async def test_a_keys_limit_of_requests_counts_both_routes(limited, autojump_clock):
    client = limited(requests_per_minute=3)
    replies = [await client.post(TOKENIZE, {"prompt": "hello"}, headers=ANA) for _ in range(2)]
    replies.append(await client.post(DETOKENIZE, {"tokens": [40]}, headers=ANA))
    assert [2, 1, 0] == [left(reply, "requests") for reply in replies]
    for path, body in ((TOKENIZE, {"prompt": "hello"}), (DETOKENIZE, {"tokens": [40]})):
        refused = await client.post(path, body, headers=ANA)
        assert (429, "rate_limited") == (refused.status, refused.error["code"])
        assert "60" == refused.headers["retry-after"]
        assert 200 == (await client.post(path, body, headers=BOB)).status
    await trio.sleep(60)
    assert 200 == (await client.post(TOKENIZE, {"prompt": "hello"}, headers=ANA)).status


@pytest.mark.parametrize("text", ["a", "hello world", "one two three " * 100, "語" * 50])
async def test_a_key_is_charged_for_as_many_tokens_as_there_are(limited, text):
    client = limited(tokens_per_minute=10_000)
    reply = await client.post(TOKENIZE, {"prompt": text}, headers=ANA)
    count = reply.json["count"]
    assert 10_000 - count == left(reply, "tokens")
    reply = await client.post(DETOKENIZE, {"tokens": reply.json["tokens"]}, headers=ANA)
    assert 10_000 - 2 * count == left(reply, "tokens")


async def test_a_key_that_has_used_up_its_tokens_has_nothing_encoded(limited, model, monkeypatch):
    client = limited(tokens_per_minute=100)
    assert 0 == left(await client.post(DETOKENIZE, {"tokens": [40] * 100}, headers=ANA), "tokens")
    monkeypatch.delattr(type(model.tokenizer), "encode")  # nothing may ask for it
    bodies = [
        (TOKENIZE, {"prompt": "hello"}),
        (TOKENIZE, {"messages": [{"role": "user", "content": "hello"}]}),
        (TOKENIZE, {"prompt": LONG}),
        (CHAT, {"messages": [{"role": "user", "content": LONG}]}),
        ("/v1/completions", {"prompt": LONG}),
    ]
    for path, body in bodies:
        refused = await client.post(path, body, headers=ANA)
        assert (429, "rate_limited") == (refused.status, refused.error["code"])


@pytest.mark.parametrize(
    ("path", "body"),
    [(TOKENIZE, {"prompt": LONG}), (DETOKENIZE, {"tokens": [300]}), (DETOKENIZE, {"tokens": [40] * 5000})],
)
async def test_what_is_refused_costs_nothing(limited, path, body):
    client = limited(tokens_per_minute=10_000, requests_per_minute=5)
    reply = await client.post(path, body, headers=ANA)
    assert (400, 10_000, 5) == (reply.status, left(reply, "tokens"), left(reply, "requests"))


async def test_more_tokens_than_a_minute_has_are_refused_for_good(limited):
    client = limited(tokens_per_minute=100)
    refused = await client.post(DETOKENIZE, {"tokens": [40] * 101}, headers=ANA)
    assert (400, "tokens") == (refused.status, refused.error["param"])


# Turns -------------------------------------------------------------------------------------------------


class Gate:
    """Holds whoever encodes in a thread, until it is opened."""

    def __init__(self, model, monkeypatch):
        self.opened = threading.Event()
        self.held = 0
        encode = model.tokenizer.encode

        def gated(text, **options):
            self.held += 1
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
    return client.app.hot._routes[TOKENIZE].__self__._edge._encoding.turns


async def test_one_tenants_long_texts_do_not_keep_anothers_waiting(client_with, gate):
    client = client_with(ApiKey("sk-ana", user="ana"), ApiKey("sk-bob", user="bob"))
    threads = turns_of(client)
    text = {"prompt": "x" * LONG_BODY_BYTES}
    async with trio.open_nursery() as nursery:
        for _ in range(6):
            nursery.start_soon(lambda: client.post(TOKENIZE, text, headers=ANA))
        await until(lambda: gate.held == 1 and threads.waiting == 5)
        assert 1 == threads.running
        nursery.start_soon(lambda: client.post(TOKENIZE, text, headers=BOB))
        await until(lambda: gate.held == 2)
        assert (2, 5) == (threads.running, threads.waiting)
        gate.opened.set()


async def test_a_client_that_leaves_does_not_wait_for_its_turn_any_more(client_with, gate):
    client = client_with(ApiKey("sk-ana", user="ana"))
    threads = turns_of(client)
    text = {"prompt": "x" * LONG_BODY_BYTES}
    left = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: client.post(TOKENIZE, text, headers=ANA))
        await until(lambda: gate.held)
        nursery.start_soon(lambda: client.post(TOKENIZE, text, headers=ANA, left=left))
        await until(lambda: threads.waiting == 1)
        left.set()
        await until(lambda: threads.waiting == 0)
        assert 1 == threads.running
        gate.opened.set()
