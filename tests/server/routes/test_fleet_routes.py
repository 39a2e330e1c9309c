"""Operator routes for models and nodes, and what they report, with a fake fleet."""

import json

import pytest
import trio
import trio.testing
from openai.types import Model

from fairlead.base.config import ApiKey, CommandConfig, NodeConfig
from fairlead.base.errors import InvalidRequest, LoadFailed, NoNode, NotFound
from fairlead.base.requester import Requester
from fairlead.router.fleet.status import LoadStatus, ModelStatus, NodeStatus, RemoteDetails
from fairlead.server.routes import route_table
from fake_fleet import FakeFleet
from generation.metrics.sources import engine_status

BIG = NodeStatus(
    id="org/big",
    kind="remote",
    models=("remote",),
    seats=4,
    busy=1,
    state="up",
    remote=RemoteDetails(url="http://10.0.0.2:8000", load=0.25),
)
STATUSES = [
    ModelStatus(
        model="small",
        kind="engine",
        node="engine:small",
        state="ready",
        seats=8,
        engine=engine_status(blocks_total=64),
    ),
    ModelStatus(model="cold", kind="command", node="command:cold", state="stopped", aliases=("frozen",)),
    ModelStatus(
        model="broken", kind="command", node="command:broken", state="failed", problem="no such file"
    ),
    ModelStatus(
        model="coming", kind="command", node="command:coming", state="loading", load=LoadStatus(progress=0.5)
    ),
    ModelStatus(model="secret", kind="command", node="command:secret", state="ready", unlisted=True),
    ModelStatus(model="remote", kind="remote", node="big", state="ready", seats=4),
]
ALIASES = {"tiny": "small", "frozen": "cold"}


@pytest.fixture
def fleet() -> FakeFleet:
    return FakeFleet(statuses=STATUSES, node_statuses=[BIG])


@pytest.fixture
def operator(client_with, fleet):
    """A client of an application with that fleet."""
    return client_with(fleet=fleet, aliases=ALIASES)


# Models --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cold", "frozen"])
async def test_model_is_loaded_by_name_or_alias_and_its_state_returned(operator, fleet, name):
    reply = await operator.post("/models/load", {"model": name})
    assert (reply.status, fleet.calls) == (200, [("load", "cold")])
    assert tuple(reply.json[key] for key in ("model", "state", "aliases")) == ("cold", "stopped", ["frozen"])


@pytest.mark.parametrize(
    ("fields", "force"), [({}, False), ({"force": None}, False), ({"force": True}, True)]
)
async def test_unload_is_forced_only_if_requested(operator, fleet, fields, force):
    reply = await operator.post("/models/unload", {"model": "tiny", **fields})
    assert (reply.status, fleet.calls) == (200, [("unload", "small", force)])
    assert reply.json["model"] == "small"


@pytest.mark.parametrize(("query", "arguments"), [("", ()), ("?wait=false", ()), ("?wait=true", ("wait",))])
async def test_unload_lets_queued_requests_wait_only_if_requested(operator, fleet, query, arguments):
    reply = await operator.post(f"/models/unload{query}", {"model": "tiny"})
    assert (reply.status, fleet.calls) == (200, [("unload", "small", False, *arguments)])


async def test_unload_with_another_wait_than_true_or_false_is_refused(operator, fleet):
    reply = await operator.post("/models/unload?wait=yes", {"model": "tiny"})
    assert (reply.status, reply.error["param"]) == (400, "wait")
    assert reply.error["message"] == "wait: must be true or false, not 'yes'"
    assert fleet.calls == []


async def test_request_for_a_model_with_only_drained_nodes_gets_503_at_once(operator, fleet):
    fleet.drained = frozenset({"remote"})
    chat = {"model": "remote", "messages": [{"role": "user", "content": "Hello"}]}
    reply = await operator.post("/v1/chat/completions", chat)
    assert (reply.status, reply.error["code"]) == (503, "no_node")
    assert reply.error["message"] == "all nodes that have the model 'remote' are drained"
    assert int(reply.headers["retry-after"]) >= 1


async def test_failed_load_reports_the_reason(operator, fleet):
    fleet.refusal = LoadFailed("cold: exit code 3 while loading")
    reply = await operator.post("/models/load", {"model": "cold"})
    assert (
        reply.status,
        reply.error["code"],
        reply.error["message"],
    ) == (502, "load_failed", "cold: exit code 3 while loading")


