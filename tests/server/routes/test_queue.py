"""Cancellation by request id, request ids, and estimates of the queue."""

import json
from functools import partial
from urllib.parse import quote

import pytest
import trio
import trio.testing

from fairlead.base.config import ApiKey
from fairlead.base.job import Delta
from fairlead.generation.caller import MAX_REQUEST_ID_LENGTH
from server.routes.raw_http import post, serving

CHAT = "/v1/chat/completions"
ANA = ApiKey("sk-ana", user="ana")
BOB = ApiKey("sk-bob", user="bob")
OTHER_ANA = ApiKey("sk-other", user="ana")


def bearer(key: ApiKey, **more: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key.key}", **more}


def begins(job):
    """Return a script that generates text once and then blocks."""
    return [[Delta(0, "Hello", [10])], None]


# Cancel --------------------------------------------------------------------------------------------


async def cancelled(client, chat, *, cancel_headers=None, **fields):
    """Send a request, cancel it, and return both responses."""
    replies = []

    async def send_request():
        replies.append(await client.post(CHAT, chat(**fields), headers={"X-Request-Id": "mine"}))

    async with trio.open_nursery() as clients:
        clients.start_soon(send_request)
        await trio.testing.wait_all_tasks_blocked()
        cancel = await client.post("/v1/requests/mine/cancel", b"", headers=cancel_headers or {})
    (reply,) = replies
    return cancel, reply


@pytest.mark.parametrize("stream", [False, True])
async def test_waiting_job_that_is_cancelled_is_a_499(client, chat, stream, autojump_clock):
    client.gateway.wait_s = 10.0
    cancel, reply = await cancelled(client, chat, stream=stream)
    assert (cancel.status, cancel.json) == (200, {"id": "mine", "object": "request", "status": "cancelled"})
    assert (reply.status, reply.error["code"], reply.error["type"]) == (499, "cancelled", "cancelled_error")
    assert reply.headers["x-should-retry"] == "false"
    assert "retry-after" not in reply.headers


async def test_running_job_that_is_cancelled_returns_no_partial_response(client, chat):
    client.gateway.script = begins
    _, reply = await cancelled(client, chat)
    assert (reply.status, reply.error["code"]) == (499, "cancelled")
    assert client.gateway.ended == 1


async def test_stream_that_is_cancelled_ends_with_an_error_event_and_is_cut(client, chat):
    client.gateway.script = begins
    _, reply = await cancelled(client, chat, stream=True)
    assert reply.status == 200
    assert b"Hello" in reply.body
    assert b'"code":"cancelled"' in reply.events[-1]
    assert b"[DONE]" not in reply.body
    assert not reply.is_complete


async def test_stream_cancelled_after_its_early_200_ends_with_an_error(client_with, chat, autojump_clock):
    client = client_with()
    client.gateway.wait_s = 100.0
    replies = []

    async def send_request():
        replies.append(await client.post(CHAT, chat(stream=True), headers={"X-Request-Id": "mine"}))

    async with trio.open_nursery() as clients:
        clients.start_soon(send_request)
        await trio.sleep(22)
        assert (await client.post("/v1/requests/mine/cancel", b"")).status == 200
    (reply,) = replies
    assert reply.status == 200
    assert len(reply.comments) == 2
    assert b'"code":"cancelled"' in reply.events[-1]
    assert not reply.is_complete


@pytest.mark.parametrize("other_user", [BOB, OTHER_ANA])
async def test_cancelling_a_job_of_another_key_gets_the_same_404_as_an_unknown_id(
    client_with, chat, other_user, autojump_clock
):
    client = client_with(ANA, BOB, OTHER_ANA)
    client.gateway.wait_s = 10.0
    replies = []

    async def send_request():
        replies.append(await client.post(CHAT, chat(), headers=bearer(ANA, **{"X-Request-Id": "mine"})))

    async with trio.open_nursery() as clients:
        clients.start_soon(send_request)
        await trio.testing.wait_all_tasks_blocked()
        other_key = await client.post("/v1/requests/mine/cancel", b"", headers=bearer(other_user))
        unknown = await client.post("/v1/requests/none/cancel", b"", headers=bearer(other_user))
        without_key = await client.post("/v1/requests/mine/cancel", b"")
        own = await client.post("/v1/requests/mine/cancel", b"", headers=bearer(ANA))
    assert (other_key.status, other_key.error["code"]) == (404, "not_found")
    assert other_key.body == unknown.body.replace(b"none", b"mine")
    assert (without_key.status, own.status) == (401, 200)
    assert [reply.status for reply in replies] == [499]


