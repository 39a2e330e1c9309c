"""The models, nodes and users that a key for some models sees, compared with a key for all."""

import json
from functools import partial

import msgspec
import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families

from fairlead.base.config import ApiKey, SelectorConfig
from fairlead.generation.metrics.job_metrics import JobMetrics
from fairlead.router.fleet.status import NodeStatus, RemoteDetails
from fake_fleet import FakeFleet
from generation.metrics.sources import timeline
from server.routes.conftest import FakeGateway, hello_world
from server.routes.test_fleet_routes import ALIASES, STATUSES

ALL = ApiKey("sk-all", user="root", role="operator")
USER = ApiKey("sk-user", user="bob")
SMALL = ApiKey("sk-small", user="ana", models=("tiny",), role="operator")
REMOTE = ApiKey("sk-remote", user="bob", trusted=True, models=("remote", "secret", "gone"))
EITHER = ApiKey("sk-either", models=("either",))
NODES = [
    NodeStatus(
        id="big",
        kind="remote",
        models=("cold", "remote"),
        seats=4,
        busy=3,
        state="up",
        remote=RemoteDetails(url="http://big"),
    ),
    NodeStatus(
        id="other",
        kind="remote",
        models=("cold",),
        seats=4,
        busy=1,
        state="up",
        remote=RemoteDetails(url="http://o"),
    ),
    NodeStatus(
        id="empty",
        kind="remote",
        models=(),
        seats=4,
        busy=0,
        state="down",
        remote=RemoteDetails(url="http://e"),
    ),
    *(
        NodeStatus(id=f"engine:{name}", kind="engine", models=(name,), seats=8, busy=1, state="up")
        for name in ("small", "secret")
    ),
]
SELECTORS = {"either": SelectorConfig(strategy="pin", targets=("frozen", "secret"))}


class CountingGateway(FakeGateway):
    """Has served jobs of several users with several models."""

    def statistics(self):
        metrics = JobMetrics()
        for tenant, model in (("ana", "small"), ("bob/eve", "remote"), ("root", "cold"), ("bobby", "remote")):
            metrics.add(timeline(tenant, model))
        return metrics.statistics()


@pytest.fixture
def fleet():
    return FakeFleet(statuses=list(STATUSES), node_statuses=NODES)


@pytest.fixture
def server(client_with, fleet):
    """A client of an application with these keys, models and nodes."""
    return client_with(
        *(ALL, USER, SMALL, REMOTE, EITHER),
        fleet=fleet,
        aliases=ALIASES,
        selectors=SELECTORS,
        gateway=CountingGateway(hello_world),
    )


def bearer(key):
    return {"Authorization": f"Bearer {key.key}"}


EVERY_MODEL = [status.model for status in STATUSES]
SEEN = [
    *((key, EVERY_MODEL, {node.id: list(node.models) for node in NODES}) for key in (ALL, USER)),
    (SMALL, ["small"], {"engine:small": ["small"]}),
    (REMOTE, ["secret", "remote"], {"big": ["remote"], "engine:secret": ["secret"]}),
    (EITHER, ["cold", "secret"], {"big": ["cold"], "other": ["cold"], "engine:secret": ["secret"]}),
]
IDS = [key.key for key, *_ in SEEN]


@pytest.mark.parametrize(("key", "models", "nodes"), SEEN, ids=IDS)
async def test_nodes_are_those_of_a_keys_models_and_list_only_these_models(server, key, models, nodes):
    listed = (await server.get("/nodes", headers=bearer(key))).json
    assert {node["id"]: node["models"] for node in listed} == nodes


@pytest.mark.parametrize(("key", "models", "nodes"), SEEN, ids=IDS)
async def test_running_models_are_those_of_a_key(server, key, models, nodes):
    running = (await server.get("/running", headers=bearer(key))).json
    loaded = {status.model for status in STATUSES if status.is_resident}
    assert [model for model in models if model in loaded] == [model["model"] for model in running]


async def watched(server, key, seconds=0.1):
    """Return the values of the events that a watcher with this key gets in that time."""
    disconnected, pieces = trio.Event(), []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(
            partial(server.get, "/events", headers=bearer(key), disconnected=disconnected, pieces=pieces)
        )
        await trio.sleep(seconds)
        disconnected.set()
    blocks = b"".join(pieces).decode().strip().split("\n\n")
    return [json.loads(block.partition("data: ")[2]) for block in blocks]