@pytest.mark.parametrize("path", ["/models/load", "/models/unload"])
@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"model": "huge"}, (404, "model")),
        ({"model": None}, (400, "model")),
        ({"model": ["small"]}, (400, "model")),
        ({}, (400, "model")),
        (b"small", (400, None)),
    ],
)
async def test_load_or_unload_without_a_valid_model_is_refused(operator, fleet, path, body, expected):
    reply = await operator.post(path, body)
    assert expected == (reply.status, reply.error["param"])
    assert fleet.calls == []


async def test_force_must_be_a_boolean(operator, fleet):
    reply = await operator.post("/models/unload", {"model": "small", "force": "yes"})
    assert (reply.status, reply.error["param"], fleet.calls) == (400, "force", [])


async def test_disconnect_ends_the_wait_for_a_load(client_with):
    class Slow(FakeFleet):
        left = False

        async def load(self, model: str, *, by: Requester | None = None) -> None:
            try:
                await trio.sleep_forever()
            finally:
                self.left = True

    fleet, left = Slow(["small"]), trio.Event()
    client = client_with(fleet=fleet)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: client.post("/models/load", {"model": "small"}, disconnected=left))
        await trio.testing.wait_all_tasks_blocked()
        assert not fleet.left
        left.set()
    assert fleet.left


async def test_operators_key_loads_and_unloads_its_own_models_only(client_with, fleet):
    key = ApiKey("sk", models=("frozen",), role="operator")
    client = client_with(key, fleet=fleet, aliases=ALIASES)
    headers = {"Authorization": "Bearer sk"}
    for path in ("/models/load", "/models/unload"):
        refused = await client.post(path, {"model": "small"}, headers=headers)
        assert (refused.status, refused.error["code"]) == (403, "forbidden")
        assert (await client.post(path, {"model": "cold"}, headers=headers)).status == 200
    assert [model for _, model, *_ in fleet.calls] == ["cold", "cold"]


async def test_running_models_are_those_with_a_local_process(operator):
    running = (await operator.get("/running")).json
    assert [entry["model"] for entry in running] == ["small", "coming", "secret"]
    assert {"seats": 8, "sequences": 0, "waiting": 0}.items() <= running[0].items()
    assert [running[0]["engine"]["blocks_total"], running[1]["engine"]] == [64, None]
    assert running[1]["load"] == {"progress": 0.5, "stage": "", "duration_s": 0.0}


async def test_model_list_has_every_model_that_is_not_unlisted(operator):
    data = (await operator.get("/v1/models")).json["data"]
    assert [card["id"] for card in data] == ["small", "cold", "broken", "coming", "remote"]
    for card in data:
        Model.model_validate(card, strict=True)
    assert "max_model_len" in data[0]
    assert "max_model_len" not in data[1]


async def test_model_with_its_only_node_down_is_known_but_not_listed(client_with):
    def status(model, kind, state):
        return ModelStatus(model=model, kind=kind, node="n", state=state)

    states = [
        ("cold", "command", "stopped"),
        ("remote", "remote", "stopped"),
        ("going", "remote", "draining"),
    ]
    statuses = [status(*state) for state in states] + [status("there", "remote", "ready")]
    client = client_with(fleet=FakeFleet(statuses=statuses))
    data = (await client.get("/v1/models")).json["data"]
    assert [card["id"] for card in data] == ["cold", "there"]
    # A job for it may be queued until the node is up again.
    assert (await client.get("/v1/models/remote")).json["id"] == "remote"


async def test_command_has_the_description_of_its_configuration(client_with):
    settings = {"cmd": ("serve",), "proxy": "http://127.0.0.1:1"}
    plain = CommandConfig(name="plain", **settings)
    known = CommandConfig(
        name="known",
        title="Known well",
        description="what all know",
        metadata={"size": 7},
        capabilities={"tools": True},
        **settings,
    )
    client = client_with(fleet=FakeFleet([], ["plain", "known"], configs=(plain, known)))
    first, second = (await client.get("/v1/models")).json["data"]
    assert set(first) == {"id", "object", "created", "owned_by", "root", "parent"}
    assert {
        "name": "Known well",
        "description": "what all know",
        "meta": {"llamaswap": {"size": 7}},
        "capabilities": {"tools": True},
    }.items() <= second.items()
    Model.model_validate(second, strict=True)


