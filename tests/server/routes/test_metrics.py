"""`GET /metrics` through the application, and the count of requests that never became jobs."""

import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families

from fairlead.base.config import ApiKey
from fairlead.base.errors import QueueFull

pytestmark = pytest.mark.usefixtures("autojump_clock")


def refusals(text: str) -> dict[str, float]:
    return {
        sample.labels["code"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "fairlead_requests_refused_total"
    }


async def test_metrics_are_in_prometheus_text_format(client):
    reply = await client.get("/metrics")
    assert (reply.status, reply.headers["content-type"].partition(";")[0]) == (200, "text/plain")
    names = {family.name for family in text_string_to_metric_families(reply.body.decode())}
    assert {"fairlead_queue_waiting_jobs", "fairlead_model_seats", "process_cpu_seconds"} <= names


async def test_openmetrics_format_can_be_requested(client):
    reply = await client.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert reply.headers["content-type"].partition(";")[0] == "application/openmetrics-text"
    assert reply.body.endswith(b"# EOF\n")


async def test_metrics_need_a_key_if_keys_are_configured(client_with):
    client = client_with(ApiKey("sk-1"))
    assert (await client.get("/metrics")).status == 401
    assert (await client.get("/metrics", headers={"Authorization": "Bearer sk-1"})).status == 200


async def test_request_that_never_became_a_job_is_counted_by_code_and_logged_once(client, chat, log):
    await client.post("/v1/chat/completions", b"{")
    await client.post("/v1/chat/completions", chat(model="none"))
    await client.post("/v1/chat/completions", chat(n=1000))
    await client.get("/nowhere")
    await client.get("/v1/chat/completions")
    text = (await client.get("/metrics")).body.decode()
    assert refusals(text) == {
        "invalid_request": 2,
        "model_not_found": 1,
        "not_found": 1,
        "method_not_allowed": 1,
    }
    lines = [entry for entry in log if entry["event"] == "request refused"]
    assert [line["outcome"] for line in lines] == [
        "invalid_request",
        "model_not_found",
        "invalid_request",
        "not_found",
        "method_not_allowed",
    ]
    assert all(line["request_id"] and line["status"] for line in lines)


async def test_refusal_by_the_gateway_is_not_counted_here(client, chat, log):
    client.gateway.refusal = QueueFull("full")
    assert (await client.post("/v1/chat/completions", chat())).status == 429
    assert (await client.post("/v1/chat/completions", chat(stream=True))).status == 429
    assert refusals((await client.get("/metrics")).body.decode()) == {}
    assert [entry for entry in log if entry["event"] == "request refused"] == []


async def test_bug_is_counted_and_its_traceback_is_its_only_log_line(client_with, log):
    def broken():
        raise RuntimeError("a bug")

    client = client_with(problems=broken)
    assert (await client.get("/health")).status == 500
    assert [entry["event"] for entry in log] == ["unexpected error"]
    assert refusals((await client.get("/metrics")).body.decode()) == {"internal_error": 1}


async def test_job_has_its_clients_traceparent(client, chat):
    await client.post("/v1/chat/completions", chat(), headers={"traceparent": "00-aa-bb-01"})
    assert client.gateway.job.traceparent == "00-aa-bb-01"


async def test_concurrent_requests_all_get_complete_metrics(client):
    replies = []

    async def send_request() -> None:
        replies.append(await client.get("/metrics"))

    async with trio.open_nursery() as askers:
        for _ in range(10):
            askers.start_soon(send_request)
    assert {reply.is_complete and reply.status == 200 for reply in replies} == {True}
