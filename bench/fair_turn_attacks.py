"""The attacks of `fair_turn.py`: one tenant's load of one kind, as a process of its own.

    python bench/fair_turn_attacks.py KIND URL MODEL KEY SECONDS WORDS

Prints JSON when the time is over: requests that ended, events of streams received (about one for each token),
and failures by kind. It has a lower priority than the server, because a real attacker uses the processor of
another machine.
"""

import json
import os
import random
import socket
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import trio

from fairlead.server.load.client import LoadConnection, RequestFailedError

LONG_TOKENS = 800
EMBEDDING_MODEL = "embed"
BEGUN = b"begun\n"  # the first line of the output
MEGABYTE = 1_000_000
NICE = 5
TENANTS = 20


@dataclass
class Attacker:
    """What an attack needs, and what it counts."""

    url: str
    model: str
    key: str
    words: int  # of a long text
    requests: int = 0
    tokens: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    reason: str = ""  # of the last failure

    def body(self, **more: object) -> dict[str, object]:
        """Return the body of a request that is not ended early."""
        return {"model": self.model, "ignore_eos": True, "temperature": 1.0, **more}

    def stream(self, path: str, **more: object) -> Callable[[], Awaitable[None]]:
        """Return what streams one answer on a connection of its own."""
        connection = LoadConnection(self.url, api_key=self.key)

        def received(data: bytes) -> None:
            self.tokens += data.count(b"data: ")

        async def once() -> None:
            body = self.body(stream=True, **{name: _made(value) for name, value in more.items()})
            try:
                await connection.request("POST", path, body, on_data=received)
            except RequestFailedError as error:
                self.count(error.kind)
                self.reason = str(error)[:200]
            else:
                self.count(None)

        return once

    def post(self, path: str, body: Callable[[], object]) -> Callable[[], Awaitable[None]]:
        """Return what sends one request and reads all of its answer."""
        connection = LoadConnection(self.url, api_key=self.key)

        async def once() -> None:
            try:
                await connection.request("POST", path, body())
            except RequestFailedError as error:
                self.count(error.kind)
                self.reason = str(error)[:200]
            else:
                self.count(None)

        return once

    def count(self, error: str | None) -> None:
        """Count a request that has ended."""
        self.requests += error is None
        if error is not None:
            self.failures[error] += 1


Once = Callable[[], Awaitable[None]]
Attack = Callable[[Attacker], list[Once]]
"""Returns for each client what it does again and again, at the same time as the others."""


def words(count: int) -> str:
    """Return random words, so that no prefix is cached."""
    chosen = random.choices(("river", "stone", "cloud", "seven", "quiet"), k=count)
    return " ".join(f"{word}{random.randrange(100)}" for word in chosen)


def long_answers(attacker: Attacker) -> list[Once]:
    """16 clients that stream long answers."""
    messages = [{"role": "user", "content": "Tell me everything."}]
    stream = attacker.stream
    return [stream("/v1/chat/completions", messages=messages, max_tokens=LONG_TOKENS) for _ in range(16)]


def background(attacker: Attacker) -> list[Once]:
    """Responses in the background: 16 new ones a second."""
    body = {"input": "Tell me everything.", "background": True, "max_output_tokens": LONG_TOKENS}
    post = attacker.post("/v1/responses", lambda: attacker.body(**body))

    async def once() -> None:
        await post()
        await trio.sleep(1 / 16)

    return [once]


