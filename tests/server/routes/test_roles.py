"""Who may use which route: every row of the route table, called with each role and without a key."""

import dataclasses
import json

import msgspec
import pytest
import trio

from fairlead.base.config import ROLES, ApiKey
from fairlead.base.errors import InsufficientRole
from fairlead.language.text.embedding import EmbeddingSettings
from fairlead.router.fleet.status import NodeStatus, RemoteDetails
from fairlead.router.quotas.access import key_id
from fairlead.server.routes.errors import ErrorFormats
from fairlead.server.routes.route import Permission, Route
from fairlead.server.routes.route_table import ROUTES, dialects_of
from fake_fleet import FakeFleet
from fake_store import FakeStore
from server.routes.ollama_lines import CHAT as OLLAMA_CHAT
from server.routes.ollama_lines import GENERATE as OLLAMA_GENERATE
from server.routes.role_matrix import (
    KEYS,
    OTHER,
    OWNED,
    ROLE_OF,
    SHARED,
    call_of,
    cells,
    check,
    header_of,
    owned,
    role_of,
)
from server.routes.test_fleet_routes import STATUSES
from server.routes.test_openapi_requests import script

BIG = NodeStatus(
    id="big",
    kind="remote",
    models=("remote",),
    seats=4,
    busy=0,
    state="up",
    remote=RemoteDetails(url="http://10.0.0.2:8000"),
)
CHAT = "/v1/chat/completions"
NEED_ROLE = [route for route in ROUTES if (route.method, route.path) in ROLE_OF]
CONTROLLED = [route for route in NEED_ROLE if route.tag != "organization"]
BY_ID = owned("response_id")
BY_CONVERSATION = [route for route in ROUTES if "{conversation_id}" in route.path]
EMBEDS = ("/embeddings", "/embed", "/rerank", "/score")


def named(value: object) -> str | None:
    return f"{value.method} {value.path}" if isinstance(value, Route) else None


@pytest.fixture
def fleet():
    return FakeFleet(["small"], ["remote"], node_statuses=[BIG])


@pytest.fixture
def server(client_with, fleet, model):
    """Return a function that makes a server with a key for each role, and serves such a route."""

    def serve(route=None, **options):
        served = model
        if route is not None and route.path.endswith(EMBEDS):
            served = dataclasses.replace(model, embedding=EmbeddingSettings(4, normalized=False))
        return client_with(
            *KEYS.values(),
            OTHER,
            fleet=fleet,
            models={"small": served},
            gateway_script=script,
            store=FakeStore(),
            draining=lambda: route is not None and route.path == "/events",  # which otherwise does not end
            **options,
        )

    return serve


async def call(client, route, caller, **names):
    method, path, body = call_of(route, **names)
    return await client.send(method, path, body, headers=header_of(caller))


# The matrix ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("route", "caller", "needed"), cells(), ids=named)
async def test_route_answers_401_or_403_unless_the_key_has_the_role(
    server, fleet, autojump_clock, route, caller, needed
):
    is_relayed = "upstream" in route.path or route.tag == "media"
    fleet.statuses = None if is_relayed else [s for s in STATUSES if s.model == "small"]
    reply = await call(server(route), route, caller)
    check(caller, needed, reply.status, reply.body)
    if caller == "admin" and not route.parameters and route.tag != "batches":  # which need a folder
        assert reply.status == route.status
    if reply.status in (401, 403):
        assert fleet.calls == []


@pytest.mark.parametrize("route", NEED_ROLE, ids=named)
async def test_mutant_a_row_that_lost_its_permission_is_found(server, route):
    mutants = [
        dataclasses.replace(each, permission=Permission.KEY) if each is route else each for each in ROUTES
    ]
    reply = await call(server(route, routes=mutants), route, "user")
    with pytest.raises(AssertionError):
        check("user", role_of(route), reply.status, reply.body)


def test_row_without_a_permission_cannot_be_written():
    with pytest.raises(TypeError, match="permission"):
        Route(method="POST", path="/models/forget")


def test_table_and_matrix_agree_on_the_roles():
    roles = {(route.method, route.path): route.permission.role for route in ROUTES}
    assert {at: role for at, role in roles.items() if role != "user"} == ROLE_OF


