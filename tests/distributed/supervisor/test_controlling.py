"""Who may control the fleet through fronts, and whom the dispatcher's log names."""

import json
import time
from math import ceil

import httpx
import pytest
import trio

from distributed.supervisor.composed import MODEL, SLOW, composed
from fairlead.base.config import (
    ROLES,
    ApiKey,
    BatchesConfig,
    Budget,
    BudgetsConfig,
    NodeConfig,
    Price,
    ResponsesConfig,
)
from fairlead.router.quotas.access import key_id
from fairlead.server.routes.route_table import ROUTES
from server.routes.conftest import log
from server.routes.role_matrix import KEYS, OTHER, ROLE_OF, call_of, check, header_of, owned, role_of

__all__ = ["log"]

CHAT = "/v1/chat/completions"
PATH = "/v1/organization/api_keys"
BUDGETS = "/v1/organization/budgets"
ORGANIZATION = [route for route in ROUTES if route.tag == "organization"]
CONTROLLED = [
    route for route in ROUTES if (route.method, route.path) in ROLE_OF and route not in ORGANIZATION
]


def chat(content: str = "hello") -> dict[str, object]:
    return {"model": MODEL, "messages": [{"role": "user", "content": content}]}


async def test_every_route_of_a_front_answers_401_or_403_unless_the_key_has_the_role(tmp_path):
    running = composed(tmp_path, *KEYS.values(), store=str(tmp_path / "fairlead.db"))
    async with running as server, server.client() as client:
        await wait_for_keys(client)
        for route in ROUTES:
            method, path, body = call_of(route, node_url=server.model_url)
            for caller in (None, *ROLES):
                await ensure_node(server)
                if (method, path) == ("POST", "/nodes"):
                    await server.fleet.remove_node("big")
                async with client.stream(method, path, content=body, headers=header_of(caller)) as reply:
                    text = b"" if path == "/events" else await reply.aread()
                check(caller, role_of(route), reply.status_code, text)
                is_list = route in ORGANIZATION and not route.parameters
                if (route in CONTROLLED or is_list) and caller == "admin":
                    assert reply.status_code == route.status, (path, text)


async def wait_for_keys(client) -> None:
    """Wait until a front has the keys of the store."""
    with trio.fail_after(20):
        while (await client.get("/v1/models", headers={"Authorization": "Bearer x"})).status_code != 401:  # noqa: ASYNC110
            await trio.sleep(0.05)


async def test_change_of_a_key_is_in_force_in_every_front_when_it_is_answered(tmp_path):
    running = composed(tmp_path, *KEYS.values(), fronts=2, store=str(tmp_path / "fairlead.db"))
    async with running as server:
        clients = [httpx.AsyncClient(base_url=url, timeout=30) for url in server.urls]
        for client in clients:
            await wait_for_keys(client)
        for number in range(6):
            one, other = clients[number % 2], clients[1 - number % 2]
            made = await one.post(PATH, json={"name": "ana", "user": "ana"}, headers=header_of("admin"))
            key = made.json()
            headers = {"Authorization": f"Bearer {key['value']}"}
            assert (await other.get("/v1/models", headers=headers)).status_code == 200
            assert (await other.delete(f"{PATH}/{key['id']}", headers=header_of("admin"))).status_code == 200
            assert (await one.get("/v1/models", headers=headers)).status_code == 401
        for client in clients:
            await client.aclose()


async def test_change_of_a_budget_is_in_force_in_every_front_when_it_is_answered(tmp_path):
    key = ApiKey("sk-ana", user="ana", team="research")
    running = composed(tmp_path, *KEYS.values(), key, fronts=2, store=str(tmp_path / "fairlead.db"))
    async with running as server:
        clients = [server.client(front) for front in (0, 1)]
        for client in clients:
            await wait_for_keys(client)

        async def status(client) -> int:
            return (await client.post(CHAT, json=chat(), headers=bearer(key.key))).status_code

        assert [await status(client) for client in clients] == [200, 200]
        await trio.sleep(2)  # until what they have used is in the store
        for number in range(4):
            one, other = clients[number % 2], clients[1 - number % 2]
            owner = {"user": "ana"} if number < 2 else {"team": "research"}
            made = await one.post(BUDGETS, json=owner | {"tokens_per_day": 3}, headers=header_of("admin"))
            assert made.status_code == 200, made.text
            assert [await status(client) for client in (other, one)] == [429, 429]
            path = f"{BUDGETS}/{made.json()['id']}"
            assert (await other.delete(path, headers=header_of("admin"))).status_code == 200
            assert [await status(client) for client in (one, other)] == [200, 200]
        for client in clients:
            await client.aclose()