def many_choices(attacker: Attacker) -> list[Once]:
    """Four clients with 64 choices a request."""
    stream = attacker.stream
    return [stream("/v1/completions", prompt="Once", n=64, max_tokens=LONG_TOKENS // 8) for _ in range(4)]


def lists_of_prompts(attacker: Attacker) -> list[Once]:
    """Four clients with 32 prompts a request."""
    prompts = [f"Story {number}:" for number in range(32)]
    stream = attacker.stream
    return [stream("/v1/completions", prompt=prompts, max_tokens=LONG_TOKENS // 8) for _ in range(4)]


def long_prompts(attacker: Attacker) -> list[Once]:
    """16 clients with long prompts and one token of an answer."""
    prompt = lambda: words(attacker.words)  # noqa: E731
    return [attacker.stream("/v1/completions", prompt=prompt, max_tokens=1) for _ in range(16)]


def slow_readers(attacker: Attacker) -> list[Once]:
    """64 clients that request long answers and read nothing."""
    request = _raw_request(attacker, "/v1/completions", stream=True, prompt="Once", max_tokens=LONG_TOKENS)

    async def once() -> None:
        with trio.socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            await sock.connect(_address(attacker.url))
            await sock.send(request)
            await trio.sleep(20)
        attacker.count(None)

    return [once] * 64


def connections(attacker: Attacker) -> list[Once]:
    """256 clients that request the list of models, each time on a new connection."""
    head = (
        f"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {attacker.key}\r\n\r\n".encode()
    )

    async def once() -> None:
        try:
            with trio.socket.socket() as sock:
                await sock.connect(_address(attacker.url))
                await sock.send(head)
                received = await sock.recv(4096)
        except OSError:
            attacker.count("connection")
        else:
            attacker.count(None if received.startswith(b"HTTP/1.1 200") else "refused")

    return [once] * 256


def bodies(attacker: Attacker) -> list[Once]:
    """Eight clients whose prompts have a megabyte, which no model takes."""
    body = attacker.body(prompt="word " * (MEGABYTE // 5), max_tokens=1)
    return [attacker.post("/v1/completions", lambda: body) for _ in range(8)]


def tokenize(attacker: Attacker) -> list[Once]:
    """Eight clients that have new texts tokenized, each as long as the model takes."""
    body = lambda: {"model": attacker.model, "prompt": words(attacker.words)}  # noqa: E731
    return [attacker.post("/tokenize", body) for _ in range(8)]


def embeddings(attacker: Attacker) -> list[Once]:
    """Four clients with 64 texts to embed a request."""
    body = lambda: {"model": EMBEDDING_MODEL, "input": [words(40) for _ in range(64)]}  # noqa: E731
    return [attacker.post("/v1/embeddings", body) for _ in range(4)]


def mixture(attacker: Attacker) -> list[Once]:
    """A part of each kind."""
    return [
        once for kind, attack in ATTACKS.items() if kind not in _OF_MANY for once in attack(attacker)[::4]
    ]


def tenants(attacker: Attacker) -> list[Once]:
    """20 tenants with a client each that streams long answers; their keys are A0, A1 and so on."""
    each = [
        Attacker(attacker.url, attacker.model, f"{attacker.key}{number}", attacker.words)
        for number in range(TENANTS)
    ]
    clients = [long_answers(one)[0] for one in each]

    def of(one: Attacker, client: Once) -> Once:
        async def once() -> None:
            before, failed = one.tokens, one.failures.total()
            try:
                await client()
            finally:
                attacker.tokens += one.tokens - before
            attacker.count(None if one.failures.total() == failed else "refused")

        return once

    return [of(one, client) for one, client in zip(each, clients, strict=True)]


ATTACKS: dict[str, Attack] = {
    "long answers": long_answers,
    "background": background,
    "n: 64": many_choices,
    "lists of prompts": lists_of_prompts,
    "long prompts": long_prompts,
    "slow readers": slow_readers,
    "connections": connections,
    "bodies of 1 MB": bodies,
    "/tokenize": tokenize,
    "embeddings": embeddings,
    "mixture": mixture,
    "20 tenants": tenants,
}
_OF_MANY = ("mixture", "20 tenants")


async def run(attacker: Attacker, kind: str, seconds: float) -> None:
    """Attack for this long."""

    async def forever(once: Once) -> None:
        while True:
            failed = attacker.failures.total()
            await once()
            if attacker.failures.total() > failed:
                await trio.sleep(0.05)  # a refusal is no pause for the server, and no loop for the attacker

    with trio.move_on_after(seconds):
        async with trio.open_nursery() as nursery:
            for once in ATTACKS[kind](attacker):
                nursery.start_soon(forever, once)


def _made(value: object) -> object:
    return value() if callable(value) else value


def _address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port


def _raw_request(attacker: Attacker, path: str, **more: object) -> bytes:
    content = json.dumps(attacker.body(**more)).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Authorization: Bearer {attacker.key}\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


if __name__ == "__main__":
    kind, url, model, key, seconds, text_words = sys.argv[1:]
    with suppress(OSError):
        os.nice(NICE)
    attacker = Attacker(url, model, key, int(text_words))
    print(BEGUN.decode(), end="", flush=True)
    trio.run(run, attacker, kind, float(seconds))
    print(
        json.dumps(
            {
                "requests": attacker.requests,
                "tokens": attacker.tokens,
                "failures": attacker.failures,
                "reason": attacker.reason,
            }
        )
    )
