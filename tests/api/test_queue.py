"""What HTTP shows of the queue, and cancelling by request id."""

import json
from urllib.parse import quote

import pytest
import trio
import trio.testing

from api.raw_http import post, serving
from fairlead.api.door import MAX_REQUEST_ID_LENGTH
from fairlead.config import ApiKey
from fairlead.job import Delta

CHAT = "/v1/chat/completions"
ANA = ApiKey("sk-ana", user="ana")
BOB = ApiKey("sk-bob", user="bob")
OTHER_ANA = ApiKey("sk-other", user="ana")


def bearer(key: ApiKey, **more: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key.key}", **more}


def begins(job):
    """Say something and then nothing more."""
    return [[Delta(0, "Hello", [10])], None]


# Cancel --------------------------------------------------------------------------------------------


async def cancelled(client, chat, *, cancel_headers=None, **fields):
    """Ask, cancel what was asked, and return both answers."""
    replies = []

    async def ask():
        replies.append(await client.post(CHAT, chat(**fields), headers={"X-Request-Id": "mine"}))

    async with trio.open_nursery() as clients:
        clients.start_soon(ask)
        await trio.testing.wait_all_tasks_blocked()
        cancel = await client.post("/v1/requests/mine/cancel", b"", headers=cancel_headers or {})
    (reply,) = replies
    return cancel, reply


@pytest.mark.parametrize("stream", [False, True])
async def test_a_waiting_job_that_is_cancelled_is_a_499(client, chat, stream, autojump_clock):
    client.gateway.wait_s = 10.0
    cancel, reply = await cancelled(client, chat, stream=stream)
    assert (200, {"id": "mine", "object": "request", "status": "cancelled"}) == (cancel.status, cancel.json)
    assert (499, "cancelled", "cancelled_error") == (reply.status, reply.error["code"], reply.error["type"])
    assert "false" == reply.headers["x-should-retry"]
    assert "retry-after" not in reply.headers


async def test_a_running_job_that_is_cancelled_shows_nothing_of_its_answer(client, chat):
    client.gateway.script = begins
    _, reply = await cancelled(client, chat)
    assert (499, "cancelled") == (reply.status, reply.error["code"])
    assert 1 == client.gateway.ended


async def test_a_stream_that_is_cancelled_ends_with_an_error_event_and_a_cut(client, chat):
    client.gateway.script = begins
    _, reply = await cancelled(client, chat, stream=True)
    assert 200 == reply.status
    assert b"Hello" in reply.body
    assert b'"code":"cancelled"' in reply.events[-1]
    assert b"[DONE]" not in reply.body
    assert not reply.whole


async def test_a_stream_cancelled_after_its_early_200_ends_so_too(client_with, chat, autojump_clock):
    client = client_with()
    client.gateway.wait_s = 100.0
    replies = []

    async def ask():
        replies.append(await client.post(CHAT, chat(stream=True), headers={"X-Request-Id": "mine"}))

    async with trio.open_nursery() as clients:
        clients.start_soon(ask)
        await trio.sleep(22)
        assert 200 == (await client.post("/v1/requests/mine/cancel", b"")).status
    (reply,) = replies
    assert 200 == reply.status
    assert 2 == len(reply.comments)
    assert b'"code":"cancelled"' in reply.events[-1]
    assert not reply.whole


@pytest.mark.parametrize("stranger", [BOB, OTHER_ANA])
async def test_a_job_of_another_key_cannot_be_cancelled_nor_told_from_none(
    client_with, chat, stranger, autojump_clock
):
    client = client_with(ANA, BOB, OTHER_ANA)
    client.gateway.wait_s = 10.0
    replies = []

    async def ask():
        replies.append(await client.post(CHAT, chat(), headers=bearer(ANA, **{"X-Request-Id": "mine"})))

    async with trio.open_nursery() as clients:
        clients.start_soon(ask)
        await trio.testing.wait_all_tasks_blocked()
        foreign = await client.post("/v1/requests/mine/cancel", b"", headers=bearer(stranger))
        unknown = await client.post("/v1/requests/none/cancel", b"", headers=bearer(stranger))
        nobody = await client.post("/v1/requests/mine/cancel", b"")
        own = await client.post("/v1/requests/mine/cancel", b"", headers=bearer(ANA))
    assert (404, "not_found") == (foreign.status, foreign.error["code"])
    assert foreign.body == unknown.body.replace(b"none", b"mine")
    assert (401, 200) == (nobody.status, own.status)
    assert [499] == [reply.status for reply in replies]