async def test_what_was_spent_before_a_budget_was_set_counts(tmp_path):
    key = ApiKey("sk-ana", user="ana")
    running = composed(tmp_path, *KEYS.values(), key, fronts=2, store=str(tmp_path / "fairlead.db"))
    async with running as server, server.client(0) as client, server.client(1) as other:
        await wait_for_keys(client)
        for _ in range(3):
            assert (await client.post(CHAT, json=chat(), headers=bearer(key.key))).status_code == 200
        path = f"/v1/organization/usage/completions?start_time={int(time.time()) - 86_400}"
        used = 0
        with trio.fail_after(20):
            while used < 3:
                page = (await client.get(path, headers=bearer(key.key))).json()
                results = [each for bucket in page["data"] for each in bucket["results"]]
                used = sum(each["num_model_requests"] for each in results)
                await trio.sleep(0.05)
        spent = sum(each["input_tokens"] + each["output_tokens"] for each in results)
        body = {"user": "ana", "tokens_per_day": spent}
        assert (await client.post(BUDGETS, json=body, headers=header_of("admin"))).status_code == 200
        assert (await other.post(CHAT, json=chat(), headers=bearer(key.key))).status_code == 429
        body["tokens_per_day"] = spent + 1000
        assert (await other.post(BUDGETS, json=body, headers=header_of("admin"))).status_code == 200
        assert (await client.post(CHAT, json=chat(), headers=bearer(key.key))).status_code == 200


@pytest.mark.parametrize("caller", ROLES)
async def test_files_and_batches_belong_to_their_key_at_every_front(tmp_path, caller):
    batches = BatchesConfig(folder=str(tmp_path / "batches"))
    running = composed(tmp_path, *KEYS.values(), OTHER, fronts=2, batches=batches, store="none")
    async with running as server, server.client(0) as one, server.client(1) as another:

        async def created(headers) -> dict[str, str]:
            line = {"custom_id": "a", "method": "POST", "url": CHAT, "body": chat()}
            file = await one.post(
                "/v1/files",
                files={"file": ("in.jsonl", json.dumps(line).encode())},
                data={"purpose": "batch"},
                headers=headers,
            )
            assert file.status_code == 200, file.text
            body = {"input_file_id": file.json()["id"], "endpoint": CHAT, "completion_window": "24h"}
            batch = (await another.post("/v1/batches", json=body, headers=headers)).json()
            with trio.fail_after(20):
                while batch["status"] != "completed":
                    await trio.sleep(0.05)
                    batch = (await one.get(f"/v1/batches/{batch['id']}", headers=headers)).json()
            return {"file_id": batch["input_file_id"], "batch_id": batch["id"]}

        async def both() -> list[dict[str, str]]:
            return [await created(header_of(caller)), await created(bearer(OTHER.key))]

        pair = await both()
        routes = owned("batch_id") + owned("file_id")
        for route in sorted(routes, key=lambda route: route.method == "DELETE"):
            for client in (one, another):
                if route.method == "DELETE":
                    pair = await both()
                statuses = []
                for ids in pair:
                    method, path, body = call_of(route, **ids)
                    reply = await client.request(method, path, content=body, headers=header_of(caller))
                    statuses.append(reply.status_code)
                assert statuses == [400 if route.path.endswith("/cancel") else 200, 404], path  # it has ended
        others = pair[1]
        for path in ("/v1/files", "/v1/batches"):
            listed = (await another.get(path, headers=header_of(caller))).json()["data"]
            assert not {each["id"] for each in listed} & set(others.values())


RESPONSES, CONVERSATIONS = "/v1/responses", "/v1/conversations"
# Routes for a response or a conversation, those that remove it last.
OF_RESPONSES = sorted(
    [route for route in ROUTES if {"response_id", "conversation_id"} & set(route.parameters)],
    key=lambda route: route.method == "DELETE",
)


