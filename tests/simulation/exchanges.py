"""Requests to the simulated server, and the clients that make them."""

import json
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal

import trio

from simulation import words
from simulation.deployment import Deployment, Person
from simulation.http_client import Answer, Client, request
from simulation.network import Network
from simulation.streams import DEFAULT_BUFFER_BYTES, End

Kind = Literal["chat", "completion", "embeddings", "read", "cancel", "tokenize", "change", "malformed"]

NEVER_S = 1e9
SMALL_BUFFER_BYTES = 400  # bytes in flight to a client that reads slowly


@dataclass
class Exchange:
    """One request and its answer.

    `leaves_after_s` and `leaves_after_bytes`: when the client disconnects; `resets`: it sends a reset.
    `raw`: the bytes to send instead of a request. `times_sent`, `has_left`, `was_cancelled` and `answer` are
    the outcome.
    """

    number: int
    kind: Kind
    person: Person
    model: str = ""
    method: str = "POST"
    path: str = ""
    body: Any = None
    raw: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    stream: bool = False
    max_tokens: int = 64
    n: int = 1
    leaves_after_s: float = NEVER_S
    leaves_after_bytes: int = 1 << 60
    resets: bool = False
    reads_slowly: bool = False
    began_s: float = 0.0
    ended_s: float = NEVER_S
    times_sent: int = 0
    has_left: bool = False
    was_cancelled: bool = False
    answer: Answer | None = None

    @property
    def ticket(self) -> str:
        """The word in its prompt that determines its answer."""
        return words.ticket(self.number)

    @property
    def request_id(self) -> str:
        """Its `X-Request-Id`."""
        return f"query-{self.number}"

    @property
    def generates(self) -> bool:
        """Whether it becomes a job."""
        return self.kind in ("chat", "completion", "embeddings")

    @property
    def has_text(self) -> bool:
        """Whether its answer is text of a model."""
        return self.kind in ("chat", "completion")

    @property
    def node(self) -> str:
        """The node that it changes; empty if it changes none."""
        if self.kind != "change" or not self.path.startswith("/nodes"):
            return ""
        return str(self.body["id"]) if self.method == "POST" and self.body else self.path.split("/")[2]

    def __str__(self) -> str:
        answer = self.answer
        outcome = "nothing" if answer is None else f"{answer.status} {answer.error} whole={answer.is_whole}"
        return (
            f"{self.request_id} {self.kind} {self.method} {self.path} {self.model} stream={self.stream} "
            f"by {self.person.name}, {self.began_s:.3f} to {self.ended_s:.3f} s, answered {outcome}"
        )


class ClientSession:
    """A client at one address that makes requests in sequence, over one connection or several."""

    def __init__(self, network: Network, deployment: Deployment, host: str, random: Random) -> None:
        self._network = network
        self._deployment = deployment
        self._host = host
        self._random = random
        self._client: Client | None = None

    async def make(self, exchange: Exchange) -> None:
        """Make a request and record its outcome."""
        exchange.began_s = trio.current_time()
        try:
            with suppress(ConnectionRefusedError):
                await self._ask(exchange)
        finally:
            exchange.ended_s = trio.current_time()
            self._network.machine.note("request", exchange)

    async def _ask(self, exchange: Exchange) -> None:
        keeps = self._random.random() < 0.6
        if self._client is not None and self._client.is_stale:
            self.leave()  # an idle connection, which the server may close at any time
        if self._client is None or exchange.reads_slowly:
            self.leave()
        is_old = self._client is not None
        client = self._client = self._client or Client(self._connect(exchange))
        data = exchange.raw or request(
            exchange.method, exchange.path, exchange.body, headers=exchange.headers, close=not keeps
        )

        def reads_on(size: int) -> bool:
            return size < exchange.leaves_after_bytes

        with trio.move_on_after(exchange.leaves_after_s) as patience:
            client.pause_s = self._random.choice((0.5, 3.0)) if exchange.reads_slowly else 0.0
            exchange.times_sent = 1
            exchange.answer = await client.fetch(data, on_bytes=reads_on)
            if exchange.answer is None and is_old and not client.has_received:
                # The server closed the idle connection at the same moment: clients retry.
                self.leave()
                client = self._client = Client(self._connect(exchange))
                exchange.times_sent = 2
                exchange.answer = await client.fetch(data, on_bytes=reads_on)
        exchange.has_left = patience.cancelled_caught or (
            exchange.answer is not None and len(exchange.answer.body) >= exchange.leaves_after_bytes
        )
        is_good = exchange.answer is not None and exchange.answer.is_whole
        if exchange.has_left or not (keeps and is_good):
            self.leave(with_reset=exchange.has_left and exchange.resets)

    def _connect(self, exchange: Exchange) -> End:
        buffer_bytes = SMALL_BUFFER_BYTES if exchange.reads_slowly else DEFAULT_BUFFER_BYTES
        end = self._network.open_connection(
            self._host, latency_s=self._deployment.latency_s, buffer_bytes=buffer_bytes
        )
        end.ragged = end.peer.ragged = self._deployment.ragged
        return end

    def leave(self, *, with_reset: bool = False) -> None:
        """Close the connection, if there is one."""
        if self._client is not None:
            self._client.leave(with_reset=with_reset)
            self._client = None


def texts_of(exchange: Exchange) -> dict[int, str]:
    """Return the text of each choice so far. Raises `ValueError` or others for malformed answers."""
    answer = exchange.answer
    assert answer is not None
    texts: dict[int, str] = dict.fromkeys(range(exchange.n), "")
    documents = [answer.document]
    if answer.is_stream:
        documents = [json.loads(event) for event in answer.events if event != "[DONE]"]
    for document in documents:
        for choice in (document or {}).get("choices") or ():
            holder = choice.get("delta") or choice.get("message") or choice
            texts[choice["index"]] += holder.get("content") or holder.get("text") or ""
    return texts
