"""Requests generated from the OpenAPI document get documented responses; other methods are refused.

Like schemathesis, but in process and bounded: every operation gets bodies that its schema allows and bodies
that it does not. The status, media type and body of each response must be documented. Other methods get 405
with `Allow`.
"""

import dataclasses
import json
import re
from functools import cache

import jsonschema
import msgspec
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from fairlead.base.config import ApiKey, Budget
from fairlead.language.text.embedding import EmbeddingSettings
from fairlead.router.dispatch.dispatcher import DispatchStatistics
from fairlead.router.fleet.status import NodeStatus, RemoteDetails
from fairlead.server.organization.budgets import id_of
from fairlead.server.routes import openapi
from fairlead.server.routes.route_table import ROUTES
from fairlead.store.records import AddKey, Secret, SetBudget, StoredKey
from fake_fleet import FakeFleet
from fake_store import FakeStore
from server.routes import remote_responses
from server.routes.conftest import client_of, hello_world
from server.routes.responses_client import conversation_as, stored_as
from server.routes.schema_values import ANYTHING, Values, invalidated
from server.routes.test_embeddings import script as embedded
from server.routes.test_media import answered as media_answered
from server.routes.test_upstream import answered

DOCUMENT = json.loads(msgspec.json.encode(openapi.document(ROUTES)))
COMPONENTS = DOCUMENT["components"]["schemas"]
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "BREW")
NEVER_ENDS = "/events"
UPSTREAM = "/upstream/{upstream_path}"
OPERATIONS = [
    (method.upper(), path)
    for path, methods in DOCUMENT["paths"].items()
    for method in methods
    if path != NEVER_ENDS
]
MEDIA = sorted({route.path.removeprefix("/v1") for route in ROUTES if route.tag == "media"})
# Members that make a body valid. The document cannot express every rule.
GOOD = {
    "/chat/completions": {"model": "small", "messages": [{"role": "user", "content": "hello"}]},
    "/completions": {"model": "small", "prompt": "hello"},
    "/embeddings": {"model": "small", "input": ["hello"]},
    "/messages": {"model": "small", "max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]},
    "/messages/count_tokens": {"model": "small", "messages": [{"role": "user", "content": "hello"}]},
    "/responses": {"model": "small", "input": "hello"},
    "/responses/input_tokens": {"model": "small", "input": "hello"},
    "/responses/compact": {"model": "small", "input": "hello"},
    "/organization/api_keys": {"name": "ana"},
    "/organization/admin_api_keys": {"name": "ana"},
    "/organization/budgets": {"team": "mine", "tokens_per_day": 5},
    "/organization/projects/{project_id}/spend_limit": {
        "currency": "USD",
        "interval": "month",
        "threshold_amount": 500,
    },
    "/conversations/{conversation_id}": {"metadata": {}},
    "/conversations/{conversation_id}/items": {"items": []},
    "/rerank": {"model": "small", "query": "hello", "documents": ["world", {"text": "hello"}]},
    "/v2/rerank": {"model": "small", "query": "hello", "documents": ["world", {"text": "hello"}]},
    "/score": {"model": "small", "text_1": "hello", "text_2": ["world"], "queries": None, "documents": None},
    **{path: {"model": "remote"} for path in MEDIA},
    "/tokenize": {"model": "small", "prompt": "hello", "messages": None, "special_tokens": None},
    "/detokenize": {"model": "small", "tokens": [10]},
    "/apply-template": {"model": "small", "messages": [{"role": "user", "content": "hello"}]},
    "/completion": {"model": "small", "prompt": "hello", "logit_bias": None},
    "/invocations": {"model": "small", "prompt": "hello"},
    "/api/chat": {"model": "small", "messages": [{"role": "user", "content": "hello"}]},
    "/api/generate": {"model": "small", "prompt": "hello", "raw": None},
    "/api/embed": {"model": "small", "input": ["hello"], "dimensions": None},
    "/api/embeddings": {"model": "small", "prompt": "hello"},
    "/nodes": {"id": "big", "url": "http://big:8000"},
}
KEY = ApiKey("sk-1", priority="normal")
ADMIN = ApiKey("sk-1", priority="normal", role="admin")
STORED = StoredKey(id="mine", name="ana", secrets=(Secret("0" * 64, "sk-…0"),), created_at=1.0, team="mine")
WITH_KEY = {"Authorization": "Bearer sk-1"}


def script(job):
    """Play the response of a local model, text or a vector, or the relayed response of another server."""
    if job.embed:
        return embedded(job)
    if job.relay is None:
        return hello_world(job)
    if job.relay.media is not None:
        return media_answered(b"{}")(job)
    if job.relay.passthrough is not None:
        return answered(b"one", headers={"content-type": "*/*"})(job)
    return remote_responses.event_stream(job) if job.relay.stream else remote_responses.complete_response(job)


def values_for() -> Values:
    named = {
        "model": st.sampled_from(["small", "small", "tiny"]) | st.sampled_from(["nothing", ""]),
        "priority": st.sampled_from(["high", "low", 0, 1, -1]) | ANYTHING,
        "url": st.sampled_from(["http://127.0.0.1:1", "http://[", "ftp://x", ""]),
    }
    return Values(COMPONENTS, named)


def bodies_for(method: str, path: str) -> st.SearchStrategy[bytes]:
    """Return bodies that the document allows, others that it does not, and some that are not JSON."""
    operation = DOCUMENT["paths"][path][method.lower()]
    if "requestBody" not in operation:
        return st.just(b"")
    if "application/json" not in operation["requestBody"]["content"]:  # a form, which has tests of its own
        return st.binary(max_size=20)
    right = values_for().of(operation["requestBody"]["content"]["application/json"]["schema"])
    needed = GOOD.get(path.removeprefix("/v1"), {})
    valid = right.map(lambda value: {**value, **needed})
    written = st.one_of(st.just(needed), valid, valid, right, invalidated(right), ANYTHING).map(
        lambda value: json.dumps(value).encode()
    )
    return st.one_of(written, written, written, st.binary(max_size=20))


def addressed(path: str) -> st.SearchStrategy[str]:
    """Return the path with names for its parameters, of existing things and of others."""
    if path == UPSTREAM:
        return st.sampled_from(["remote", "remote", "small", "nothing"]).map(
            lambda name: f"/upstream/{name}/x"
        )
    if "{budget_id}" in path:
        return st.sampled_from([id_of("team:mine"), "budget-0"]).map(
            lambda name: path.replace("{budget_id}", name)
        )
    if "{conversation_id}" in path:
        names = st.sampled_from(["conv_mine", "conv_mine", "conv_other", "mine"])
        return names.map(lambda name: re.sub(r"\{\w+\}", name, path))
    names = st.sampled_from(["small", "tiny", "best", "big", "mine", "org/model", "a%20b", "%E6%A8%A1"])
    return names.map(lambda name: re.sub(r"\{\w+\}", lambda _match: name, path))


def queries_for(method: str, path: str) -> st.SearchStrategy[str]:
    parameters = DOCUMENT["paths"][path][method.lower()].get("parameters", [])
    if not any(parameter["in"] == "query" for parameter in parameters):
        return st.just("")
    if any(parameter["name"] == "start_time" for parameter in parameters):
        return st.sampled_from(
            ["?start_time=1", "?start_time=1", "?start_time=1&limit=2", "?start_time=x", ""]
        )
    return st.sampled_from(
        ["", "?model=small", "?model=remote", "?model=nothing", "?model=", "?model=%ff", "?unknown=1"]
    )


def client_for(model, path, *, keys=()):
    if path.endswith(("/embeddings", "/embed", "/rerank", "/score")):
        model = dataclasses.replace(model, embedding=EmbeddingSettings(4, normalized=False))
    node = NodeStatus(
        id="big",
        kind="remote",
        models=("remote",),
        state="up",
        seats=4,
        busy=0,
        remote=RemoteDetails(url="http://big:8000"),
    )
    fleet = FakeFleet(["small"], ["remote"], node_statuses=[node])
    if path == UPSTREAM:
        fleet.statuses = [msgspec.structs.replace(status, kind="command") for status in fleet.models()[1:]]
    totals = DispatchStatistics(2, 1, 100, 1, mean_wait_s=0.5, mean_service_s=2.0)
    store = FakeStore()
    client = client_of(
        model,
        *keys,
        fleet=fleet,
        gateway_script=script,
        queue_statistics=lambda: msgspec.structs.asdict(totals),
        store=store,
    )
    client.store = store

    async def cancel(request_id, _by, **_options):
        return request_id == "mine"

    client.gateway.cancel = cancel
    return client


def check_is_documented(method: str, path: str, reply) -> None:
    """Fail unless the answer's status, media type and body are in the document."""
    responses = DOCUMENT["paths"][path][method.lower()]["responses"]
    assert str(reply.status) in responses, f"{reply.status} {reply.body[:300]}"
    content = responses[str(reply.status)]["content"]
    media = reply.headers["content-type"].partition(";")[0]
    if "*/*" in content:
        return
    assert media in content
    if media == "application/json":
        json_validator(method, path, str(reply.status)).validate(reply.json)


@cache
def json_validator(method: str, path: str, status: str) -> jsonschema.Draft202012Validator:
    content = DOCUMENT["paths"][path][method.lower()]["responses"][status]["content"]
    schema = {**content["application/json"].get("schema", {}), "components": {"schemas": COMPONENTS}}
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_every_response_to_a_generated_request_is_documented(model, method, path):
    statuses = set()
    # Keys of administrators belong to no project.
    role = "admin" if "/admin_api_keys" in path else "user"
    stored = msgspec.structs.replace(STORED, role=role)
    key = ADMIN if "/organization/" in path else KEY
    clients = {keys: client_for(model, path, keys=keys) for keys in ((), (key,))}

    def explore(examples):
        @settings(max_examples=examples)
        @given(
            body=bodies_for(method, path),
            at=addressed(path),
            query=queries_for(method, path),
            keys=st.sampled_from([(key,), (key,), ()] if key is ADMIN else [(), (), (key,)]),
            headers=st.sampled_from([WITH_KEY, {}, WITH_KEY, {**WITH_KEY, "Origin": "https://evil.example"}]),
        )
        def check_response(body, at, query, keys, headers):
            async def send():
                if path.removeprefix("/v1").startswith("/responses/"):
                    await stored_as("mine", clients[keys], headers=WITH_KEY)
                if "{conversation_id}" in path:
                    await conversation_as("conv_mine", "conv_mine", clients[keys], headers=WITH_KEY)
                if "/organization/" in path:
                    await clients[keys].store.change_key(AddKey(stored))
                    await clients[keys].store.change_budget(SetBudget("team:mine", Budget(cost_per_month=5)))
                return await clients[keys].send(method, at + query, body, headers=headers)

            reply = trio.run(send)
            check_is_documented(method, path, reply)
            statuses.add(reply.status)

        check_response()

    documented = set(map(int, DOCUMENT["paths"][path][method.lower()]["responses"]))
    valid = {status for status in documented if status < 300} or documented & {501}
    if re.search(r"/(files|batches)\b", path):  # without a folder for them
        valid |= documented & {501}
    explore(settings.default.max_examples // 5)
    if not statuses & valid:  # few requests name what exists
        explore(2 * settings.default.max_examples)
    assert statuses & valid, f"no request succeeded: {statuses}"


@pytest.mark.parametrize(
    ("method", "path"), [("DELETE", "/nodes/{node_id}"), ("POST", "/nodes/{node_id}/drain")]
)
async def test_refusal_to_change_the_node_of_a_local_model_is_documented(model, method, path):
    reply = await client_for(model, path).send(method, path.replace("{node_id}", "engine:small"), b"")
    assert (reply.status, reply.error["param"]) == (400, "id")
    check_is_documented(method, path, reply)


def documented(path: str) -> set[str]:
    """Return the documented methods of a path, which may match more than one path of the document."""
    found = set()
    for template, methods in DOCUMENT["paths"].items():
        if re.fullmatch(re.sub(r"\{\w+\}", ".+", template), path):
            found |= {method.upper() for method in methods}
    return found | {"OPTIONS"} | ({"HEAD"} if "GET" in found else set())


@pytest.mark.parametrize("path", sorted({path for _, path in OPERATIONS}))
async def test_other_methods_get_405_and_the_list_of_those_that_are_allowed(model, path):
    client = client_for(model, path)
    path = re.sub(r"\{\w+\}", "small", path)
    allowed = documented(path)
    for method in METHODS:
        reply = await client.send(method, path, b"{}")
        if method in allowed:
            assert reply.status != 405
            continue
        assert (method, reply.status) == (method, 405)
        if method != "HEAD" and path.startswith("/api/"):  # Ollama's errors have only a message
            assert reply.error == "this route has other methods"
        elif method != "HEAD":
            assert reply.error["code"] == "method_not_allowed"
        assert reply.headers["allow"] == ", ".join(sorted(allowed))


@pytest.mark.parametrize("path", sorted({path for _, path in OPERATIONS}))
async def test_options_lists_the_methods_and_head_is_get_without_its_body(model, path):
    client = client_for(model, path)
    path = re.sub(r"\{\w+\}", "small", path)
    reply = await client.send("OPTIONS", path, b"")
    assert (reply.status, reply.body) == (200, b"")
    assert set(reply.headers["allow"].split(", ")) == documented(path)
    if "GET" in documented(path):
        head, statuses_of_operation = await client.send("HEAD", path, b""), await client.get(path)
        assert (head.status, head.headers["content-type"], head.body) == (
            statuses_of_operation.status,
            statuses_of_operation.headers["content-type"],
            b"",
        )


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
async def test_without_a_key_an_operation_is_401_unless_documented_as_open(model, method, path):
    client = client_for(model, path, keys=(KEY,))
    reply = await client.send(method, re.sub(r"\{\w+\}", "small", path), b"{}")
    is_open = DOCUMENT["paths"][path][method.lower()].get("security") == []
    assert (reply.status != 401) == is_open
    check_is_documented(method, path, reply)
