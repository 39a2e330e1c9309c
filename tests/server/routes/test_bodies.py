"""The memory that all request bodies may use together: which are refused, and when memory is released."""

import gc
import json
import tracemalloc
from pathlib import Path

import pytest
import trio
from quart import request
from quart_trio import QuartTrio

from fairlead.base.config import Config, Limits, ModelConfig
from fairlead.base.errors import FairleadError
from fairlead.router.quotas.access import Authenticator
from fairlead.router.quotas.key_quotas import LocalQuotas
from fairlead.server.auth.origin import OriginPolicy
from fairlead.server.auth.request_auth import RequestAuth
from fairlead.server.routes.exchange import Exchange, FairleadRequest, read_body
from fairlead.server.routes.generation_routes import GenerationRoutes
from fairlead.server.routes.request import Request, Response
from fairlead.server.routes.request_body import BodyMemory
from fake_fleet import FakeFleet
from server.routes import remote_responses
from server.routes.conftest import client_of
from server.routes.raw_http import get, post, serving, until

KB = 1024
CHAT = "/v1/chat/completions"


async def echo(request: Request) -> Response:
    return Response(b"%d" % len(await request.read()), 200, {})


def direct(bodies, route=echo):
    """Return an app with one route that bypasses Quart; tenants are the users that requests name."""
    auth = RequestAuth(Authenticator(()), LocalQuotas(()), OriginPolicy("127.0.0.1"))
    routes = GenerationRoutes(auth, bodies)

    async def app(scope, receive, send):
        if scope["type"] != "lifespan":
            await routes(route, scope, receive, send)

    return app


class App(QuartTrio):
    asgi_http_class = Exchange
    request_class = FairleadRequest


def quart(bodies):
    """Return an app with the same route in Quart."""
    app = App("test")

    @app.post("/")
    async def route():
        current = request._get_current_object()
        current.body_memory, current.tenant = bodies, "user/" + request.headers.get("X-OpenWebUI-User-Id", "")
        return str(len(await read_body(current)))

    @app.errorhandler(FairleadError)
    async def fail(error):
        return {"error": {"code": error.code}}, error.status, {"Retry-After": str(error.retry_after_s)}

    return app


both = pytest.mark.parametrize("app_with", [direct, quart])


def of(user, body):
    return post(body, "/", f"X-OpenWebUI-User-Id: {user}")


async def wait_for_bytes(bodies, amount):
    """Wait until this many bytes are held. Those that the listener reads ahead do not count."""
    await until(lambda: bodies.taken == amount)


@both
async def test_newest_body_of_the_largest_holder_is_refused(app_with):
    bodies = BodyMemory(10 * KB)
    async with serving(app_with(bodies)) as server:
        first, second, other = [await server.connect() for _ in range(3)]
        await first.send(of("ana", b"x" * 4 * KB)[:-1])
        await wait_for_bytes(bodies, 4 * KB - 1)
        await second.send(of("ana", b"x" * 4 * KB)[:-1])
        await wait_for_bytes(bodies, 8 * KB - 2)
        assert (await other.fetch(of("bob", b"x" * 3 * KB))).status == 200
        answer = await second.answer()
        assert (
            answer.status,
            answer.error["code"],
            answer.headers["retry-after"],
        ) == (429, "bodies_full", "2")
        await first.send(b"x")
        assert (await first.answer()).body == b"4096"
        await wait_for_bytes(bodies, 0)


@both
async def test_body_larger_than_the_total_is_too_large(app_with):
    bodies = BodyMemory(KB)
    async with serving(app_with(bodies)) as server:
        answer = await server.fetch(of("ana", b"x" * 2 * KB))
        assert (answer.status, answer.error["code"]) == (413, "body_too_large")
        assert (await server.fetch(of("ana", b"x" * KB))).body == b"1024"


@both
async def test_announced_body_that_is_not_sent_takes_no_memory(app_with):
    bodies = BodyMemory(KB)
    async with serving(app_with(bodies)) as server:
        for _ in range(3):
            await (await server.connect()).send(of("ana", b"x" * KB)[:-KB])
        assert (await server.fetch(of("bob", b"x" * KB))).body == b"1024"


@both
async def test_disconnect_releases_the_memory_of_the_body(app_with):
    bodies = BodyMemory(KB)
    async with serving(app_with(bodies)) as server:
        client = await server.connect()
        await client.send(of("ana", b"x" * KB)[:-1])
        await wait_for_bytes(bodies, KB - 1)
        client.reset()
        await wait_for_bytes(bodies, 0)
        assert bodies.holders == 0


@both
async def test_body_timeout_releases_the_memory_of_the_body(app_with):
    bodies = BodyMemory(KB)
    async with serving(app_with(bodies), Limits(body_timeout_s=0.1)) as server:
        assert (await server.fetch(of("ana", b"x" * KB)[:-1])).status == 408
        await wait_for_bytes(bodies, 0)


