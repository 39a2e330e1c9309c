"""Clients that send malformed requests and disconnect midway, while another is always answered."""

import resource
from collections.abc import Awaitable, Callable
from contextlib import suppress
from random import Random

import pytest
import structlog
import trio
from quart import Response as QuartResponse
from quart import request
from quart_trio import QuartTrio

from fairlead.base.config import Limits
from fairlead.base.errors import FairleadError
from fairlead.base.job import Delta
from fairlead.dialects.openai.chat import ChatDialect
from fairlead.generation.event_stream import EventStream
from fairlead.generation.gateway import Answer
from fairlead.generation.pending import PendingAnswer
from fairlead.nodes.streams.deltas import Deltas
from fairlead.router.quotas.access import Authenticator
from fairlead.router.quotas.key_quotas import LocalQuotas
from fairlead.server.auth.origin import OriginPolicy
from fairlead.server.auth.request_auth import RequestAuth
from fairlead.server.routes.answers import stream_response
from fairlead.server.routes.exchange import Exchange, FairleadRequest, read_body
from fairlead.server.routes.generation_routes import GenerationRoutes
from fairlead.server.routes.request import Request, Response
from fuzz.mutations import conversation
from hostile_client.spoiling import pieces
from server.routes.raw_http import Apps, get, serving

AT_ONCE = 32
CANARY_S = 60.0  # generous: it is usually answered within a second
# The clients must exceed these. The canary must not, even on a slow machine.
LIMITS = Limits(header_bytes=4096, headers=20, stall_s=0.3, body_timeout_s=2.0)


def quart_app() -> QuartTrio:
    """Return a Quart app with `Exchange`: on every path it streams the request body back."""
    app = QuartTrio("fuzzed")
    app.asgi_http_class = Exchange
    app.request_class = FairleadRequest

    @app.errorhandler(FairleadError)
    async def fail(error):
        return error.message, error.status

    @app.route("/", defaults={"path": ""}, methods=["GET", "POST"])
    @app.route("/<path:path>", methods=["GET", "POST"])
    async def route(path):
        body = await read_body(request._get_current_object())

        async def stream():
            yield body or b"hello"
            if path == "wait":
                await trio.sleep_forever()

        return QuartResponse(stream())

    return app


async def not_waiting() -> None:
    """Return no estimate."""


def direct_app() -> Callable[..., Awaitable[None]]:
    """Return an app like `quart_app`, made of `GenerationRoutes`."""

    async def route(request: Request) -> Response:
        text = (await request.read() or b"hello").decode("latin-1")
        answer = Answer(Deltas(1), waited_s=0.0)
        pending = PendingAnswer()
        pending.started(answer)
        request.nursery.start_soon(put_text, answer.deltas, text)
        return stream_response(
            EventStream(pending, ChatDialect(), Plain(), not_waiting, write_large=trio.to_thread.run_sync), {}
        )

    async def put_text(deltas: Deltas, text: str) -> None:
        for piece in (text[:1], text[1:2], text[2:]):
            deltas.put(Delta(0, piece))
            await trio.lowlevel.checkpoint()
        deltas.put(Delta(0, finish_reason="stop"))

    auth = RequestAuth(Authenticator(()), LocalQuotas(()), OriginPolicy("127.0.0.1"))
    routes = GenerationRoutes(auth)

    async def app(scope, receive, send):
        if scope["type"] != "lifespan":
            await routes(route, {**scope, "path": "/"}, receive, send)

    return app


class Plain:
    """A writer that sends the plain text as events."""

    def write(self, deltas: list[Delta]) -> bytes:
        return "".join(delta.text for delta in deltas).encode("latin-1")

    def end(self) -> bytes:
        return b""

    def fail(self, error: FairleadError) -> bytes:
        return ChatDialect().error_event(error)