@pytest.mark.parametrize("caller", ROLES)
async def test_responses_and_conversations_belong_to_their_key_at_every_front(tmp_path, caller):
    running = composed(
        tmp_path,
        *KEYS.values(),
        OTHER,
        fronts=2,
        dialects=("openai",),  # so that responses are written here
        responses=ResponsesConfig(in_store=True),
        store=str(tmp_path / "fairlead.db"),
    )
    async with running as server, server.client(0) as one, server.client(1) as another:
        await wait_for_keys(one)
        await wait_for_keys(another)

        async def created(headers) -> dict[str, str]:
            body = {"model": MODEL, "input": "hello"}
            response = (await one.post(RESPONSES, json=body, headers=headers)).json()
            items = {"items": [{"role": "user", "content": "hello"}]}
            conversation = (await one.post(CONVERSATIONS, json=items, headers=headers)).json()
            path = f"{CONVERSATIONS}/{conversation['id']}/items"
            (item,) = (await another.get(path, headers=headers)).json()["data"]
            ids = {"response_id": response["id"], "conversation_id": conversation["id"]}
            return ids | {"item_id": item["id"]}

        async def both() -> list[dict[str, str]]:
            return [await created(header_of(caller)), await created(bearer(OTHER.key))]

        pair = await both()
        for route in OF_RESPONSES:
            for client in (one, another):
                if route.method == "DELETE":
                    pair = await both()
                statuses = []
                for ids in pair:
                    method, path, body = call_of(route, **ids)
                    reply = await client.request(method, path, content=body, headers=header_of(caller))
                    statuses.append(reply.status_code)
                # Only a response in the background can be cancelled.
                assert statuses == [400 if route.path.endswith("/cancel") else 200, 404], path


@pytest.mark.parametrize("caller", ROLES)
@pytest.mark.parametrize("continues", ["previous_response_id", "conversation"])
async def test_nobody_continues_the_response_or_conversation_of_others_at_any_front(
    tmp_path, caller, continues
):
    running = composed(
        tmp_path,
        *KEYS.values(),
        OTHER,
        fronts=2,
        dialects=("openai",),
        responses=ResponsesConfig(in_store=True),
        store=str(tmp_path / "fairlead.db"),
    )
    async with running as server, server.client(0) as one, server.client(1) as another:
        await wait_for_keys(one)
        await wait_for_keys(another)
        ask = {"model": MODEL, "input": "hello"}
        for headers, is_own in ((header_of(caller), True), (bearer(OTHER.key), False)):
            path, body = (RESPONSES, ask) if continues != "conversation" else (CONVERSATIONS, {})
            made = (await one.post(path, json=body, headers=headers)).json()["id"]
            for client in (one, another):
                reply = await client.post(RESPONSES, json=ask | {continues: made}, headers=header_of(caller))
                refused = 404 if continues == "conversation" else 400
                assert reply.status_code == (200 if is_own else refused), reply.text


