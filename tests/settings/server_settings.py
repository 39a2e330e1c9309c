"""Scenarios for the server as a whole, its API keys and its health checks."""

from typing import Any

import trio

from settings.cases import setting
from settings.queue_settings import RELAY_NODE, order
from settings.served import Served


def keyed(**settings: object) -> dict[str, Any]:
    return {"apiKeys": [{"key": "k1"} | settings]}


async def log_entry_of_job(server: Served, **options: object) -> dict[str, Any]:
    """Request a completion; return its log line."""
    assert (await server.complete(**options).done()).status == 200
    await trio.sleep(0.1)
    return [event for event in server.log if event["event"] == "request"][-1]


@setting("host", {"host": "10.0.0.9"})
async def server_listens_on_the_configured_address(server: Served) -> None:
    assert [host for host, _ in server.system.network.listeners] == ["10.0.0.9"]


@setting("port", {"port": 8123})
async def server_listens_on_the_configured_port(server: Served) -> None:
    assert [port for _, port in server.system.network.listeners] == [8123]


@setting("allowedHosts", {"allowedHosts": ["public.example"]})
async def server_accepts_the_configured_host_name(server: Served) -> None:
    answer = await server.fetch("/queue", headers={"Host": "public.example"})
    assert answer.status == 200, answer


@setting("trustedProxies", {"trustedProxies": ["10.0.7.0/24"]})
async def proxy_names_the_client(server: Served) -> None:
    for host in ("10.0.8.1", "10.0.7.1"):
        await server.fetch("/nothing", host=host, headers={"X-Forwarded-For": "192.0.2.1"})
    refused = [event["client"] for event in server.log if event["event"] == "request refused"]
    assert refused[-2:] == ["10.0.8.1", "192.0.2.1"]


@setting("cors.origins", {"cors": {"origins": ["https://chat.example"]}})
async def pages_of_configured_origins_may_use_the_api(server: Served) -> None:
    answer = await server.fetch("/v1/models", headers={"Origin": "https://chat.example"})
    assert answer.headers.get("access-control-allow-origin") == "https://chat.example", answer


@setting("apiKeys[].key", keyed(), alternative="k2")
async def request_with_the_key_is_accepted(server: Served) -> None:
    assert (await server.complete().done()).status == 401
    assert (await server.complete(key="k1").done()).status == 200


@setting("apiKeys[].user", keyed(user="ana"))
async def key_has_a_user(server: Served) -> None:
    assert (await log_entry_of_job(server, key="k1"))["tenant"] == "ana"


@setting("apiKeys[].trusted", keyed(user="portal", trusted=True))
async def trusted_key_may_name_another_user(server: Served) -> None:
    entry = await log_entry_of_job(server, key="k1", headers={"X-OpenWebUI-User-Id": "bob"})
    assert entry["tenant"] == "portal/bob"


@setting("flowControl.trustedAddresses", {"flowControl": {"trustedAddresses": ["10.0.7.0/24"]}})
async def gateway_at_a_trusted_address_names_the_tenant(server: Served) -> None:
    headers = {"x-llm-d-inference-fairness-id": "bob"}
    assert (await log_entry_of_job(server, host="10.0.8.1", headers=headers))["tenant"] != "gateway/bob"
    assert (await log_entry_of_job(server, host="10.0.7.1", headers=headers))["tenant"] == "gateway/bob"


@setting(
    "flowControl.objectives",
    {"flowControl": {"trustedAddresses": ["10.0.0.0/8"], "objectives": {"gold": "high"}}},
)
async def objective_of_a_gateway_is_a_class(server: Served) -> None:
    gold = {"headers": {"x-llm-d-inference-objective": "gold"}}
    assert await order(server, ("A", {}), ("B", gold)) == ["B", "A"]


@setting("apiKeys[].priority", keyed(priority="high"))
async def key_may_use_the_allowed_class(server: Served) -> None:
    answer = await server.complete(key="k1", headers={"X-Priority": "high"}).done()
    assert answer.status == 200, answer


@setting("apiKeys[].role", keyed(role="operator"))
async def operators_key_unloads_models(server: Served) -> None:
    assert (await server.start("/models/unload", {"model": "m"}, key="k1").done()).status == 200


@setting("apiKeys[].models", keyed(models=["m"]) | {"models": {"k": {"path": "DEMO"}}})
async def key_may_use_only_its_models(server: Served) -> None:
    assert (await server.complete(key="k1").done()).status == 200
    assert (await server.complete(key="k1", model="k").done()).status == 403


@setting("apiKeys[].limits.requestsPerMinute", keyed(limits={"requestsPerMinute": 1}))
async def requests_of_a_key_are_limited(server: Served) -> None:
    jobs = [server.complete(key="k1"), server.complete(key="k1")]
    assert sorted([(await job.done()).status for job in jobs]) == [200, 429]


@setting("apiKeys[].limits.tokensPerMinute", keyed(limits={"tokensPerMinute": 10}))
async def tokens_of_a_key_are_limited(server: Served) -> None:
    assert (await server.complete(key="k1", tokens=10).done()).status == 200
    assert (await server.complete(key="k1").done()).status == 429


@setting("apiKeys[].limits.concurrent", keyed(limits={"concurrent": 1}))
async def concurrent_jobs_of_a_key_are_limited(server: Served) -> None:
    jobs = [server.complete(key="k1"), server.complete(key="k1")]
    assert sorted([(await job.done()).status for job in jobs]) == [200, 429]
    assert (await server.complete(key="k1").done()).status == 200


@setting("requestTimeout", {"requestTimeout": 1})
async def job_times_out(server: Served) -> None:
    late = server.complete(tokens=60)
    assert (await late.done()).status == 408, late
    assert late.took_s < 2


@setting("tenantNames", {"tenantNames": "plain"})
async def tenants_are_named_in_the_log(server: Served) -> None:
    assert (await log_entry_of_job(server, user="ana"))["tenant"] == "user/ana"


@setting("healthCheck.interval", {"nodes": [RELAY_NODE], "healthCheck": {"interval": 1}})
@setting("nodes[].healthCheck.interval", {"nodes": [RELAY_NODE | {"healthCheck": {"interval": 1}}]})
async def node_is_probed_at_the_interval(server: Served) -> None:
    probes_before = len(server.upstream.times)
    await trio.sleep(10)
    assert len(server.upstream.times) - probes_before >= 8


@setting("healthCheck.failures", {"nodes": [RELAY_NODE], "healthCheck": {"failures": 1}})
@setting("nodes[].healthCheck.failures", {"nodes": [RELAY_NODE | {"healthCheck": {"failures": 1}}]})
async def node_is_down_after_the_configured_failures(server: Served) -> None:
    await server.state("far", "up")
    server.upstream.is_healthy = False
    await trio.sleep(6)
    assert (await server.states())["far"] == "down"


@setting("healthCheck.timeout", {"nodes": [RELAY_NODE], "healthCheck": {"timeout": 1}})
@setting("nodes[].healthCheck.timeout", {"nodes": [RELAY_NODE | {"healthCheck": {"timeout": 1}}]})
async def probe_times_out(server: Served) -> None:
    await server.state("far", "up")
    server.upstream.probe_s = 2
    await trio.sleep(25)
    assert (await server.states())["far"] == "down"
