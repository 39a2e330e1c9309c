"""Compressed request bodies: what comes out is the body, within the same bounds, on every route."""

import gzip
import json
import tracemalloc

import pytest
import trio

from fairlead.base.config import Limits
from fairlead.server.routes.request_body import BodyMemory
from fairlead.server.routes.route_table import ROUTES
from nodes.coded import ENCODERS, zstd
from server.routes.conftest import client_of
from server.routes.raw_http import post, serving, until
from server.routes.role_matrix import call_of
from server.routes.test_bodies import CHAT, KB, both, direct, padded, quart, wait_for_bytes
from server.routes.test_upstream import client_of_command  # noqa: F401  # a fixture

CODINGS = ["gzip", "zstd"]
# Routes of batches read nothing without a folder for them.
WITH_BODY = [
    route
    for route in ROUTES
    if call_of(route).body and route.path != "/nodes" and not route.path.endswith("/batches")
]
routes_with_body = pytest.mark.parametrize("route", WITH_BODY, ids=lambda route: route.path)


def encoded(coding, body):
    return ENCODERS[coding][1](body)


def of(user, body, coding):
    return post(body, "/", f"X-OpenWebUI-User-Id: {user}", f"Content-Encoding: {coding}")


def message_of(reply):
    return reply.error if isinstance(reply.error, str) else reply.error["message"]


@pytest.mark.parametrize("coding", [*CODINGS, "x-gzip"])
@routes_with_body
async def test_every_route_takes_encoded_bodies(model, route, coding):
    plain, compressed = client_of(model), client_of(model)
    call = call_of(route)
    expected = await plain.post(call.path, call.body)
    headers = {"Content-Encoding": coding.upper()}
    reply = await compressed.post(call.path, encoded(coding, call.body), headers=headers)
    assert reply.status == expected.status
    assert len(reply.body) == pytest.approx(len(expected.body), abs=40)  # ids and times differ


@pytest.mark.parametrize("bypasses_quart", [True, False])
@routes_with_body
async def test_another_coding_is_refused_with_those_that_are_decoded(model, route, bypasses_quart):
    client = client_of(model, bypasses_quart=bypasses_quart)
    call = call_of(route)
    reply = await client.post(call.path, call.body, headers={"Content-Encoding": "br"})
    assert (reply.status, reply.headers["accept-encoding"]) == (415, "zstd, gzip")
    assert message_of(reply).startswith("Content-Encoding: the body has the content coding 'br'")


@pytest.mark.parametrize(
    "encoding", ["deflate", "aws-chunked", "gzip, zstd", "zstd, zstd", "compress", "gzip;q=1"]
)
async def test_several_codings_and_unknown_ones_are_refused(client, chat, encoding):
    reply = await client.post(CHAT, chat(), headers={"Content-Encoding": encoding})
    assert (reply.status, reply.error["param"]) == (415, "Content-Encoding")
    assert reply.error["code"] == "unknown_coding"


@pytest.mark.parametrize("coding", CODINGS)
@routes_with_body
async def test_body_that_cannot_be_decoded_is_refused_by_the_header(model, route, coding):
    client = client_of(model)
    call = call_of(route)
    whole = encoded(coding, call.body)
    for body in (whole[:-3], b"x" + whole, whole + b"x"):
        reply = await client.post(call.path, body, headers={"Content-Encoding": coding})
        assert (reply.status, message_of(reply).partition(":")[0]) == (400, "Content-Encoding")
        assert message_of(reply).isprintable()


@pytest.mark.parametrize("coding", CODINGS)
async def test_fault_in_a_decoded_body_is_named_as_in_a_plain_one(client, chat, coding):
    body = json.dumps(chat(temperature=9)).encode()
    reply = await client.post(CHAT, encoded(coding, body), headers={"Content-Encoding": coding})
    assert (reply.status, reply.error["param"]) == (400, "temperature")
    empty = await client.post(CHAT, b"", headers={"Content-Encoding": coding})
    assert (empty.status, "empty" in empty.error["message"]) == (400, True)


@pytest.mark.parametrize("coding", CODINGS)
async def test_nodes_get_the_decoded_body(relay_client, coding):
    body = json.dumps({"model": "remote", "messages": [{"role": "user", "content": "hello"}]}).encode()
    reply = await relay_client.post(CHAT, encoded(coding, body), headers={"Content-Encoding": coding})
    assert (reply.status, relay_client.gateway.job.relay.body) == (200, body)