async def test_without_keys_every_client_on_this_machine_may_control_models_and_nodes(client_with, fleet):
    client = client_with(fleet=fleet)
    for route in CONTROLLED:
        assert (await call(client, route, None)).status == route.status
        foreign = await client.send(*call_of(route)[:2], b"", headers={"Host": "ai"})
        assert (foreign.status, foreign.error["param"]) == (403, "Host")


# Own objects, and those of others --------------------------------------------------------------------


def test_each_route_for_a_user_that_names_an_object_has_a_test_of_its_owner():
    """Files and batches are in `tests/server/batches/test_batch_routes.py`.

    With fronts all are in `tests/distributed/supervisor/test_controlling.py`.
    """
    named_in = {name for route in ROUTES if role_of(route) == "user" for name in route.parameters}
    assert named_in - set(SHARED) == set(OWNED)


@pytest.mark.parametrize("caller", ROLES)
@pytest.mark.parametrize("route", BY_ID, ids=named)
async def test_kept_responses_of_others_are_hidden_from_every_role(server, route, caller):
    client = server()

    async def create(headers):
        return (await client.post("/v1/responses", {"model": "small", "input": "hi"}, headers=headers)).json[
            "id"
        ]

    own = await create(header_of(caller))
    others = await create({"Authorization": f"Bearer {OTHER.key}"})
    assert (await call(client, route, caller, response_id=others)).status == 404
    assert (await call(client, route, caller, response_id=own)).status in (
        200,
        400,
    )  # 400: not in the background


@pytest.mark.parametrize("caller", ROLES)
@pytest.mark.parametrize("route", BY_CONVERSATION, ids=named)
async def test_conversations_of_others_are_hidden_from_every_role(server, route, caller):
    client = server()

    async def create(headers):
        items = [{"role": "user", "content": "hi"}]
        made = await client.post("/v1/conversations", {"items": items}, headers=headers)
        found = await client.get(f"/v1/conversations/{made.json['id']}/items", headers=headers)
        return {"conversation_id": made.json["id"], "item_id": found.json["data"][0]["id"]}

    own = await create(header_of(caller))
    others = await create({"Authorization": f"Bearer {OTHER.key}"})
    assert (await call(client, route, caller, **others)).status == 404
    assert (await call(client, route, caller, **own)).status == 200


@pytest.mark.parametrize(
    ("caller", "owner", "status"),
    [
        *((KEYS[role], KEYS[role], 200) for role in ROLES),
        (KEYS["user"], OTHER, 404),
        (KEYS["operator"], OTHER, 200),
        (KEYS["admin"], OTHER, 200),
        (ApiKey("sk-small", role="operator", models=("tiny",)), OTHER, 200),
        (ApiKey("sk-remote", role="operator", models=("remote",)), OTHER, 404),
    ],
    ids=lambda value: value.key if isinstance(value, ApiKey) else None,
)
async def test_users_cancel_their_own_requests_and_operators_those_for_their_models(
    client_with, chat, caller, owner, status
):
    keys = {key.key: key for key in (caller, owner)}
    client = client_with(*keys.values(), gateway_script=lambda _job: [None])
    replies = []

    async def ask():
        headers = {"Authorization": f"Bearer {owner.key}", "X-Request-Id": "job-1"}
        replies.append(await client.post(CHAT, chat(), headers=headers))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await trio.testing.wait_all_tasks_blocked()
        headers = {"Authorization": f"Bearer {caller.key}"}
        reply = await client.post("/v1/requests/job-1/cancel", b"", headers=headers)
        assert reply.status == status
        if status == 404:
            nursery.cancel_scope.cancel()
    assert [reply.status for reply in replies] == ([499] if status == 200 else [])


# What a request itself may load and unload -------------------------------------------------------------