@pytest.mark.parametrize(("key", "models", "nodes"), SEEN, ids=IDS)
async def test_events_show_a_keys_models_and_nodes_and_the_totals_of_all(
    server, autojump_clock, key, models, nodes
):
    _, snapshot = await watched(server, key)
    assert [model["model"] for model in snapshot["models"]] == models
    assert {node["id"]: node["models"] for node in snapshot["nodes"]} == nodes
    assert (snapshot["queue"]["waiting"], snapshot["queue"]["running"]) == (2, 1)
    assert snapshot["answered"] == 4
    assert snapshot["tokens"]["generated"] == 20


@pytest.mark.parametrize(("key", "snapshots"), [(ALL, 9), (SMALL, 3)], ids=["seen", "hidden"])
async def test_changes_of_hidden_models_cause_no_events(server, fleet, autojump_clock, key, snapshots):
    """Otherwise the times of events would reveal when others are served."""

    async def change() -> None:
        for busy in range(100):
            fleet.statuses[1] = msgspec.structs.replace(STATUSES[1], busy=busy)
            await trio.sleep(0.1)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(change)
        events = await watched(server, key, 2.1)
        nursery.cancel_scope.cancel()
    assert len(events) - 1 == snapshots


async def test_keys_of_different_models_watch_at_once(server, autojump_clock):
    received = {}

    async def watch(key) -> None:
        received[key.key] = await watched(server, key, 3.1)

    async with trio.open_nursery() as nursery:
        for key in (SMALL, REMOTE, ALL, SMALL):
            nursery.start_soon(watch, key)
    shown = {
        key: {model["model"] for event in events[1:] for model in event["models"]}
        for key, events in received.items()
    }
    assert shown == {"sk-small": {"small"}, "sk-remote": {"secret", "remote"}, "sk-all": set(EVERY_MODEL)}


async def labels(server, key):
    """Return the labels of a key's metrics: models, nodes and tenants."""
    text = (await server.get("/metrics", headers=bearer(key))).body.decode()
    found = {"model": set(), "model_name": set(), "node": set(), "tenant": set()}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            for name in found.keys() & sample.labels.keys():
                found[name].add(sample.labels[name])
    return found


@pytest.mark.parametrize(
    ("key", "counted", "tenants"),
    [
        (ALL, {"small", "remote", "cold"}, 4),
        (USER, {"small", "remote", "cold"}, 1),
        (SMALL, {"small"}, 1),
        (REMOTE, {"remote"}, 1),
        (EITHER, {"cold"}, 0),
    ],
    ids=IDS,
)
async def test_metrics_are_of_a_keys_models_nodes_and_users(server, key, counted, tenants):
    (_, models, nodes) = next(seen for seen in SEEN if seen[0] is key)
    found = await labels(server, key)
    assert set(models) | counted == found["model"]
    assert counted <= found["model_name"] <= set(models) | counted
    assert set(nodes) == found["node"]
    assert len(found["tenant"]) == tenants


async def test_metrics_show_a_key_for_some_models_its_own_users(server):
    text = (await server.get("/metrics", headers=bearer(REMOTE))).body.decode()
    assert 'fairlead_jobs_total{model="remote",outcome="success"} 2.0' in text
    assert text.count("fairlead_tenant_jobs_total{") == 1
    assert "fairlead_queue_waiting_jobs 2.0" in text


@pytest.mark.parametrize(
    ("method", "path", "body", "code"),
    [
        ("POST", "/models/load", {"model": "cold"}, "forbidden"),
        ("POST", "/models/unload", {"model": "cold", "force": True}, "forbidden"),
        ("POST", "/models/load", {"model": "frozen"}, "forbidden"),
        ("POST", "/nodes", {"id": "x", "url": "http://x"}, "insufficient_role"),
        ("DELETE", "/nodes/engine:small", None, "insufficient_role"),
        ("DELETE", "/nodes/big", None, "insufficient_role"),
        ("POST", "/nodes/big/drain", None, "forbidden"),
        ("POST", "/nodes/nowhere/drain", None, "forbidden"),
    ],
)
async def test_operators_changes_to_other_models_are_forbidden(server, method, path, body, code):
    reply = await server.send(method, path, json.dumps(body).encode() if body else b"", headers=bearer(SMALL))
    assert (reply.status, reply.error["code"]) == (403, code)


@pytest.mark.parametrize("path", ["/models/load", "/models/unload"])
async def test_operators_key_may_load_and_unload_its_own_models(server, path):
    assert (await server.post(path, {"model": "tiny"}, headers=bearer(SMALL))).status == 200


async def test_without_keys_everything_is_visible(client_with):
    client = client_with(fleet=FakeFleet(statuses=STATUSES, node_statuses=NODES), aliases=ALIASES)
    assert len(NODES) == len((await client.get("/nodes")).json)
    assert len((await client.get("/running")).json) == 3
