"""The Files and Batch API of a whole application, whose gateway follows a script."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from fairlead.base.config import (
    ROLES,
    ApiKey,
    BatchesConfig,
    Budget,
    BudgetsConfig,
    Config,
    KeyLimits,
    ModelConfig,
    Price,
)
from fairlead.base.errors import Displaced, NodeFailed
from fairlead.base.job import Delta, Job
from fake_fleet import FakeFleet
from server.batches.played import ENDPOINT
from server.routes.conftest import Client, FakeGateway, Reply, hello_world
from server.routes.responses_client import running
from server.routes.role_matrix import KEYS, OTHER, call_of, header_of, owned

ANA, BEN = ApiKey("sk-ana", user="ana"), ApiKey("sk-ben", user="ben")
MESSAGES = [{"role": "user", "content": "hello"}]
BODIES = {
    ENDPOINT: {"messages": MESSAGES},
    "/v1/completions": {"prompt": "hello"},
    "/v1/responses": {"input": "hello"},
}


def bearer(key: ApiKey) -> dict[str, str]:
    return {"Authorization": f"Bearer {key.key}"}


def line(custom_id: str, url: str = ENDPOINT, **fields: Any) -> dict[str, Any]:
    body = {"model": "small", **BODIES.get(url, {}), **fields}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


class Batches:
    """A client with a key, in its application."""

    def __init__(self, client: Client, key: ApiKey = ANA) -> None:
        self.client = client
        self.headers = bearer(key)

    async def upload(self, content: bytes, **fields: str) -> Reply:
        parts = {"purpose": "batch", **fields}
        form = b"".join(
            b'--b\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n'
            % (name.encode(), value.encode())
            for name, value in parts.items()
        )
        form += b'--b\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'
        form += content + b"\r\n--b--\r\n"
        headers = self.headers | {"Content-Type": "multipart/form-data; boundary=b"}
        return await self.client.send("POST", "/v1/files", form, headers=headers)

    async def create(self, *lines: Any, endpoint: str = ENDPOINT, **fields: Any) -> Reply:
        content = b"\n".join(each if isinstance(each, bytes) else json.dumps(each).encode() for each in lines)
        file = await self.upload(content)
        assert file.status == 200, file.body
        body = {"input_file_id": file.json["id"], "endpoint": endpoint, "completion_window": "24h", **fields}
        return await self.client.post("/v1/batches", body, headers=self.headers)

    async def get(self, path: str) -> Reply:
        return await self.client.get(path, headers=self.headers)

    async def ended(self, *lines: Any, **options: Any) -> Any:
        """Return a batch at its end."""
        created = await self.create(*lines, **options)
        assert created.status == 200, created.body
        return await self.end_of(created.json["id"])

    async def end_of(self, batch_id: str) -> Any:
        with trio.fail_after(20):
            while True:
                batch = (await self.get(f"/v1/batches/{batch_id}")).json
                if batch["status"] in ("completed", "failed", "cancelled", "expired"):
                    return batch
                await trio.sleep(0.02)

    async def results(self, file_id: str | None) -> dict[str, Any]:
        """Return the results in a file, by custom id."""
        if file_id is None:
            return {}
        content = await self.get(f"/v1/files/{file_id}/content")
        lines = [json.loads(each) for each in content.body.splitlines()]
        assert len({each["custom_id"] for each in lines}) == len(lines)
        return {each["custom_id"]: each for each in lines}


@pytest.fixture
def opened(client_with, tmp_path):
    """Return a function that opens an application with batches."""

    @asynccontextmanager
    async def open_client(
        *keys: ApiKey, script: Any = None, fleet: Any = None, **settings: Any
    ) -> AsyncIterator[Batches]:
        keys = keys or (ANA, BEN)
        config = Config(
            models=(ModelConfig(path=Path(), name="small"),),
            api_keys=keys,
            batches=BatchesConfig(folder=str(tmp_path / "batches"), **settings),
        )
        client = client_with(
            *keys, config=config, gateway_script=script, **({} if fleet is None else {"fleet": fleet})
        )
        async with running(client):
            with trio.fail_after(20):
                while not (tmp_path / "batches" / "batches").exists():  # noqa: ASYNC110
                    await trio.sleep(0.01)
            yield Batches(client)

    return open_client


@pytest.mark.parametrize("endpoint", BODIES)
async def test_batch_has_an_answer_for_each_line_in_idle_seats_of_the_lowest_class(opened, endpoint):
    async with opened() as batches:
        lines = [line(f"id-{index}", endpoint) for index in range(5)]
        batch = await batches.ended(*lines, endpoint=endpoint, metadata={"run": "1"})
        assert (batch["status"], batch["errors"], batch["metadata"]) == ("completed", None, {"run": "1"})
        assert batch["request_counts"] == {"total": 5, "completed": 5, "failed": 0}
        found = await batches.results(batch["output_file_id"])
        assert sorted(found) == [each["custom_id"] for each in lines]
        for result in found.values():
            assert (result["response"]["status_code"], result["error"]) == (200, None)
            assert "Hello world" in json.dumps(result["response"]["body"])
        for job in batches.client.gateway.jobs:
            assert (job.when_idle, job.priority, job.tenant) == (True, 2, "batch:ana")


async def test_refused_lines_are_in_the_error_file_with_their_statuses(opened):
    lines = [
        line("good"),
        line("unknown", model="absent"),
        line("stream", stream=True),
        line("empty", messages=[]),
    ]
    async with opened() as batches:
        batch = await batches.ended(*lines)
        assert batch["request_counts"] == {"total": 4, "completed": 1, "failed": 3}
        errors = await batches.results(batch["error_file_id"])
        found = {name: each["response"] for name, each in errors.items()}
        assert {name: each["status_code"] for name, each in found.items()} == {
            "unknown": 404,
            "stream": 400,
            "empty": 400,
        }
        assert found["unknown"]["body"]["error"]["code"] == "model_not_found"
        assert found["stream"]["body"]["error"]["param"] == "stream"


@pytest.mark.parametrize(
    ("lines", "code", "number"),
    [
        ([line("a"), line("a")], "duplicate_custom_id", 2),
        ([line("a"), b"{"], "invalid_json_line", 2),
        ([line("a", "/v1/completions")], "mismatched_endpoint", 1),
        ([line("a") | {"method": "GET"}], "invalid_method", 1),
        ([line("a") | {"body": []}], "invalid_body", 1),
        ([line("")], "invalid_custom_id", 1),
        ([{"custom_id": "a"}], "invalid_request", 1),
        ([b"[" * 100_000], "invalid_request", 1),
        ([b"\xff"], "invalid_json_line", 1),
        ([b""], "empty_file", None),
        ([line(str(index)) for index in range(6)], "too_many_requests", None),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_batch_of_an_invalid_file_fails_with_the_reason_and_runs_nothing(opened, lines, code, number):
    async with opened(lines=5) as batches:
        batch = await batches.ended(*lines)
        assert batch["status"] == "failed"
        (fault,) = batch["errors"]["data"]
        assert (fault["code"], fault["line"]) == (code, number)
        assert batches.client.gateway.jobs == []


async def test_cancelled_batch_keeps_the_results_that_it_has(opened):
    def script(job: Job) -> Any:
        return hello_world(job) if job.request_id.endswith("-0") else [None]

    async with opened(script=script) as batches:
        created = (await batches.create(*(line(f"id-{index}") for index in range(3)))).json
        path = f"/v1/batches/{created['id']}"
        with trio.fail_after(20):
            while (await batches.get(path)).json["request_counts"]["completed"] < 1:  # noqa: ASYNC110
                await trio.sleep(0.02)
        in_use = await batches.client.send(
            "DELETE", f"/v1/files/{created['input_file_id']}", b"", headers=batches.headers
        )
        assert (in_use.status, in_use.error["code"]) == (409, "conflict")
        cancelled = await batches.client.post(f"{path}/cancel", b"", headers=batches.headers)
        assert (cancelled.status, cancelled.json["status"]) == (200, "cancelling")
        batch = await batches.end_of(created["id"])
        assert batch["status"] == "cancelled"
        assert list(await batches.results(batch["output_file_id"])) == ["id-0"]
        again = await batches.client.post(f"{path}/cancel", b"", headers=batches.headers)
        assert again.status == 400


async def test_line_whose_seat_was_needed_or_whose_node_failed_once_runs_again(opened):
    tries: list[str] = []

    def script(job: Job) -> Any:
        tries.append(job.request_id)
        if tries.count(job.request_id) == 1:
            return [Displaced("another request needs the seat")]
        if tries.count(job.request_id) == 2:
            return [NodeFailed("gone")]
        return hello_world(job)

    async with opened(script=script) as batches:
        batch = await batches.ended(line("a"))
        assert (batch["status"], batch["request_counts"]["completed"], len(tries)) == ("completed", 1, 3)


async def test_line_that_is_stopped_waits_for_the_next_idle_seat_without_a_pause(opened):
    """A pause would keep a part of the lines from the idle seats."""
    tries: list[str] = []

    def script(job: Job) -> Any:
        tries.append(job.request_id)
        return [Displaced("another request needs the seat")] if len(tries) < 30 else hello_world(job)

    async with opened(script=script) as batches:
        with trio.fail_after(10):
            batch = await batches.ended(line("a"))
        assert (batch["request_counts"]["completed"], len(tries)) == (1, 30)


async def test_batch_goes_on_in_the_next_process(opened):
    blocked = {"1", "2"}

    def script(job: Job) -> Any:
        return [None] if job.request_id[-1] in blocked else hello_world(job)

    async with opened(script=script) as batches:
        created = (await batches.create(*(line(f"id-{index}") for index in range(3)))).json
        with trio.fail_after(20):
            while (await batches.get(f"/v1/batches/{created['id']}")).json["status"] != "in_progress":  # noqa: ASYNC110
                await trio.sleep(0.02)
    blocked.clear()
    async with opened(script=script) as batches:
        batch = await batches.end_of(created["id"])
        assert sorted(await batches.results(batch["output_file_id"])) == ["id-0", "id-1", "id-2"]


async def test_batch_of_a_key_that_is_gone_has_errors_and_runs_nothing(opened, tmp_path):
    async with opened(script=lambda job: [None]) as batches:
        created = (await batches.create(line("a"))).json
        with trio.fail_after(20):
            while (await batches.get(f"/v1/batches/{created['id']}")).json["status"] != "in_progress":  # noqa: ASYNC110
                await trio.sleep(0.02)
    async with opened(BEN, script=hello_world) as batches:
        state = tmp_path / "batches" / "batches" / f"{created['id']}.state"
        with trio.fail_after(20):
            while b'"status":"completed"' not in state.read_bytes():  # noqa: ASYNC110
                await trio.sleep(0.02)
        assert b'"failed":1' in state.read_bytes()
        assert batches.client.gateway.jobs == []
    files = (tmp_path / "batches" / "files").iterdir()
    (errors,) = (each for each in files if b"batch_req" in each.read_bytes())
    assert json.loads(errors.read_bytes())["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize("role", ROLES)
async def test_nobody_sees_the_files_and_batches_of_others_whatever_the_role(opened, role):
    other = ApiKey("sk-other", user="other", role=role)
    async with opened(ANA, other) as ana:
        batch = await ana.ended(line("a"))
        ben = Batches(ana.client, other)
        for path in (
            f"/v1/files/{batch['input_file_id']}",
            f"/v1/files/{batch['input_file_id']}/content",
            f"/v1/files/{batch['output_file_id']}",
            f"/v1/files/{batch['output_file_id']}/content",
            f"/v1/batches/{batch['id']}",
        ):
            assert ((await ana.get(path)).status, (await ben.get(path)).status) == (200, 404)
        for path in ("/v1/files", "/v1/batches"):
            assert ((await ana.get(path)).json["data"] != [], (await ben.get(path)).json["data"]) == (
                True,
                [],
            )
        body = {"input_file_id": batch["input_file_id"], "endpoint": ENDPOINT, "completion_window": "24h"}
        assert (await ben.client.post("/v1/batches", body, headers=ben.headers)).status == 404
        for method, path in (
            ("DELETE", f"/v1/files/{batch['input_file_id']}"),
            ("POST", f"/v1/batches/{batch['id']}/cancel"),
        ):
            assert (await ben.client.send(method, path, b"", headers=ben.headers)).status == 404


@pytest.mark.parametrize("caller", ROLES)
async def test_each_route_for_a_file_or_a_batch_knows_its_owner_whatever_the_role(opened, caller):
    async with opened(*KEYS.values(), OTHER) as batches:
        own, others = Batches(batches.client, KEYS[caller]), Batches(batches.client, OTHER)
        for parameter in ("file_id", "batch_id"):
            for route in owned(parameter):
                member = "input_file_id" if parameter == "file_id" else "id"
                ended = [await each.ended(line("a")) for each in (own, others)]
                statuses = []
                for batch in ended:
                    method, path, body = call_of(route, **{parameter: batch[member]})
                    reply = await batches.client.send(method, path, body, headers=header_of(caller))
                    statuses.append(reply.status)
                expected = 400 if route.path.endswith("/cancel") else 200  # it has ended
                assert statuses == [expected, 404], route.path


async def test_files_are_listed_in_pages_and_deleted(opened):
    async with opened() as batches:
        ids = {(await batches.upload(b"{}\n")).json["id"] for _ in range(3)}
        first = (await batches.get("/v1/files?limit=2")).json
        rest = (await batches.get(f"/v1/files?limit=2&after={first['last_id']}")).json
        assert (first["has_more"], rest["has_more"]) == (True, False)
        assert {file["id"] for file in first["data"] + rest["data"]} == ids
        for file_id in ids:
            deleted = await batches.client.send(
                "DELETE", f"/v1/files/{file_id}", b"", headers=batches.headers
            )
            assert deleted.json == {"id": file_id, "object": "file", "deleted": True}
            assert (await batches.get(f"/v1/files/{file_id}")).status == 404


@pytest.mark.parametrize("name", ["../../x", "file-", "file-" + "g" * 32, "lock", "%2e%2e%2flock"])
async def test_id_that_is_none_is_not_found(opened, name):
    async with opened() as batches:
        for path in (f"/v1/files/{name}", f"/v1/files/{name}/content", f"/v1/batches/{name}"):
            assert (await batches.get(path)).status == 404


async def test_upload_beyond_the_tenants_bytes_is_refused_and_leaves_nothing(opened, tmp_path):
    async with opened(tenant_bytes=10_000) as batches:
        assert (await batches.upload(b"x" * 5000)).status == 200
        refused = await batches.upload(b"x" * 6000)
        assert (refused.status, refused.error["code"]) == (413, "storage_full")
        assert (await Batches(batches.client, BEN).upload(b"x" * 6000)).status == 200
    assert len(list((tmp_path / "batches" / "files").iterdir())) == 4


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/messages"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {str(index): "" for index in range(17)}}, "metadata"),
    ],
)
async def test_invalid_batch_is_refused_with_the_field(opened, fields, param):
    async with opened() as batches:
        refused = await batches.create(line("a"), **fields)
        assert (refused.status, refused.error["param"]) == (400, param)


async def test_file_for_another_purpose_is_refused(opened):
    async with opened() as batches:
        refused = await batches.upload(b"{}", purpose="fine-tune")
        assert (refused.status, refused.error["param"]) == (400, "purpose")


async def test_without_a_folder_files_and_batches_are_not_served(client_with):
    client = client_with()
    assert isinstance(client.gateway, FakeGateway)
    for path in ("/v1/files", "/v1/batches"):
        reply = await client.get(path)
        assert reply.status == 501
        assert "batches.folder" in reply.error["message"]


# What batches cost -----------------------------------------------------------------------------------


def eight(custom_id: str) -> Any:
    """Return a line of eight tokens: four of the prompt, and four of the answer."""
    return line(custom_id, "/v1/completions", prompt=[1, 2, 3, 4])


@pytest.mark.parametrize(
    ("budget", "discounts", "completed"),
    [
        (Budget(tokens_per_day=11), {}, 1),
        (Budget(tokens_per_day=11), {"batch_discount": 0.5}, 3),
        (Budget(cost_per_day=11e-6), {}, 1),
        (Budget(cost_per_day=11e-6), {"price": 0.5}, 3),
        (Budget(cost_per_day=11e-6), {"price": 1}, 4),
    ],
)
async def test_lines_of_batches_count_for_the_budgets_of_key_and_user_with_their_discount(
    opened, budget, discounts, completed
):
    price = Price(1, 1, batch_discount=discounts.get("price", 0.0))
    budgets = BudgetsConfig(users={"ana": budget}, batch_discount=discounts.get("batch_discount", 0.0))
    fleet = FakeFleet(["small"], prices={"small": price}, budgets=budgets)
    key = ApiKey("sk-ana", user="ana", limits=KeyLimits(concurrent=2))  # one line at a time
    async with opened(key, fleet=fleet) as batches:
        created = await batches.create(*(eight(f"id-{n}") for n in range(4)), endpoint="/v1/completions")
        path = f"/v1/batches/{created.json['id']}"
        with trio.fail_after(20):
            while len(batches.client.gateway.jobs) < completed:  # noqa: ASYNC110
                await trio.sleep(0.02)
        await trio.sleep(0.3)  # the others wait until the budget renews
        assert len(batches.client.gateway.jobs) == completed
        await batches.client.post(f"{path}/cancel", b"", headers=batches.headers)
        assert (await batches.end_of(created.json["id"]))["status"] in ("cancelled", "completed")


async def test_line_that_was_stopped_is_paid_once(opened):
    tries: list[str] = []

    def script(job: Job) -> Any:
        tries.append(job.request_id)
        if len(tries) <= 3:
            return [[Delta(0, "half", [1])], Displaced("another request needs the seat")]
        return hello_world(job)

    budgets = BudgetsConfig(users={"ana": Budget(tokens_per_day=10)})
    async with opened(script=script, fleet=FakeFleet(["small"], budgets=budgets)) as batches:
        batch = await batches.ended(eight("a"), endpoint="/v1/completions")
        assert (batch["request_counts"]["completed"], len(tries)) == (1, 4)
        body = {"model": "small", "prompt": [1, 2, 3]}
        refused = await batches.client.post("/v1/completions", body, headers=batches.headers)
        assert refused.status == 429, "the line has spent 8 of 10 tokens"
        body["prompt"] = [1, 2]
        assert (await batches.client.post("/v1/completions", body, headers=batches.headers)).status == 200