@pytest.mark.parametrize(
    ("name", "canonical"), [("frozen", "cold"), ("remote", "remote"), ("secret", "secret"), ("tiny", "small")]
)
async def test_unlisted_models_can_be_looked_up_too(operator, name, canonical):
    assert canonical == (await operator.get(f"/v1/models/{name}")).json["id"]


async def test_model_that_is_removed_during_its_load_is_not_found(client_with):
    class Fickle(FakeFleet):
        async def load(self, model: str, *, by: Requester | None = None) -> None:
            await trio.lowlevel.checkpoint()
            self.statuses = []

    reply = await client_with(fleet=Fickle(["small"])).post("/models/load", {"model": "small"})
    assert reply.status == 404


async def test_engines_model_that_is_being_removed_is_not_found(client_with, fleet):
    client = client_with(fleet=fleet, models={})
    reply = await client.post("/v1/chat/completions", {"model": "small", "messages": []})
    assert (reply.status, reply.error["code"], client.gateway.jobs) == (404, "model_not_found", [])


# Nodes ---------------------------------------------------------------------------------------------


async def test_nodes_are_listed_without_their_keys(operator):
    (node,) = (await operator.get("/nodes")).json
    assert {
        "id": "org/big",
        "kind": "remote",
        "remote": {"url": "http://10.0.0.2:8000", "load": 0.25},
        "models": ["remote"],
        "seats": 4,
        "busy": 1,
        "state": "up",
        "problem": None,
    }.items() <= node.items()
    assert not any("key" in name for name in node)


async def test_node_is_added_with_all_settings_of_a_configuration(operator, fleet):
    body = {"id": "org/big", "url": "http://10.0.0.2:8000", "api_key": "sk-theirs", "seats": 4}
    names = {"model_names": {"remote": "qwen"}, "dialects": ["openai"], "api_path": "/v4"}
    reply = await operator.post("/nodes", {**body, "models": ["remote"], **names})
    assert (reply.status, reply.json["id"]) == (201, "org/big")
    assert b"sk-theirs" not in reply.body
    own = {"model_names": {"remote": "qwen"}, "dialects": ("openai",), "api_path": "/v4"}
    config = NodeConfig(**body, models=("remote",), **own)
    assert [("add", config)] == fleet.calls


async def test_omitted_settings_of_a_node_have_the_configurations_defaults(operator, fleet):
    await operator.post("/nodes", {"id": "org/big", "url": "http://10.0.0.2:8000", "seats": None})
    assert [("add", NodeConfig("org/big", "http://10.0.0.2:8000"))] == fleet.calls


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"id": ""}, "id"),
        ({"id": 1}, "id"),
        ({"url": "10.0.0.2"}, "url"),
        ({"url": "file:///etc/passwd"}, "url"),
        ({"url": "http://:x"}, "url"),
        ({"url": "http://10.0.0.2:8000/v1/chat/completions"}, "url"),
        ({"api_path": "v4"}, "api_path"),
        ({"api_key": 1}, "api_key"),
        ({"seats": 0}, "seats"),
        ({"models": []}, "models"),
        ({"models": "remote"}, "models"),
        ({"model_names": {"remote": 1}}, "model_names"),
        ({"dialects": []}, "dialects"),
        ({"dialects": ["smtp"]}, "dialects[0]"),
        ({"apiKey": "sk-remote"}, "apiKey"),
    ],
)
async def test_invalid_node_is_refused_by_field(operator, fleet, fields, param):
    reply = await operator.post("/nodes", {"id": "big", "url": "http://10.0.0.2:8000", **fields})
    assert (reply.status, reply.error["param"], fleet.calls) == (400, param, [])
    assert param in reply.error["message"]


async def test_refusal_names_fields_as_the_api_spells_them(operator):
    reply = await operator.post("/nodes", {"id": "big", "url": "http://me:secret@10.0.0.2"})
    assert reply.error["param"] == "url"
    assert "api_key" in reply.error["message"]
    assert "apiKey" not in reply.error["message"]


@pytest.mark.parametrize("missing", ["id", "url"])
async def test_node_needs_an_id_and_a_url(operator, fleet, missing):
    body = {"id": "big", "url": "http://10.0.0.2:8000"}
    del body[missing]
    reply = await operator.post("/nodes", body)
    assert (reply.status, fleet.calls) == (400, [])
    assert missing in reply.error["message"]


async def test_fleet_refuses_a_node_id_that_is_taken(operator, fleet):
    fleet.refusal = InvalidRequest("id: big is taken", param="id")
    reply = await operator.post("/nodes", {"id": "big", "url": "http://10.0.0.2:8000"})
    assert (reply.status, reply.error["param"]) == (400, "id")


