"""What is kept of responses that clients wait for, which keys find it, and for how long."""

from functools import partial

import pytest
import trio

from fairlead.base.config import ApiKey
from fairlead.base.errors import NodeFailed, QueueFull
from fairlead.base.job import Delta
from server.routes.responses_client import PATH, Sent, body_of, created, events_of, keeping, kept, script_of

ANA, BEN = {"Authorization": "Bearer ana"}, {"Authorization": "Bearer ben"}


@pytest.fixture
def shared(client_with):
    """A client of an application with the keys of two users."""
    return client_with(ApiKey(key="ana"), ApiKey(key="ben"))


# Reading ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [PATH, "/responses"])
async def test_response_is_kept_as_it_was_answered(client, path):
    answer = await created(client, metadata={"a": "b"})
    assert answer["store"] is True
    reply = await client.get(f"{path}/{answer['id']}")
    assert (reply.status, reply.headers["content-type"]) == (200, "application/json")
    assert reply.json == answer
    assert answer["output"][0]["content"][0]["text"] == "Hello world"


async def test_streamed_response_is_kept_as_its_last_event_has_it(client):
    reply = await client.post(PATH, body_of(stream=True))
    last = events_of(reply)[-1]
    assert last["type"] == "response.completed"
    assert (await client.get(f"{PATH}/{last['response']['id']}")).json == last["response"]


async def test_incomplete_response_is_kept(client):
    client.gateway.script = script_of("abcd", "length")
    answer = await created(client)
    assert answer["status"] == "incomplete"
    assert (await client.get(f"{PATH}/{answer['id']}")).json == answer


async def test_stream_that_fails_is_kept_with_its_error(client):
    client.gateway.script = lambda job: [[Delta(0, "Hello", [1])], NodeFailed("gone")]
    reply = await client.post(PATH, body_of(stream=True))
    last = events_of(reply)[-1]
    assert (last["type"], reply.is_complete) == ("response.failed", False)
    found = (await client.get(f"{PATH}/{last['response']['id']}")).json
    assert found == last["response"]
    assert found["error"]["message"] == "gone"