@pytest.mark.parametrize("path", [OLLAMA_CHAT, OLLAMA_GENERATE])
@pytest.mark.parametrize("caller", ROLES)
async def test_ollama_loads_for_everybody_and_unloads_for_operators(server, fleet, path, caller):
    client = server()
    loaded = await client.post(path, {"model": "small"}, headers=header_of(caller))
    assert (loaded.status, fleet.calls) == (200, [("load", "small")])
    unloaded = await client.post(path, {"model": "small", "keep_alive": 0}, headers=header_of(caller))
    if caller == "user":
        assert unloaded.status == 403
        assert unloaded.json == {
            "error": f"this needs an API key with the role operator; {key_id(KEYS['user'])} has the role user"
        }
        assert fleet.calls[1:] == []
    else:
        assert (unloaded.status, fleet.calls[1:]) == (200, [("unload", "small", False, "wait")])


@pytest.mark.parametrize("keep_alive", [0, -1, "5m"])
@pytest.mark.parametrize("caller", ROLES)
async def test_keep_alive_of_a_user_is_accepted_and_has_no_effect(server, fleet, caller, keep_alive):
    body = {"model": "small", "keep_alive": keep_alive, "prompt": "hi", "stream": False}
    client = server()
    assert (await client.post(OLLAMA_GENERATE, body, headers=header_of(caller))).status == 200
    assert [call[0] for call in fleet.calls] == ([] if caller == "user" else ["keep"])


async def test_model_on_demand_is_served_for_users(server, chat, fleet):
    reply = await server().post(CHAT, chat(), headers=header_of("user"))
    assert (reply.status, fleet.calls) == (200, [])


# What the log and errors name --------------------------------------------------------------------------


async def test_requester_of_each_change_is_passed_on_with_tenant_key_and_request(server, fleet):
    client = server()
    for route in CONTROLLED:
        method, path, body = call_of(route)
        await client.send(method, path, body, headers=header_of("admin") | {"X-Request-Id": route.path})
    changes = [route for route in CONTROLLED if route.method != "GET"]
    assert [by.request_id for by in fleet.requesters] == [route.path for route in changes]
    assert {by.key for by in fleet.requesters} == {key_id(KEYS["admin"])}
    assert len({by.tenant for by in fleet.requesters}) == 1


async def test_reading_a_log_is_logged_with_tenant_and_key(client_with, fleet, log):
    admin = KEYS["admin"]
    client = client_with(admin, fleet=fleet)
    await client.get("/models/small/logs", headers=header_of("admin"))
    (line,) = [line for line in log if line["event"] == "log read"]
    assert (line["model"], line["key"]) == ("small", key_id(admin))
    assert line["tenant"]


@pytest.mark.parametrize("route", CONTROLLED, ids=named)
async def test_refused_change_is_logged_with_tenant_and_key(server, log, route):
    await call(server(), route, "user")
    (line,) = [line for line in log if line["event"] == "request refused"]
    assert (line["outcome"], line["key"]) == ("insufficient_role", key_id(KEYS["user"]))
    assert line["tenant"]
    assert KEYS["user"].key not in str(log)


@pytest.mark.parametrize(
    "path",
    [
        *dict.fromkeys(dialect.path for dialect in dialects_of(ROUTES)),
        "/models/unload",
        "/api/show",
    ],
)
def test_error_has_the_form_of_its_path(path):
    body = json.loads(ErrorFormats(dialects_of(ROUTES)).of(path).error_body(InsufficientRole("no")))
    error = body["error"]
    if path.startswith("/api/"):
        assert body == {"error": "no"}
    elif path.startswith("/v1/messages"):
        assert (body["type"], error["type"], error["message"]) == ("error", "permission_error", "no")
    else:
        assert (error["type"], error["code"]) == ("permission_error", "insufficient_role")


@pytest.mark.parametrize("caller", ROLES)
async def test_events_tell_the_role_of_the_key_and_its_id(server, caller):
    events = next(route for route in ROUTES if route.path == "/events")
    reply = await call(server(events), events, caller)
    assert reply.headers["x-fairlead-role"] == caller
    assert reply.headers["x-fairlead-key"] == key_id(KEYS[caller])


@pytest.mark.parametrize("caller", ROLES)
async def test_lines_of_a_models_processes_are_shown_to_operators_only(server, fleet, caller):
    fleet.statuses = [msgspec.structs.replace(status, output=("secret",)) for status in fleet.models()]
    reply = await server().get("/running", headers=header_of(caller))
    assert [status["output"] for status in reply.json] == ([[]] if caller == "user" else [["secret"]])