async def test_no_user_reads_the_usage_of_another_through_any_front(tmp_path):
    running = composed(tmp_path, *KEYS.values(), OTHER, fronts=2, store=str(tmp_path / "fairlead.db"))
    async with running as server:
        clients = [httpx.AsyncClient(base_url=url, timeout=30) for url in server.urls]
        for caller, client in ((header_of("user"), clients[0]), (bearer(OTHER.key), clients[1])):
            assert (await client.post(CHAT, json=chat(), headers=caller)).status_code == 200
        path = "/v1/organization/usage/completions?start_time=0&limit=31&group_by=user_id&page=page_"
        path += str(int(time.time()) // 86_400 * 86_400 - 86_400)

        async def users(client, headers) -> set[str]:
            page = (await client.get(path, headers=headers)).json()
            return {result["user_id"] for bucket in page["data"] for result in bucket["results"]}

        with trio.fail_after(30):
            while await users(clients[0], header_of("admin")) != {"user-1", "other"}:  # noqa: ASYNC110
                await trio.sleep(0.1)
        for client in clients:
            assert await users(client, header_of("user")) == {"user-1"}
            assert await users(client, bearer(OTHER.key)) == {"other"}
            assert await users(client, header_of("operator")) == {"user-1", "other"}
            await client.aclose()


def bearer(value: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {value}"}


async def ensure_node(server) -> None:
    if not any(node.id == "big" for node in server.fleet.nodes()):
        await server.fleet.add_node(NodeConfig(id="big", url=server.model_url, models=("far",)))


EVENTS = {
    "/models/load": {"load requested"},
    "/models/unload": {"unload requested", "unloading model"},
    "/models/{name}/logs": {"log read"},
    "/nodes/{node_id}/drain": {"node drained"},
    "/nodes": {"node added"},
    "/nodes/{node_id}": {"node removed"},
}


async def test_each_change_through_a_front_is_logged_with_tenant_and_key(tmp_path, log):
    admin = KEYS["admin"]
    async with composed(tmp_path, admin, tenant_names="plain") as server, server.client() as client:
        for route in CONTROLLED:
            await ensure_node(server)
            method, path, body = call_of(route, node_url=server.model_url)
            if route.method == "POST" and path == "/nodes":
                await server.fleet.remove_node("big")
            del log[:]
            headers = header_of("admin") | {"X-Request-Id": "the-request"}
            assert (await client.request(method, path, content=body, headers=headers)).is_success
            lines = [line for line in log if line.get("key") is not None]
            assert {line["event"] for line in lines} == EVENTS[route.path], path
            for line in lines:
                named = (line["tenant"], line["key"], line["request_id"])
                assert named == ("admin-1", key_id(admin), "the-request")
            assert admin.key not in str(log)


async def test_load_that_an_operator_requests_is_logged_with_tenant_and_key_and_a_jobs_is_not(tmp_path, log):
    operator = KEYS["operator"]
    running = composed(tmp_path, operator, tenant_names="plain")
    async with running as server, server.client(key=operator.key) as client:
        for load, body in (("/models/load", {"model": MODEL}), (CHAT, chat())):
            assert (await client.post("/models/unload", json={"model": MODEL})).status_code == 200
            del log[:]
            assert (await client.post(load, json=body)).status_code == 200
            (line,) = [line for line in log if line["event"] == "loading model"]
            expected = (key_id(operator), "operator-1") if load != CHAT else (None, None)
            assert (line.get("key"), line.get("tenant")) == expected


@pytest.mark.parametrize(
    ("caller", "owner", "status"),
    [
        *((KEYS[role], KEYS[role], 200) for role in ROLES),
        (KEYS["user"], OTHER, 404),
        (KEYS["operator"], OTHER, 200),
        (KEYS["admin"], OTHER, 200),
        (ApiKey("sk-elsewhere", role="operator", models=("far",)), OTHER, 404),
    ],
    ids=lambda value: value.key if isinstance(value, ApiKey) else None,
)
async def test_request_at_another_front_is_cancelled_by_its_key_and_by_operators(
    tmp_path, log, caller, owner, status
):
    keys = {key.key: key for key in (*KEYS.values(), OTHER, caller)}
    replies = []

    async def ask(client) -> None:
        replies.append(await client.post(CHAT, json=chat(SLOW), headers={"X-Request-Id": "job-1"}))

    async with composed(tmp_path, *keys.values(), fronts=2, tenant_names="plain") as server:
        one, other = server.client(0, owner.key), server.client(1, caller.key)
        with trio.fail_after(20):
            async with one, other, trio.open_nursery() as nursery:
                nursery.start_soon(ask, one)
                while not any(node.busy for node in server.fleet.nodes()):  # noqa: ASYNC110
                    await trio.sleep(0.01)
                assert (await other.post("/v1/requests/job-1/cancel")).status_code == status
                if status == 404:
                    nursery.cancel_scope.cancel()
    assert [reply.status_code for reply in replies] == ([499] if status == 200 else [])
    lines = [line for line in log if line["event"] == "request cancelled"]
    assert [(line["cancelled"], line["key"]) for line in lines] == (
        [("job-1", key_id(caller))] if status == 200 else []
    )


async def test_node_at_a_link_local_address_is_refused_through_a_front(tmp_path):
    async with composed(tmp_path, KEYS["admin"]) as server, server.client(key=KEYS["admin"].key) as client:
        reply = await client.post("/nodes", json={"id": "x", "url": "http://169.254.169.254"})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "url")


@pytest.mark.parametrize("fronts", [1, 2])
@pytest.mark.parametrize("price_of", ["prices", "model"])
@pytest.mark.parametrize("discount", [0.0, 0.25, 1.0])
async def test_lines_of_a_batch_are_discounted_whichever_front_runs_them(
    tmp_path, fronts, price_of, discount
):
    """Compare what lines spend with what the same requests spend when a client sends them."""
    ana = ApiKey("sk-ana", user="ana")
    budget = Budget(tokens_per_day=10**6, cost_per_day=1000)
    price = Price(input=1000, output=1000, batch_discount=discount)
    running = composed(
        tmp_path,
        ana,
        KEYS["admin"],
        fronts=fronts,
        batches=BatchesConfig(folder=str(tmp_path / "batches")),
        budgets=BudgetsConfig(users={"ana": budget}, batch_discount=0.5),
        store="none",
        **({"prices": {MODEL: price}} if price_of == "prices" else {"model": {"price": price}}),
    )
    async with running as server, server.client(0) as one, server.client(fronts - 1) as another:

        async def until_spent(least: float) -> dict[str, float]:
            """Return what is spent when no job has more reserved than it costs."""
            with trio.fail_after(20):
                while True:
                    (found,) = (await another.get(BUDGETS, headers=header_of("admin"))).json()["data"]
                    used = {use["kind"]: use["used"] for use in found["uses"]}
                    if used["tokens_per_day"] >= least and not any(n.busy for n in server.fleet.nodes()):
                        return used
                    await trio.sleep(0.02)

        alike = json.dumps(chat())  # the prompt's tokens are estimated by its length
        for _ in range(4):
            assert (await one.post(CHAT, content=alike, headers=bearer(ana.key))).status_code == 200
        alone = await until_spent(4)
        line = {"method": "POST", "url": CHAT, "body": chat()}
        content = "\n".join(json.dumps(line | {"custom_id": str(number)}) for number in range(4)).encode()
        file = await one.post(
            "/v1/files",
            files={"file": ("in.jsonl", content)},
            data={"purpose": "batch"},
            headers=bearer(ana.key),
        )
        body = {"input_file_id": file.json()["id"], "endpoint": CHAT, "completion_window": "24h"}
        batch = (await another.post("/v1/batches", json=body, headers=bearer(ana.key))).json()
        with trio.fail_after(20):
            while batch["status"] != "completed":
                await trio.sleep(0.05)
                batch = (await one.get(f"/v1/batches/{batch['id']}", headers=bearer(ana.key))).json()
        tokens = 4 * ceil(alone["tokens_per_day"] / 4 * 0.5)
        both = await until_spent(alone["tokens_per_day"] + tokens)
        assert both["tokens_per_day"] == alone["tokens_per_day"] + tokens
        assert both["cost_per_day"] == pytest.approx(alone["cost_per_day"] * (2 - discount), abs=1e-8)
        assert alone["cost_per_day"] > 0


async def test_lines_of_a_batch_give_their_seats_to_a_request_at_any_front(tmp_path):
    batches = BatchesConfig(folder=str(tmp_path / "batches"))
    async with composed(tmp_path, fronts=2, batches=batches, store="none") as server:
        clients = [server.client(front) for front in (0, 1)]
        lines = [
            {"custom_id": str(number), "method": "POST", "url": CHAT, "body": chat(SLOW)}
            for number in range(40)
        ]
        content = "\n".join(map(json.dumps, lines)).encode()
        files = {"file": ("in.jsonl", content)}
        file = (await clients[0].post("/v1/files", files=files, data={"purpose": "batch"})).json()
        body = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
        assert (await clients[0].post("/v1/batches", json=body)).status_code == 200

        async def until_full() -> None:
            with trio.fail_after(20):
                while not all(node.busy == node.seats for node in server.fleet.nodes()):  # noqa: ASYNC110
                    await trio.sleep(0.01)

        for client in clients * 3:
            await until_full()
            with trio.fail_after(5):  # a line alone never ends
                assert (await client.post(CHAT, json=chat())).status_code == 200
        await until_full()
        for client in clients:
            await client.aclose()
