"""Small routes that clients of other servers call before anything else."""

import pytest

from server.routes.conftest import client_of


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_ping_is_health(client, method):
    reply = await client.send(method, "/ping", b"")
    assert (reply.status, reply.json["status"]) == (200, "ok")


async def test_load_counts_waiting_and_running_requests(model):
    counts = {"waiting": 2, "running": 3}
    reply = await client_of(model, queue_statistics=lambda: counts).get("/load")
    assert (reply.status, reply.json) == (200, {"server_load": 5})


@pytest.mark.parametrize(
    ("agent", "kind"),
    [
        ("ollama-python/0.6.1 (x86_64 linux) Python/3.11", "text/plain"),
        ("ollama/0.13.0 (amd64 linux) Go/go1.24", "text/plain"),
        ("Mozilla/5.0", "text/html"),
        ("curl/8.5", "text/html"),
    ],
)
async def test_clients_of_ollama_recognize_the_server(client, agent, kind):
    reply = await client.get("/", headers=[("User-Agent", agent)])
    assert reply.status == 200
    assert reply.headers["content-type"].startswith(kind)
    assert (reply.body == b"Ollama is running") == (kind == "text/plain")


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
async def test_minus_one_is_no_limit_of_an_answers_length(client, limit):
    body = {"messages": [{"role": "user", "content": "hello"}]}
    assert (await client.post("/v1/chat/completions", body)).status == 200
    usual = client.gateway.jobs[-1].sampling.max_tokens
    assert (await client.post("/v1/chat/completions", {**body, limit: -1})).status == 200
    assert client.gateway.jobs[-1].sampling.max_tokens == usual
    refused = await client.post("/v1/chat/completions", {**body, limit: 0})
    assert (refused.status, refused.error["param"]) == (400, limit)