@pytest.mark.parametrize("stream", [False, True])
async def test_response_without_store_is_never_kept(client, stream):
    reply = await client.post(PATH, body_of(store=False, stream=stream))
    answer = events_of(reply)[-1]["response"] if stream else reply.json
    assert answer["store"] is False
    assert (await client.get(f"{PATH}/{answer['id']}")).status == 404
    assert await kept(client) == (0, 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_refused_request_is_not_kept(client, stream):
    client.gateway.refusal = QueueFull("full")
    assert (await client.post(PATH, body_of(stream=stream))).status == 429
    assert (await client.post(PATH, {"model": "small"})).status == 400
    assert await kept(client) == (0, 0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("begins", [False, True])
async def test_response_whose_client_disconnects_is_not_kept(client, stream, begins, autojump_clock):
    client.gateway.script = lambda job: [[Delta(0, "Hello", [1])], None] if begins else [None]
    async with trio.open_nursery() as nursery:
        sent = Sent(client, nursery, "POST", PATH, content=body_of(stream=stream))
        await trio.sleep(1)
        count, size = await kept(client)
        assert count == 1
        assert size > 0
        await sent.leave()
    assert await kept(client) == (0, 0)
    assert client.gateway.ended == 1


async def test_response_in_progress_of_a_waiting_client_is_not_found(client, autojump_clock):
    client.gateway.script = lambda job: [[Delta(0, "Hello", [1])], None]
    async with trio.open_nursery() as nursery:
        sent = Sent(client, nursery, "POST", PATH, content=body_of(stream=True))
        await trio.sleep(1)
        response_id = sent.events[0]["response"]["id"]
        assert (await client.get(f"{PATH}/{response_id}")).status == 404
        await sent.leave()


async def test_deleted_response_is_gone(client):
    answer = await created(client)
    reply = await client.send("DELETE", f"{PATH}/{answer['id']}", b"")
    assert (reply.status, reply.json) == (200, {"id": answer["id"], "object": "response", "deleted": True})
    assert (await client.get(f"{PATH}/{answer['id']}")).status == 404
    assert (await client.send("DELETE", f"{PATH}/{answer['id']}", b"")).status == 404
    assert await kept(client) == (0, 0)


async def test_response_of_another_key_is_not_found(shared):
    answer = await created(shared, headers=ANA)
    path = f"{PATH}/{answer['id']}"
    for method, of in [("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")]:
        reply = await shared.send(method, path + of, b"", headers=BEN)
        assert (reply.status, reply.error["code"]) == (404, "not_found"), (method, of)
    reply = await shared.post(PATH, body_of(previous_response_id=answer["id"]), headers=BEN)
    assert (reply.status, reply.error["code"]) == (400, "previous_response_not_found")
    assert (await shared.get(path, headers=ANA)).json == answer
    assert (await shared.get(path)).status == 401


PORTAL, OTHER = ApiKey(key="portal", trusted=True), ApiKey(key="other", trusted=True)


def named(user: str = "", key: str = "portal", header: str = "X-OpenWebUI-User-Id") -> dict[str, str]:
    """Return the headers of a request of the key that names this user."""
    return {"Authorization": f"Bearer {key}", **({header: user} if user else {})}


FAIRNESS = "x-llm-d-inference-fairness-id"
# Not the user `ana` of the key `portal`: another one, none, and those of another key or gateway's header.
OTHERS = [named("ben"), named(), named("ana", "other"), named("ben", header=FAIRNESS)]


@pytest.mark.parametrize("headers", OTHERS)
@pytest.mark.parametrize("by_body", [False, True])
async def test_response_of_another_user_of_a_trusted_key_is_not_found(client_with, headers, by_body):
    client = client_with(PORTAL, OTHER)
    own = {"headers": named(), "user": "ana"} if by_body else {"headers": named("ana")}
    answer = await created(client, **own)
    path = f"{PATH}/{answer['id']}"
    for method, of in [("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")]:
        reply = await client.send(method, path + of, b"", headers=headers)
        assert (reply.status, reply.error["code"]) == (404, "not_found"), (method, of)
    continued = body_of(previous_response_id=answer["id"])
    reply = await client.post(PATH, continued, headers=headers)
    assert (reply.status, reply.error["code"]) == (400, "previous_response_not_found")
    for header in ("X-OpenWebUI-User-Id", FAIRNESS):  # two names of the same user
        assert (await client.get(path, headers=named("ana", header=header))).json == answer
    for fields in ({"user": "ana"}, {"safety_identifier": "ana"}):
        assert (await client.post(PATH, continued | fields, headers=named())).status == 200
    assert (await client.post(PATH, continued, headers=named("ana"))).status == 200
    assert (await client.send("DELETE", path, b"", headers=named("ana"))).status == 200


async def test_user_whom_a_key_names_without_being_trusted_does_not_count(shared):
    answer = await created(shared, headers=ANA | {"X-OpenWebUI-User-Id": "x"}, user="y")
    assert (await shared.get(f"{PATH}/{answer['id']}", headers=ANA)).json == answer
    assert (await shared.get(f"{PATH}/{answer['id']}", headers=BEN)).status == 404


async def test_response_of_a_very_long_name_is_its_users(client_with):
    client = client_with(PORTAL)
    answer = await created(client, headers=named("x" * 5000))
    path = f"{PATH}/{answer['id']}"
    assert (await client.get(path, headers=named("x" * 5001))).status == 404
    assert (await client.get(path, headers=named("x" * 5000))).status == 200


async def test_response_of_a_waiting_client_cannot_be_cancelled(client):
    answer = await created(client)
    reply = await client.post(f"{PATH}/{answer['id']}/cancel", b"")
    assert (reply.status, reply.error["param"]) == (400, "response_id")


async def test_events_of_a_response_without_background_are_not_kept(client):
    last = events_of(await client.post(PATH, body_of(stream=True)))[-1]
    reply = await client.get(f"{PATH}/{last['response']['id']}?stream=true")
    assert (reply.status, reply.error["param"]) == (400, "stream")


async def test_other_methods_are_refused_in_openais_form(client):
    reply = await client.send("PUT", f"{PATH}/resp_1", b"")
    assert (reply.status, reply.error["code"]) == (405, "method_not_allowed")
    assert reply.headers["allow"] == "DELETE, GET, HEAD, OPTIONS"


async def test_answers_of_another_asgi_server_are_the_same(client_with):
    client = client_with(bypasses_quart=False)
    stream = partial(client.post, PATH, body_of(stream=True))
    last = events_of(await stream())[-1]["response"]
    assert (await client.get(f"{PATH}/{last['id']}")).json == last


# Bounds ----------------------------------------------------------------------------------------------


async def test_response_expires_unless_it_is_continued(client_with, autojump_clock):
    client = keeping(client_with, ttl_s=100)
    first, other = await created(client), await created(client)
    await trio.sleep(60)
    second = await created(client, previous_response_id=first["id"])
    await trio.sleep(60)
    statuses = [(await client.get(f"{PATH}/{each['id']}")).status for each in (first, second, other)]
    assert statuses == [200, 200, 404]
    await trio.sleep(60)
    assert (await client.get(f"{PATH}/{second['id']}")).status == 404
    assert await kept(client) == (0, 0)


async def test_tenant_that_stores_much_loses_its_own_oldest_responses(client_with):
    client = keeping(client_with, ApiKey(key="ana"), ApiKey(key="ben"), max_bytes=40_000)
    of_ben = await created(client, headers=BEN)
    of_ana = [await created(client, headers=ANA) for _ in range(20)]
    assert (await client.get(f"{PATH}/{of_ben['id']}", headers=BEN)).status == 200
    found = [(await client.get(f"{PATH}/{each['id']}", headers=ANA)).status == 200 for each in of_ana]
    assert found == sorted(found)
    assert 1 < sum(found) < 20


async def test_hundreds_of_responses_leave_memory_flat(client_with):
    client = keeping(client_with, max_bytes=40_000)
    tasks = trio.lowlevel.current_statistics().tasks_living
    for _ in range(300):
        await created(client)
        count, size = await kept(client)
        assert size <= 40_000
        assert count < 15
        assert trio.lowlevel.current_statistics().tasks_living == tasks


async def test_response_larger_than_the_bound_is_answered_and_not_kept(client_with):
    client = keeping(client_with, max_bytes=4000)
    answer = await created(client, "x" * 3000)
    assert answer["output"][0]["content"][0]["text"] == "Hello world"
    assert (await client.get(f"{PATH}/{answer['id']}")).status == 404
    assert await kept(client) == (0, 0)


async def test_without_the_setting_nothing_is_kept(client_with):
    client = keeping(client_with, store=False)
    answer = await created(client, store=True)
    assert answer["store"] is False
    reply = await client.get(f"{PATH}/{answer['id']}")
    assert reply.status == 404
    assert "responses.store" in reply.error["message"]
    assert await kept(client) == (0, 0)


@pytest.mark.parametrize("field", [{"previous_response_id": "resp_1"}, {"background": True}])
async def test_without_the_setting_fields_that_need_it_are_refused(client_with, field):
    reply = await keeping(client_with, store=False).post(PATH, body_of(**field))
    assert (reply.status, reply.error["param"]) == (400, *field)
    assert "responses.store" in reply.error["message"]


# Input items -----------------------------------------------------------------------------------------


async def test_input_items_are_listed_in_openais_form_and_in_pages(client):
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}", "id": "fc_mine"}
    output = {"type": "function_call_output", "call_id": "c1", "output": "4"}
    answer = await created(client, [{"role": "user", "content": "hello"}, call, output])
    path = f"{PATH}/{answer['id']}/input_items"
    listed = (await client.get(f"{path}?order=asc")).json
    assert (listed["object"], listed["has_more"]) == ("list", False)
    message, *others = listed["data"]
    assert message == {
        "id": message["id"],
        "status": "completed",
        "type": "message",
        "role": "user",
        "content": [{"type": "input_text", "text": "hello"}],
    }
    assert message["id"].startswith("msg_")
    assert others[0] == {**call, "status": "completed"}
    assert others[1] == {**output, "status": "completed", "id": others[1]["id"]}
    assert (listed["first_id"], listed["last_id"]) == (message["id"], others[1]["id"])
    page = (await client.get(f"{path}?limit=2")).json
    assert (page["data"], page["has_more"]) == ([others[1], others[0]], True)
    rest = (await client.get(f"{path}?limit=2&after={page['last_id']}")).json
    assert (rest["data"], rest["has_more"]) == ([message], False)


async def test_text_is_listed_as_a_message(client):
    answer = await created(client, "hello")
    (item,) = (await client.get(f"{PATH}/{answer['id']}/input_items")).json["data"]
    assert (item["role"], item["content"]) == ("user", [{"type": "input_text", "text": "hello"}])


@pytest.mark.parametrize("query", ["limit=0", "limit=101", "limit=x", "order=up", "after=unknown"])
async def test_invalid_page_of_input_items_is_refused(client, query):
    answer = await created(client)
    reply = await client.get(f"{PATH}/{answer['id']}/input_items?{query}")
    assert (reply.status, reply.error["param"]) == (400, query.partition("=")[0])