async def test_servers_of_commands_get_the_decoded_body_without_its_coding(client_of_command):  # noqa: F811
    client = client_of_command()
    headers = {"Content-Encoding": "zstd", "X-Mine": "1"}
    await client.post("/upstream/away/x", encoded("zstd", b"body"), headers=headers)
    relay = client.gateway.job.relay
    assert (relay.body, "Content-Encoding" in dict(relay.passthrough.headers)) == (b"body", False)


@both
@pytest.mark.parametrize("coding", CODINGS)
async def test_bound_holds_for_both_forms(app_with, coding):
    bodies = BodyMemory(100 * KB)
    async with serving(app_with(bodies), Limits(body_bytes=KB)) as server:
        fits, too_large = encoded(coding, bytes(KB)), encoded(coding, bytes(KB + 1))
        assert (await server.fetch(of("ana", fits, coding))).body == b"1024"
        assert (await server.fetch(of("ana", too_large, coding))).status == 413
        padding = gzip.compress(b"") * 60  # 1200 bytes of nothing
        assert (await server.fetch(of("ana", padding, "gzip"))).status == 413
    assert bodies.taken == 0


@both
@pytest.mark.parametrize("coding", CODINGS)
async def test_bomb_is_refused_early_and_takes_no_memory(app_with, coding):
    bomb = encoded(coding, bytes(300_000_000))
    bodies = BodyMemory(100_000_000)
    async with serving(app_with(bodies), Limits(body_bytes=1_000_000)) as server:
        tracemalloc.start()
        answer = await server.fetch(of("ana", bomb, coding))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert (answer.status, bodies.taken) == (413, 0)
    assert peak < 4_000_000


@both
@pytest.mark.parametrize("coding", CODINGS)
async def test_both_forms_count_for_their_tenant(app_with, coding):
    bodies = BodyMemory(10 * KB)
    async with serving(app_with(bodies)) as server:
        holding = await server.connect()
        await holding.send(post(b"x" * 4 * KB, "/", "X-OpenWebUI-User-Id: bob")[:-1])
        await wait_for_bytes(bodies, 4 * KB - 1)
        assert (await server.fetch(of("ana", encoded(coding, bytes(5 * KB)), coding))).body == b"5120"
        # Its decoded form does not fit beside the other tenant's body, which is within its share.
        answer = await server.fetch(of("ana", encoded(coding, bytes(8 * KB)), coding))
        assert (answer.status, answer.error["code"]) == (429, "bodies_full")
        await holding.send(b"x")
        assert (await holding.answer()).body == b"4096"
        await wait_for_bytes(bodies, 0)


async def test_only_the_decoded_form_counts_once_it_is_decoded(model):
    reading = trio.Event()
    bodies = BodyMemory(10_000_000)

    async def hold(request):
        await request.read()
        reading.set()
        await trio.sleep_forever()

    async with serving(direct(bodies, hold)) as server:
        client = await server.connect()
        await client.send(of("ana", encoded("zstd", bytes(100_000)), "zstd"))
        await reading.wait()
        assert bodies.taken == 100_000
        client.reset()
        await wait_for_bytes(bodies, 0)


async def test_large_bodies_are_decoded_one_at_a_time_while_other_tasks_run():
    bodies, size, turns = BodyMemory(200_000_000), 16 * 2**20, []
    body = encoded("zstd", bytes(size))

    async with serving(direct(bodies)) as server, trio.open_nursery() as nursery:

        async def watch():
            while True:
                turns.append(bodies.decoding.running)
                await trio.lowlevel.checkpoint()

        nursery.start_soon(watch)
        async with trio.open_nursery() as requests:
            for user in ("ana", "bob", "cem"):
                requests.start_soon(server.fetch, of(user, body, "zstd"))
        nursery.cancel_scope.cancel()
    assert max(turns) == 1
    assert turns.count(1) > 3 * size / (64 * KB) / 2


@pytest.mark.parametrize("app_with", [direct, quart])
async def test_client_that_leaves_ends_the_decoding(app_with):
    bodies = BodyMemory(200_000_000)
    async with serving(app_with(bodies), Limits(body_bytes=100_000_000)) as server:
        client = await server.connect()
        await client.send(of("ana", encoded("zstd", bytes(90_000_000)), "zstd"))
        await until(lambda: bodies.taken > 1_000_000)
        client.reset()
        await wait_for_bytes(bodies, 0)
        assert bodies.decoding.running == 0


async def test_window_of_zstd_is_bounded_as_for_all_of_http(client):
    window = zstd.CompressionParameter.window_log
    compressor = zstd.ZstdCompressor(options={window: 24})
    body = compressor.compress(padded(1000)) + compressor.flush()
    reply = await client.post(CHAT, body, headers={"Content-Encoding": "zstd"})
    assert (reply.status, reply.error["param"]) == (400, "Content-Encoding")