async def test_request_with_a_started_response_is_not_refused_for_another():
    bodies = BodyMemory(10 * KB)
    begun = trio.Event()

    class Slow:
        def __init__(self):
            self.pieces = [b"second", b"first"]

        def __aiter__(self):
            return self

        async def __anext__(self):
            if not self.pieces:
                raise StopAsyncIteration
            if len(self.pieces) == 1:
                await begun.wait()
            return self.pieces.pop()

    async def stream(request: Request) -> Response:
        if len(await request.read()) < 8 * KB:
            return Response(b"small", 200, {})
        return Response(Slow(), 200, {})

    async with serving(direct(bodies, stream)) as server:
        client = await server.connect()
        await client.send(of("ana", b"x" * 8 * KB))
        await client.until(b"first")
        refused = await server.fetch(of("bob", b"x" * 3 * KB))
        assert refused.status == 429
        begun.set()
        answer = await client.answer()
        assert (answer.status, answer.body, answer.is_complete) == (200, b"firstsecond", True)


async def test_waiting_request_that_holds_its_body_is_refused_for_another_tenant():
    bodies = BodyMemory(10 * KB)

    async def wait(request: Request) -> Response:
        if len(await request.read()) > 5 * KB:
            await trio.sleep_forever()
        return Response(b"", 200, {})

    async with serving(direct(bodies, wait)) as server:
        waiting = await server.connect()
        await waiting.send(of("ana", b"x" * 8 * KB))
        await wait_for_bytes(bodies, 8 * KB)
        assert (await server.fetch(of("bob", b"x" * 3 * KB))).status == 200
        assert (await waiting.answer()).status == 429


# In the application ------------------------------------------------------------------------------------


def padded(size, **fields):
    body = {"model": "small", "messages": [{"role": "user", "content": "hello"}], **fields}
    return json.dumps({**body, "ignored": "x" * size}).encode()


@pytest.fixture
def freed():
    """A function that waits until memory is freed, while the garbage collector is disabled."""
    gc.collect()
    gc.disable()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]

    yield lambda: until(lambda: tracemalloc.get_traced_memory()[0] - before < 1_000_000)
    tracemalloc.stop()
    gc.enable()


@pytest.mark.parametrize("bypasses_quart", [True, False])
async def test_application_refuses_the_newest_body_of_the_largest_tenant(model, bypasses_quart):
    client = client_of(model, bypasses_quart=bypasses_quart)
    shares = client.app.generation_routes._body_memory
    shares.total = 10 * KB
    body = padded(4 * KB)

    def of_user(name):
        return post(body, CHAT, f"X-OpenWebUI-User-Id: {name}")

    async with serving(client.app) as server:
        first, newest, small = [await server.connect() for _ in range(3)]
        for number, (connection, user) in enumerate([(small, "bob"), (first, "ana")], start=1):
            await connection.send(of_user(user)[:-1])
            await wait_for_bytes(shares, number * (len(body) - 1))
        assert shares.holders == 2
        await newest.send(of_user("ana")[:-1])
        assert (await newest.answer()).error["code"] == "bodies_full"
        for connection in (small, first):
            await connection.send(body[-1:])
            assert (await connection.answer()).status == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
@pytest.mark.parametrize("bypasses_quart", [True, False])
async def test_job_of_an_engine_does_not_hold_its_body(model, freed, path, stream, bypasses_quart):
    client = client_of(model, gateway_script=lambda _job: [None], bypasses_quart=bypasses_quart)
    shares = client.app.generation_routes._body_memory
    fields = {"prompt": "hello"} if path != CHAT else {}
    async with serving(client.app) as server:
        await (await server.connect()).send(post(padded(2_000_000, stream=stream, **fields), path))
        await until(lambda: client.gateway.jobs)
        assert (shares.taken, shares.holders) == (0, 0)
        await freed()


async def test_relayed_job_holds_its_body_to_its_end(model):
    client = client_of(
        model,
        fleet=FakeFleet(["small"], ["remote"]),
        gateway_script=lambda job: [None, *remote_responses.complete_response(job)],
    )
    shares = client.app.generation_routes._body_memory
    body = padded(1000, model="remote")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.post, CHAT, body)
        await until(lambda: client.gateway.jobs)
        assert len(body) == shares.taken
        nursery.cancel_scope.cancel()
    assert shares.taken == 0


@pytest.mark.parametrize(
    "body",
    [
        padded(2_000_000, n=0),
        padded(2_000_000, min_tokens=10**6),
        padded(2_000_000)[:-1],
        b"[" * 2_000_000,
        json.dumps({"model": "small", "messages": [{"role": "user", "content": "x" * 2_000_000}]}).encode(),
    ],
    ids=["out of range", "too long an answer", "cut short", "too many values", "too long a text"],
)
async def test_nothing_of_a_refused_body_stays_in_memory(model, freed, body):
    client = client_of(model)
    reply = await client.post(CHAT, body)
    assert reply.status == 400
    await freed()
    assert client.app.generation_routes._body_memory.taken == 0


async def test_nothing_of_a_revoked_body_stays_in_memory(freed):
    bodies = BodyMemory(2_000_000)
    async with serving(direct(bodies)) as server:
        client = await server.connect()
        await client.send(of("ana", b"x" * 1_900_000)[:-1])
        await wait_for_bytes(bodies, 1_899_999)
        assert (await server.fetch(of("bob", b"x" * 200_000))).status == 200
        assert (await client.answer()).status == 429
        assert (await server.fetch(get().replace(b"GET", b"POST"))).status == 200
        await freed()


async def test_application_uses_the_configured_bound(model):
    config = Config(models=(ModelConfig(Path(), "small"),), limits=Limits(bodies_bytes=1000))
    reply = await client_of(model, config=config).post(CHAT, padded(2000))
    assert (reply.status, reply.error["code"]) == (413, "body_too_large")