class HostileClients:
    """A number of clients, at most `AT_ONCE` at the same time."""

    def __init__(self, server, seed: int, count: int) -> None:
        self._server = server
        self._seeds = iter(range(seed * count, seed * count + count))

    async def run_all(self) -> None:
        """Run all clients, and return when the last has disconnected."""
        async with trio.open_nursery() as nursery:
            for _ in range(AT_ONCE):
                nursery.start_soon(self._one_after_the_other)

    async def _one_after_the_other(self) -> None:
        for seed in self._seeds:
            random = Random(seed)
            client = await self._server.connect(receive_buffer=random.choice([None, 4096]))
            with client.socket, suppress(OSError):  # the listener may close it at any time
                await self._attack(client, random)

    async def _attack(self, client, random: Random) -> None:
        for piece in pieces(random, conversation(random)):
            with trio.move_on_after(0.01):  # the listener does not have to read it
                await client.send(piece)
        if random.random() < 0.2:
            client.socket.shutdown(trio.socket.SHUT_WR)
        with trio.move_on_after(random.choice([0, 0.005, 0.02])):
            while await client.socket.recv(65536):
                pass
        if random.random() < 0.3:
            client.reset()


async def attack(app, seed: int, count: int) -> list[int]:
    """Run `count` clients beside a canary, and check that no task and no unexpected log entry is left.

    Return the statuses of the canary's answers.
    """
    statuses: list[int] = []
    tasks = trio.lowlevel.current_statistics().tasks_living
    with structlog.testing.capture_logs() as logs:
        async with serving(app, LIMITS, timeout_s=60 + count) as server:
            undisturbed = trio.lowlevel.current_statistics().tasks_living
            async with trio.open_nursery() as nursery:
                nursery.start_soon(check_canary, server, statuses)
                await HostileClients(server, seed, count).run_all()
                nursery.cancel_scope.cancel()
            server.close_clients()
            while trio.lowlevel.current_statistics().tasks_living > undisturbed:  # noqa: ASYNC110  # there is no event
                await trio.sleep(0.01)
            assert (await server.fetch(get())).body == b"hello"
    assert tasks == trio.lowlevel.current_statistics().tasks_living
    assert [entry for entry in logs if not is_expected(entry)] == []
    # Some clients request `//fail`. Whether the route runs depends on when they disconnect.
    assert {"fail", "fail_later"} >= {e["path"].strip("/") for e in logs if e["event"] == "request failed"}
    return statuses


def is_expected(entry) -> bool:
    if entry["event"] == "request refused":  # most malformed ones, by the listener or for their Host
        return 400 <= entry["status"] < 500 or entry["status"] == 505
    return entry["event"] == "request failed" or entry.get("reason") == "the client does not read"


async def check_canary(server, statuses: list[int]) -> None:
    """Send requests repeatedly, on an old connection and on new ones; add the status of each answer."""
    old = await server.connect()
    while True:
        for client in (old, await server.connect()):
            with trio.fail_after(CANARY_S):
                answer = await client.fetch(get())
            assert answer.body == b"hello"
            statuses.append(answer.status)
            if client is not old:
                client.socket.close()
        await trio.sleep(0.01)


@pytest.mark.parametrize("make_app", [Apps, quart_app, direct_app])
@pytest.mark.parametrize("seed", [1, 2])
async def test_malformed_requests_of_a_hundred_clients_do_not_affect_another_client(make_app, seed):
    statuses = await attack(make_app(), seed, 100)
    assert set(statuses) == {200}


@pytest.mark.slow
@pytest.mark.parametrize("make_app", [Apps, quart_app, direct_app])
@pytest.mark.parametrize("clients", [1000, pytest.param(5000, marks=pytest.mark.nightly)])
async def test_malformed_requests_of_thousands_of_clients_affect_no_other_client_and_leak_no_memory(
    make_app, clients
):
    await attack(make_app(), 3, 500)  # allocate what is kept for later requests
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    await attack(make_app(), 4, clients)
    grown_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown_mb < 50


async def test_clients_that_never_read_cost_no_more_than_their_buffers():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async with serving(Apps(), Limits(drain_s=0.1)) as server:
        for _ in range(100):
            client = await server.connect(receive_buffer=4096)
            await client.send(get("/flood"))
            await client.socket.recv(1)
        answers = [await server.fetch(get()) for _ in range(20)]
    grown_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert {answer.status for answer in answers} == {200}
    assert grown_mb < 100
