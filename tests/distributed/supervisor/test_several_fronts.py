"""A server with several fronts, as its clients see it: any front answers for all, and each part may die."""

import json
import os
import signal
import socket
from contextlib import ExitStack

import httpx
import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families

from distributed.supervisor.running_server import CHAT, COMPLETION, MODEL, SINGLE, SLOTS, completion, running
from fairlead.base.config import ApiKey, KeyLimits, Limits

WORDS = 25


async def streamed(server, tokens, key="", **options):
    """Return the text of a stream, which must end without an error."""
    pieces, last = [], ""
    body = completion(tokens, stream=True, **options)
    async with server.client(key) as client, client.stream("POST", COMPLETION, json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event
                pieces.append(event["choices"][0]["text"])
            last = line or last
    assert last == "data: [DONE]"
    return "".join(pieces)


def sample(metrics, name):
    """Return the sum of a metric's samples."""
    families = text_string_to_metric_families(metrics)
    return sum(found.value for family in families for found in family.samples if found.name == name)


async def until_metrics(server, key, **expected):
    """Wait until a front reports these sums: the counts of others are up to a second old."""
    with trio.fail_after(20):
        while True:
            async with server.client(key) as client:
                metrics = (await client.get("/metrics")).text
            if {name: sample(metrics, name) for name in expected} == expected:
                return
            await trio.sleep(0.1)


async def until(condition):
    """Wait until the condition holds."""
    with trio.fail_after(60):
        while not condition():  # noqa: ASYNC110  there is no event for it
            await trio.sleep(0.02)


async def until_all_slots_are_free(server):
    """Wait until the engine has reported that all slots are free; it reports once a second."""
    with trio.fail_after(20):
        while (await server.running(MODEL))["engine"]["slots_free"] != SLOTS:  # noqa: ASYNC110  there is no event
            await trio.sleep(0.2)


async def test_every_front_answers_for_all(server):
    answer = (await server.post(COMPLETION, completion(WORDS))).json()
    assert answer["usage"]["completion_tokens"] == WORDS
    # Each connection reaches a random front. All 20 reach the same one once in half a million runs.
    for _ in range(20):
        await server.until("/queue", running=0)
    instances = {(await server.get("/health"))["instance"] for _ in range(20)}
    assert len(instances) == 1
    assert sorted(model["model"] for model in await server.get("/running")) == [MODEL, SINGLE]
    assert (await server.post("/models/unload", {"model": MODEL})).json()["state"] == "stopped"
    assert [model["model"] for model in await server.get("/running")] == [SINGLE]
    assert (await server.post("/models/load", {"model": MODEL})).json()["state"] == "ready"
    again = (await server.post(COMPLETION, completion(WORDS))).json()
    assert again["choices"] == answer["choices"]
    assert (await server.post(CHAT, {"model": "other", "messages": []})).status_code == 404


async def test_tenants_take_turns_through_all_fronts(server):
    await server.post(COMPLETION, completion(1, SINGLE))
    ended = []

    async def use(tenant):
        await server.post(COMPLETION, completion(10, SINGLE, user=tenant))
        ended.append(tenant)

    engine = server.pid_of(SINGLE)
    async with trio.open_nursery() as nursery:
        os.kill(engine, signal.SIGSTOP)
        nursery.start_soon(server.post, COMPLETION, completion(1, SINGLE))
        await server.until("/queue", running=1)
        for number, tenant in enumerate("AAAAABB"):
            nursery.start_soon(use, tenant)
            await server.until("/queue", waiting=number + 1)
        os.kill(engine, signal.SIGCONT)
    assert "".join(ended) == "ABABAAA"


async def test_job_is_cancelled_through_any_front(server):
    await server.post(COMPLETION, completion(1, SINGLE))
    async with trio.open_nursery() as nursery:
        replies = []

        async def use():
            replies.append(await server.post(COMPLETION, completion(900, SINGLE), **{"X-Request-Id": "long"}))

        nursery.start_soon(use)
        await server.until("/queue", running=1)
        assert (await server.post("/v1/requests/long/cancel", {})).json()["status"] == "cancelled"
        await server.until("/queue", running=0)
        await until(lambda: bool(replies))
        assert replies[0].json()["error"]["code"] == "cancelled"


async def test_streams_do_not_notice_the_death_of_the_dispatcher(server):
    await server.post(COMPLETION, completion(1))
    whole = await streamed(server, 300)
    texts = []

    async def use():
        texts.append(await streamed(server, 300))

    async with trio.open_nursery() as nursery:
        for _ in range(12):  # more than there are slots
            nursery.start_soon(use)
        await server.until("/queue", running=8)
        first, epoch = server.dispatcher_pid, server.supervisor.epoch
        os.kill(first, signal.SIGKILL)
    assert texts == [whole] * 12
    assert server.dispatcher_pid != first
    assert server.supervisor.epoch == epoch + 1
    found = await server.until("/queue", running=0)
    assert found["seats"] == SLOTS + 1
    await until_all_slots_are_free(server)


async def test_stopped_fronts_are_not_ready_while_they_take_requests_and_answer_metrics_to_their_end():
    async with running(2, limits=Limits(drain_delay_s=1.0, drain_s=60.0)) as server:
        await server.post(COMPLETION, completion(1))
        server.supervisor.stop()
        for _ in range(10):  # of both fronts
            assert await server.get("/ready") == {"status": "stopping"}
        assert (await server.post(COMPLETION, completion(1))).status_code == 200
        async with trio.open_nursery() as nursery:
            nursery.start_soon(streamed, server, 1500)
            await server.until("/queue", running=1)
            server.supervisor.drain()
            await until(lambda: len(server.supervisor.fronts) == 1)
            async with server.client() as client:
                assert (await client.get("/metrics")).status_code == 200
            refused = await server.post(COMPLETION, completion(1))
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        await until(lambda: not server.supervisor.fronts)


async def test_each_front_drops_unread_answers_of_the_client_that_a_proxy_names(server):
    """Two fronts have 1.25 MB each, and two of four answers of 1 MB are more than that on one of them."""
    tool = {"type": "function", "name": "f", "description": "x" * 1_000_000, "parameters": {}}
    body = {"model": MODEL, "input": "a", "max_output_tokens": 1, "tools": [tool], "tool_choice": "none"}
    content = json.dumps(body).encode()
    head = f"POST /v1/responses HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(content)}\r\n"
    request = f"{head}X-Forwarded-For: 192.0.2.1\r\n\r\n".encode() + content
    url = httpx.URL(server.supervisor.url)
    with ExitStack() as silent:
        for _ in range(4):
            sock = silent.enter_context(trio.socket.socket())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            await sock.connect((url.host, url.port))
            await trio.SocketStream(sock).send_all(request)
        with trio.fail_after(60):
            while True:
                async with server.client() as client:
                    families = text_string_to_metric_families((await client.get("/metrics")).text)
                dropped = {
                    found.labels["tenant"]: found.value
                    for family in families
                    for found in family.samples
                    if found.name == "fairlead_unread_answers_dropped_total"
                }
                if sum(dropped.values()) >= 2:
                    break
                await trio.sleep(0.1)
    assert dropped.keys() == {"address/192.0.2.1"}


async def test_front_that_dies_takes_only_its_own_clients(server):
    await server.post(COMPLETION, completion(1))
    outcomes = []

    async def use():
        try:
            outcomes.append(await streamed(server, 600))
        except Exception as error:  # noqa: BLE001  whatever a client may report
            outcomes.append(type(error).__name__)

    async with trio.open_nursery() as nursery:
        for _ in range(8):
            nursery.start_soon(use)
        await server.until("/queue", running=8)
        server.kill_front(0)
    whole = await streamed(server, 600)
    assert set(outcomes) - {whole} <= {"RemoteProtocolError", "ReadError"}
    await server.until("/queue", running=0, seats=SLOTS + 1)
    await until(lambda: len(server.supervisor.ready_fronts) == 2)


async def test_no_connection_is_refused_while_all_fronts_are_away(server):
    for number in (0, 1):
        server.kill_front(number)
    for _ in range(20):
        assert (await server.get("/health"))["status"] == "ok"
    await until(lambda: len(server.supervisor.ready_fronts) == 2)
    assert (await server.post(COMPLETION, completion(1))).status_code == 200


@pytest.mark.slow
async def test_engine_that_dies_is_replaced_and_streams_go_on(server):
    await server.post(COMPLETION, completion(1))
    whole = await streamed(server, 900)
    texts = []

    async def use():
        texts.append(await streamed(server, 900))

    killed = server.pid_of(MODEL)
    async with trio.open_nursery() as nursery:
        for _ in range(6):
            nursery.start_soon(use)
        await server.until("/queue", running=6)
        os.kill(killed, signal.SIGKILL)
    assert texts == [whole] * 6
    await until(lambda: server.pid_of(MODEL) not in (None, killed))


async def test_limits_and_counts_are_those_of_all_fronts():
    key = ApiKey(key="sk-ana", limits=KeyLimits(requests_per_minute=12))
    async with running(2, key) as server:
        statuses = []
        for _ in range(14):  # through both fronts, but for once in eight thousand runs
            reply = await server.post(COMPLETION, completion(3), key.key)
            statuses.append(reply.status_code)
        assert statuses == [200] * 12 + [429] * 2
        refused = 2
        with trio.fail_after(20):  # a front receives the counts of the others a moment later
            while reply.headers["x-ratelimit-remaining-requests"] != "0":
                await trio.sleep(0.1)
                reply = await server.post(COMPLETION, completion(3), key.key)
                assert reply.status_code == 429
                refused += 1
        for _ in range(8):
            await until_metrics(
                server,
                key.key,
                fairlead_generated_tokens_total=12 * 3,
                fairlead_requests_refused_total=refused,
            )


async def test_tenants_share_no_cached_prefix_whichever_front_they_reach():
    keys = ApiKey("sk-ana", user="ana"), ApiKey("sk-portal", user="portal", trusted=True)
    said = completion(2, prompt="turn seat queue node line " * 20)
    async with running(2, *keys) as server:
        found = {}
        for key, user in (("sk-ana", ""), ("sk-portal", "ben"), ("sk-portal", "eva"), ("sk-portal", "")):
            usages = [
                (await server.post(COMPLETION, said, key, **{"X-OpenWebUI-User-Id": user})).json()["usage"]
                for _ in range(6)  # through both fronts, but for once in 32
            ]
            found[key, user] = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    for first, *others in found.values():
        assert first == 0
        assert min(others) >= 16