async def test_node_is_drained_and_removed_by_its_id_which_may_have_slashes(operator, fleet):
    drained = await operator.post("/nodes/org/big/drain", b"")
    assert (drained.status, drained.json["id"]) == (200, "org/big")
    removed = await operator.send("DELETE", "/nodes/org/big", b"")
    assert (removed.status, removed.json) == (200, {"id": "org/big", "object": "node", "deleted": True})
    assert fleet.calls == [("drain", "org/big"), ("remove", "org/big")]


@pytest.mark.parametrize(("method", "path"), [("DELETE", "/nodes/x"), ("POST", "/nodes/x/drain")])
async def test_unknown_node_is_not_found(operator, fleet, method, path):
    fleet.refusal = NotFound("there is no node 'x'")
    reply = await operator.send(method, path, b"")
    assert (reply.status, reply.error["code"]) == (404, "not_found")


async def test_job_for_a_model_without_a_node_is_a_503(operator):
    operator.gateway.refusal = NoNode("no node has remote now")
    reply = await operator.post("/v1/chat/completions", {"model": "remote", "messages": []})
    assert (reply.status, reply.error["code"], reply.headers["retry-after"]) == (503, "no_node", "2")


# Pages of other servers ----------------------------------------------------------------------------

ROUTES = [
    ("POST", "/models/load", {"model": "small"}),
    ("POST", "/models/unload", {"model": "small"}),
    ("GET", "/models/small/logs", None),
    ("GET", "/nodes", None),
    ("POST", "/nodes", {"id": "org/big", "url": "http://10.0.0.2:8000"}),
    ("DELETE", "/nodes/org/big", None),
    ("POST", "/nodes/org/big/drain", None),
]


@pytest.mark.parametrize(("method", "path", "body"), ROUTES)
@pytest.mark.parametrize(
    ("headers", "param"),
    [
        ({"Host": "evil.example"}, "Host"),
        ({"Host": "127.0.0.1:8000", "Origin": "http://evil.example"}, "Origin"),
        ({"Host": "evil.example", "Origin": "http://evil.example"}, "Host"),
        ({"Origin": "null"}, "Origin"),
    ],
)
async def test_page_of_another_server_is_refused(operator, fleet, method, path, body, headers, param):
    content = b"" if body is None else json.dumps(body).encode()
    refused = await operator.send(method, path, content, headers=headers)
    assert (refused.status, refused.error["code"], refused.error["param"]) == (403, "forbidden", param)
    assert fleet.calls == []
    own = {"Host": "localhost:8000", "Origin": "http://localhost:8000"}
    assert (await operator.send(method, path, content, headers=own)).status in (200, 201)


@pytest.mark.parametrize(("method", "path", "body"), ROUTES)
async def test_operator_routes_need_a_key_if_keys_are_configured(client_with, fleet, method, path, body):
    client = client_with(ApiKey("sk", role="admin"), fleet=fleet)
    content = b"" if body is None else json.dumps(body).encode()
    assert (await client.send(method, path, content)).status == 401
    assert fleet.calls == []
    reply = await client.send(method, path, content, headers={"Authorization": "Bearer sk"})
    assert reply.status in (200, 201)


async def test_key_for_some_models_may_not_change_nodes(client_with, fleet):
    client = client_with(ApiKey("sk", models=("small",), role="operator"), fleet=fleet)
    headers = {"Authorization": "Bearer sk"}
    for method, path, body in ROUTES[4:]:
        reply = await client.send(method, path, json.dumps(body).encode(), headers=headers)
        drains = path.endswith("/drain")
        assert (reply.status, reply.error["code"]) == (403, "forbidden" if drains else "insufficient_role")
    assert fleet.calls == []
    assert (await client.get("/nodes", headers=headers)).status == 200


async def test_every_operator_route_is_tested(operator):
    parameters = {"org/big": "{node_id}", "small/logs": "{name}/logs"}
    tried = set()
    for _, path, _ in ROUTES:
        for value, parameter in parameters.items():
            path = path.replace(value, parameter)  # noqa: PLW2901
        tried.add(path)
    strict = {route.path for route in route_table.ROUTES if route.permission.is_strict}
    # Those of keys, usage and requests have tests of their own.
    others = ("/v1/organization/", "/v1/requests", "/tenants", "/timings")
    assert tried == {path for path in strict if not path.startswith(others)}
