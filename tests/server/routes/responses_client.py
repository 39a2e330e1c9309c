"""Requests to `/v1/responses`, and an application with its own tasks."""

import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import trio

from fairlead.base.config import ApiKey, Config, ModelConfig, ResponsesConfig
from fairlead.base.job import Delta, FinishReason
from fairlead.server.responses.store import StoredResponse
from fairlead.server.routes.routes import Application
from server.routes.conftest import Client, Reply, Script

PATH = "/v1/responses"


def body_of(text: Any = "hello", **fields: Any) -> dict[str, Any]:
    """Return the body of a request."""
    return {"model": "small", "input": text, **fields}


async def created(client: Client, text: Any = "hello", *, headers: Any = (), **fields: Any) -> Any:
    """Create a response, and return its object."""
    reply = await client.post(PATH, body_of(text, **fields), headers=headers)
    assert reply.status == 200, reply.body
    return reply.json


async def found(client: Client, response_id: str) -> Any:
    """Return the object of a kept response."""
    return (await client.get(f"{PATH}/{response_id}")).json


def keeping(client_with: Callable[..., Client], *api_keys: ApiKey, **settings: Any) -> Client:
    """Return a client of an application with these keys and settings of kept responses."""
    card = ModelConfig(path=Path(), name="small")
    responses = ResponsesConfig(**settings)
    return client_with(config=Config(models=(card,), api_keys=api_keys, responses=responses))


def script_of(text: str, finish_reason: FinishReason = "stop") -> Script:
    """Return a script that answers with a text, in two pieces."""
    half = len(text) // 2
    last = Delta(0, text[half:], [2], finish_reason=finish_reason)
    return lambda job: [[Delta(0, text[:half], [1])], [last]]


def in_steps(client: Client, wait_s: float, *pauses: float) -> None:
    """Let the job wait, and pause after each of its steps. It has a word for each pause, and one more."""
    assert client.gateway is not None
    client.gateway.wait_s = wait_s
    steps = [[Delta(0, f"word{index} ", [index + 1])] for index in range(len(pauses))]
    steps.append([Delta(0, "end", [9], finish_reason="stop")])

    async def play(step: Any, deltas: Any, play: Any = client.gateway._play) -> None:
        if step is not steps[0]:
            await trio.sleep(pauses[steps.index(step) - 1])
        await play(step, deltas)

    client.gateway._play = play  # type: ignore[method-assign]
    client.gateway.script = lambda job: steps


async def conversation_as(name: str, item: str, client: Client, *, headers: Any = ()) -> None:
    """Keep a conversation under this id, with one item, in place of any earlier one."""
    assert isinstance(client.app, Application)
    store = client.app._views["POST", PATH].__self__.store  # type: ignore[attr-defined]
    for earlier in list(store._responses.values()):
        store.remove(earlier)
    await client.post("/v1/conversations", {}, headers=headers)
    (made,) = store._responses.values()
    store.remove(made)
    kept = StoredResponse(name, made.owner, made.tenant)
    store.begin(kept)
    items = [{"id": item, "type": "message", "status": "completed", "role": "user", "content": "hi"}]
    document = {"id": name, "created_at": 1, "items": items}
    store.end(kept, json.dumps(document).encode(), trio.current_time())


async def stored_as(name: str, client: Client, *, headers: Any = ()) -> None:
    """Keep a response in the background that has ended, under this id, in place of any earlier one."""
    assert isinstance(client.app, Application)
    store = client.app._views["POST", PATH].__self__.store  # type: ignore[attr-defined]
    for earlier in list(store._responses.values()):
        store.remove(earlier)
    answer = await created(client, headers=headers)
    (response,) = store._responses.values()
    store.remove(response)
    response = StoredResponse(name, response.owner, response.tenant, b'"hello"', is_background=True)
    store.begin(response)
    store.end(response, json.dumps({**answer, "id": name}).encode(), trio.current_time())


async def kept(client: Client) -> tuple[int, int]:
    """Return the number of kept responses, and their bytes, from the metrics."""
    text = (await client.get("/metrics")).body.decode()
    count, size = (
        float(re.search(rf"^fairlead_kept_responses{name} (\S+)$", text, re.MULTILINE)[1])  # type: ignore[index]
        for name in ("", "_bytes")
    )
    return int(count), int(size)


def events_of(reply: Reply) -> list[Any]:
    """Return the events of a stream without comments. The name of each must be its type."""
    *blocks, rest = reply.body.decode().split("\n\n")
    assert rest == ""
    events = []
    for block in blocks:
        if not block.startswith(":"):
            name, data = block.split("\n")
            events.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {events[-1]['type']}"
    return events


@asynccontextmanager
async def running(client: Client) -> AsyncIterator[trio.Nursery]:
    """Run the application's own tasks during the block; yield a nursery for clients.

    At the end of the block the server stops.
    """
    app = client.app
    assert isinstance(app, Application)
    async with trio.open_nursery() as clients:
        async with trio.open_nursery() as app.nursery:
            await app.startup()
            yield clients
            await app.shutdown()
        clients.cancel_scope.cancel()


class Sent:
    """A request in progress: the pieces that its client has received, and how it leaves."""

    def __init__(self, client: Client, nursery: trio.Nursery, method: str, path: str, **options: Any) -> None:
        self.reply: Reply | None = None
        self.pieces: list[bytes] = []
        self.left = trio.Event()
        self._over = trio.Event()
        self._client = client
        nursery.start_soon(partial(self._send, method, path, **options))

    async def _send(self, method: str, path: str, content: Any = None, **options: Any) -> None:
        body = b"" if content is None else json.dumps(content).encode()
        self.reply = await self._client.send(
            method, path, body, disconnected=self.left, pieces=self.pieces, **options
        )
        self._over.set()

    async def over(self) -> Reply:
        """Wait for the end of the request, and return its response."""
        await self._over.wait()
        assert self.reply is not None
        return self.reply

    async def leave(self) -> Reply:
        """Disconnect."""
        self.left.set()
        return await self.over()

    @property
    def events(self) -> list[Any]:
        """The events that have arrived."""
        return events_of(Reply(pieces=self.pieces))
