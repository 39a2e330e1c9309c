"""`GET /metrics` through the application, and what is counted of requests that never became jobs."""

import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families

from fairlead.config import ApiKey
from fairlead.errors import QueueFull

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
    assert (200, "text/plain") == (reply.status, reply.headers["content-type"].partition(";")[0])
    names = {family.name for family in text_string_to_metric_families(reply.body.decode())}
    assert {"fairlead_queue_waiting_jobs", "fairlead_model_seats", "process_cpu_seconds"} <= names


async def test_openmetrics_can_be_asked_for(client):
    reply = await client.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert "application/openmetrics-text" == reply.headers["content-type"].partition(";")[0]
    assert reply.body.endswith(b"# EOF\n")


async def test_metrics_want_a_key_where_there_are_keys(client_with):
    client = client_with(ApiKey("sk-1"))
    assert 401 == (await client.get("/metrics")).status
    assert 200 == (await client.get("/metrics", headers={"Authorization": "Bearer sk-1"})).status


async def test_what_never_became_a_job_is_counted_by_its_code_and_written_down_once(client, chat, log):
    await client.post("/v1/chat/completions", b"{")
    await client.post("/v1/chat/completions", chat(model="none"))
    await client.post("/v1/chat/completions", chat(n=1000))
    await client.get("/nowhere")
    await client.get("/v1/chat/completions")
    text = (await client.get("/metrics")).body.decode()
    assert {"invalid_request": 2, "model_not_found": 1, "not_found": 1, "method_not_allowed": 1} == refusals(
        text
    )
    lines = [entry for entry in log if entry["event"] == "request refused"]
    assert ["invalid_request", "model_not_found", "invalid_request", "not_found", "method_not_allowed"] == [
        line["outcome"] for line in lines
    ]
    assert all(line["request_id"] and line["status"] for line in lines)


async def test_what_the_gateway_refuses_is_the_gateways_to_count(client, chat, log):
    client.gateway.refusal = QueueFull("full")
    assert 429 == (await client.post("/v1/chat/completions", chat())).status
    assert 429 == (await client.post("/v1/chat/completions", chat(stream=True))).status
    assert {} == refusals((await client.get("/metrics")).body.decode())
    assert [] == [entry for entry in log if entry["event"] == "request refused"]


async def test_a_bug_of_ours_is_counted_and_its_traceback_is_its_only_line(client_with, log):
    def broken():
        raise RuntimeError("a bug")

    client = client_with(problems=broken)
    assert 500 == (await client.get("/health")).status
    assert ["unexpected error"] == [entry["event"] for entry in log]
    assert {"internal_error": 1} == refusals((await client.get("/metrics")).body.decode())


async def test_a_job_carries_its_clients_trace(client, chat):
    await client.post("/v1/chat/completions", chat(), headers={"traceparent": "00-aa-bb-01"})
    assert "00-aa-bb-01" == client.gateway.job.traceparent


async def test_many_who_ask_at_once_all_get_the_whole(client):
    replies = []

    async def ask() -> None:
        replies.append(await client.get("/metrics"))

    async with trio.open_nursery() as askers:
        for _ in range(10):
            askers.start_soon(ask)
    assert {True} == {reply.whole and reply.status == 200 for reply in replies}