async def test_job_of_another_user_of_a_trusted_key_cannot_be_cancelled(client_with, chat, autojump_clock):
    portal = ApiKey("portal", trusted=True)
    client = client_with(portal)
    client.gateway.wait_s = 10.0

    def named(user: str) -> dict[str, str]:
        return bearer(portal, **{"X-OpenWebUI-User-Id": user, "X-Request-Id": "mine"})

    async with trio.open_nursery() as clients:
        clients.start_soon(partial(client.post, CHAT, chat(), headers=named("ana")))
        await trio.testing.wait_all_tasks_blocked()
        for headers, status in ((named("bob"), 404), (bearer(portal), 404), (named("ana"), 200)):
            assert (await client.post("/v1/requests/mine/cancel", b"", headers=headers)).status == status


async def test_job_that_is_over_cannot_be_cancelled(client, chat):
    await client.post(CHAT, chat(), headers={"X-Request-Id": "mine"})
    assert (await client.post("/v1/requests/mine/cancel", b"")).status == 404


@pytest.mark.parametrize("path", ["/v1/requests/a/b/cancel", "/v1/requests/" + "x" * 5000 + "/cancel"])
async def test_unknown_id_of_any_form_is_a_short_404(client, path):
    reply = await client.post(path, b"")
    assert (reply.status, reply.error["code"]) == (404, "not_found")
    assert len(reply.body) < 400


@pytest.mark.parametrize("given", ["a/b", "a/cancel", "#?&='\"\\"])
async def test_id_with_special_characters_can_be_cancelled(client, chat, given):
    client.gateway.script = begins
    app = client.app
    async with serving(app) as server:
        asking = await server.connect()
        await asking.send(post(json.dumps(chat(stream=True)).encode(), CHAT, f"X-Request-Id: {given}"))
        await asking.until(b"Hello")
        reply = await server.fetch(post(b"", f"/v1/requests/{quote(given, safe='')}/cancel"))
        assert b'"code":"cancelled"' in await asking.end()
    assert (reply.status, json.loads(reply.body)["id"]) == (200, given)


@pytest.mark.parametrize("path", ["/v1/requests//cancel", "/v1/requests/cancel"])
async def test_missing_id_is_a_404(client, path):
    assert (await client.post(path, b"")).status == 404


# Request ids ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["mine", "x" * MAX_REQUEST_ID_LENGTH])
async def test_id_in_flight_gets_a_suffix_and_can_be_used_again_afterwards(
    client, chat, log, given, autojump_clock
):
    client.gateway.wait_s = 10.0
    replies = []

    async def send_request():
        replies.append(await client.post(CHAT, chat(), headers={"X-Request-Id": given}))

    async with trio.open_nursery() as clients:
        for _ in range(3):
            clients.start_soon(send_request)
            await trio.testing.wait_all_tasks_blocked()
    ids = [job.request_id for job in client.gateway.jobs]
    assert given == ids[0]
    assert len(set(ids)) == 3
    assert all(0 < len(other) <= MAX_REQUEST_ID_LENGTH and other[:4] == given[:4] for other in ids)
    assert sorted(ids) == sorted(reply.headers["x-request-id"] for reply in replies)
    assert given == (await client.post(CHAT, chat(), headers={"X-Request-Id": given})).headers["x-request-id"]


async def test_bug_is_logged_with_the_request_id_of_the_response(client, chat, log, autojump_clock):
    client.gateway.wait_s = 10.0
    client.gateway.refusal = ZeroDivisionError("bug")
    replies = []

    async def send_request():
        replies.append(await client.post(CHAT, chat(), headers={"X-Request-Id": "mine"}))

    async with trio.open_nursery() as clients:
        clients.start_soon(send_request)
        await trio.testing.wait_all_tasks_blocked()
        clients.start_soon(send_request)
    reported = {reply.headers["x-request-id"] for reply in replies}
    assert reported == {entry["request_id"] for entry in log}
    assert len(reported) == 2


# Totals and estimate -------------------------------------------------------------------------------


async def test_estimate_is_the_one_of_a_new_job_of_the_caller(client_with):
    requested = []

    async def estimate(model, tenant, priority, _team):
        requested.append((model, tenant, priority))
        return {"position": 3, "estimated_wait_s": 24, "estimated_wait_p90_s": 40}

    client = client_with(ANA, estimate=estimate)
    reply = await client.get("/queue/estimate?model=tiny", headers=bearer(ANA))
    assert reply.json == {"position": 3, "estimated_wait_s": 24, "estimated_wait_p90_s": 40}
    await client.get("/queue/estimate", headers=bearer(ANA, **{"X-Priority": "low"}))
    assert requested == [("small", "ana", 1), ("small", "ana", 2)]


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
async def test_estimate_for_an_invalid_request_is_refused(client_with, query, headers, status, param):
    reply = await client_with(ANA).get("/queue/estimate" + query, headers=bearer(ANA, **headers))
    assert (status, param) == (reply.status, reply.error["param"])