async def test_a_job_that_is_over_cannot_be_cancelled(client, chat):
    await client.post(CHAT, chat(), headers={"X-Request-Id": "mine"})
    assert 404 == (await client.post("/v1/requests/mine/cancel", b"")).status


@pytest.mark.parametrize("path", ["/v1/requests/a/b/cancel", "/v1/requests/" + "x" * 5000 + "/cancel"])
async def test_any_id_is_a_short_404(client, path):
    reply = await client.post(path, b"")
    assert (404, "not_found") == (reply.status, reply.error["code"])
    assert len(reply.body) < 400


@pytest.mark.parametrize("given", ["a/b", "a/cancel", "#?&='\"\\"])
async def test_an_id_with_anything_in_it_can_be_cancelled(client, chat, given):
    client.gateway.script = begins
    app = client.app
    async with serving(app) as server:
        asking = await server.connect()
        await asking.send(post(json.dumps(chat(stream=True)).encode(), CHAT, f"X-Request-Id: {given}"))
        await asking.until(b"Hello")
        reply = await server.ask(post(b"", f"/v1/requests/{quote(given, safe='')}/cancel"))
        assert b'"code":"cancelled"' in await asking.end()
    assert (200, given) == (reply.status, json.loads(reply.body)["id"])


@pytest.mark.parametrize("path", ["/v1/requests//cancel", "/v1/requests/cancel"])
async def test_no_id_is_no_route(client, path):
    assert 404 == (await client.post(path, b"")).status


# Request ids ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["mine", "x" * MAX_REQUEST_ID_LENGTH])
async def test_an_id_in_flight_gets_a_suffix_and_can_be_used_again_afterwards(
    client, chat, log, given, autojump_clock
):
    client.gateway.wait_s = 10.0
    replies = []

    async def ask():
        replies.append(await client.post(CHAT, chat(), headers={"X-Request-Id": given}))

    async with trio.open_nursery() as clients:
        for _ in range(3):
            clients.start_soon(ask)
            await trio.testing.wait_all_tasks_blocked()
    ids = [job.request_id for job in client.gateway.jobs]
    assert given == ids[0]
    assert 3 == len(set(ids))
    assert all(0 < len(other) <= MAX_REQUEST_ID_LENGTH and other[:4] == given[:4] for other in ids)
    assert sorted(ids) == sorted(reply.headers["x-request-id"] for reply in replies)
    assert given == (await client.post(CHAT, chat(), headers={"X-Request-Id": given})).headers["x-request-id"]


async def test_a_bug_is_logged_under_the_id_the_client_was_told(client, chat, log, autojump_clock):
    client.gateway.wait_s = 10.0
    client.gateway.refusal = ZeroDivisionError("bug")
    replies = []

    async def ask():
        replies.append(await client.post(CHAT, chat(), headers={"X-Request-Id": "mine"}))

    async with trio.open_nursery() as clients:
        clients.start_soon(ask)
        await trio.testing.wait_all_tasks_blocked()
        clients.start_soon(ask)
    told = {reply.headers["x-request-id"] for reply in replies}
    assert told == {entry["request_id"] for entry in log}
    assert 2 == len(told)


# Totals and estimate -------------------------------------------------------------------------------


async def test_the_estimate_is_what_a_new_job_of_the_caller_would_be_told(client_with):
    asked = []

    def estimate(model, tenant, priority):
        asked.append((model, tenant, priority))
        return {"position": 3, "estimated_wait_s": 24, "estimated_wait_p90_s": 40}

    client = client_with(ANA, estimate=estimate)
    reply = await client.get("/queue/estimate?model=tiny", headers=bearer(ANA))
    assert {"position": 3, "estimated_wait_s": 24, "estimated_wait_p90_s": 40} == reply.json
    await client.get("/queue/estimate", headers=bearer(ANA, **{"X-Priority": "low"}))
    assert [("small", "ana", 1), ("small", "ana", 2)] == asked


@pytest.mark.parametrize(
    ("query", "headers", "status", "param"),
    [
        ("?model=huge", {}, 404, "model"),
        ("?model=", {}, 404, "model"),
        ("?model=%ff%00", {}, 404, "model"),
        ("?model=small", {"X-Priority": "urgent"}, 400, "priority"),
        ("?model=small", {"X-Priority": "high"}, 403, "priority"),
    ],
)
async def test_an_estimate_of_what_cannot_be_is_refused(client_with, query, headers, status, param):
    reply = await client_with(ANA).get("/queue/estimate" + query, headers=bearer(ANA, **headers))
    assert (status, param) == (reply.status, reply.error["param"])
