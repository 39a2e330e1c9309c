"""Requests that come through proxies: their tenants and their rights, with our listener and with others'."""

import json

import pytest

from fairlead.base.config import ApiKey, Config, ConfigError, FlowControlConfig
from server.routes.conftest import client_of
from server.routes.raw_http import get, post, serving

BODY = {"model": "small", "prompt": "hello"}
PATH = "/v1/completions"


def config(*proxies: str, **settings) -> Config:
    return Config(models=(), trusted_proxies=proxies, **settings)


async def tenant_of(client, headers, peer=("10.0.0.1", 4711)):
    reply = await client.post(PATH, BODY, headers=headers, client=peer)
    assert reply.status == 200, reply.body
    job = client.gateway.jobs[-1]
    return job.tenant, job.client


async def test_tenant_and_log_have_the_client_that_a_trusted_proxy_names(model):
    client = client_of(model, config=config("10.0.0.0/8"))
    headers = {"X-Forwarded-For": "8.8.8.8, 192.0.2.1"}
    assert await tenant_of(client, headers) == ("address/192.0.2.1", "192.0.2.1")
    assert await tenant_of(client, {}) == ("address/10.0.0.1", "10.0.0.1")
    assert await tenant_of(client, headers, ("192.0.2.9", 1)) == ("address/192.0.2.9", "192.0.2.9")
    unreadable = {"X-Forwarded-For": "_hidden"}
    assert await tenant_of(client, unreadable) == ("address/unknown", None)


async def test_peer_of_a_unix_socket_names_the_client_if_it_is_trusted(model):
    headers = {"Forwarded": "for=192.0.2.1"}
    assert (await tenant_of(client_of(model, config=config("unix")), headers, None))[0] == "address/192.0.2.1"
    assert (await tenant_of(client_of(model, config=config()), headers, None))[0] == "address/unknown"


async def test_our_listener_reads_the_client_of_each_request_on_a_connection(model):
    client = client_of(model, config=config("127.0.0.1"))
    body = json.dumps(BODY).encode()
    async with serving(client.app, callers=client.app.callers) as server:
        proxy = await server.connect()
        for address in ("192.0.2.1", "192.0.2.2", "unknown"):
            answer = await proxy.fetch(post(body, PATH, f"X-Forwarded-For: {address}"))
            assert answer.status == 200
    assert [job.client for job in client.gateway.jobs] == ["192.0.2.1", "192.0.2.2", None]


async def test_forwarded_client_has_no_rights_of_the_proxy(model):
    """The gateway's address is trusted, and so is the proxy: its clients are not."""
    flow = FlowControlConfig(trusted_addresses=("10.0.0.0/8",))
    client = client_of(model, config=config("10.0.0.1", flow_control=flow))
    named = {"x-llm-d-inference-fairness-id": "bob"}
    assert (await tenant_of(client, named))[0] == "gateway/bob"
    for forged in ("192.0.2.1", "10.0.0.9, 192.0.2.1", "10.0.0.9, unknown"):
        tenant, _ = await tenant_of(client, {**named, "X-Forwarded-For": forged})
        assert tenant in ("address/192.0.2.1", "address/unknown")


@pytest.mark.parametrize("bypasses_quart", [True, False])
@pytest.mark.parametrize("trusted", [(), ("127.0.0.1",)])
@pytest.mark.parametrize("claim", ["X-Forwarded-For: 127.0.0.1", "Forwarded: for=127.0.0.1"])
async def test_request_through_a_proxy_at_the_loopback_interface_is_no_operators(
    model, trusted, claim, bypasses_quart
):
    settings = config(*trusted, allowed_hosts=("models.example",))
    client = client_of(model, config=settings, bypasses_quart=bypasses_quart)
    local = get("/models/small/logs").replace(b"Host: test", b"Host: localhost")
    forwarded = local.replace(b"\r\n\r\n", f"\r\n{claim}\r\n\r\n".encode())
    async with serving(client.app, callers=client.app.callers) as server:
        assert (await server.fetch(local)).status != 403
        assert (await server.fetch(forwarded)).status == 403
        named = forwarded.replace(b"Host: localhost", b"Host: models.example")
        assert (await server.fetch(named)).status != 403


async def test_request_that_another_server_takes_from_a_proxy_is_no_operators(model):
    client = client_of(model, config=config("10.0.0.1"))
    headers = {"Host": "localhost"}
    peer = ("10.0.0.1", 4711)
    assert (await client.get("/models/small/logs", headers=headers, client=peer)).status != 403
    for claimed in ("192.0.2.1", "10.0.0.1"):
        forwarded = {**headers, "X-Forwarded-For": claimed}
        assert (await client.get("/models/small/logs", headers=forwarded, client=peer)).status == 403


async def test_key_of_a_forwarded_request_proves_who_sends_it(model):
    client = client_of(model, ApiKey("k", role="operator"))
    headers = {"Host": "localhost", "X-Forwarded-For": "192.0.2.1", "Authorization": "Bearer k"}
    assert (await client.get("/models/small/logs", headers=headers)).status != 403


def line_of(client, address="192.0.2.1", **headers):
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return client.app.callers.line(address, pairs)


def test_known_keys_have_lines_of_their_own_and_all_others_share_one(model):
    keys = (ApiKey("one"), ApiKey("two", user="ana"), ApiKey("portal", user="portal", trusted=True))
    client = client_of(model, *keys)
    lines = [line_of(client, authorization=f"Bearer {key}") for key in ("one", "two", "portal")]
    assert len(set(lines)) == 3
    assert lines[1:] == ["ana", "portal"]
    assert line_of(client, x_api_key="two") == "ana"
    assert line_of(client, x_api_key="portal", x_openwebui_user_id="eve") == "portal/eve"
    for forged in ({}, {"x_api_key": "three"}, {"authorization": "Bearer"}, {"x_openwebui_user_id": "ana"}):
        assert line_of(client, **forged) == ""


def test_lines_follow_the_keys_of_a_reload(model):
    client = client_of(model, ApiKey("one"))
    client.app.change_keys((ApiKey("two"),))
    assert line_of(client, x_api_key="one") == ""
    assert line_of(client, x_api_key="two") != ""


def test_tenants_of_a_trusted_gateway_have_lines(model):
    flow = FlowControlConfig(trusted_addresses=("10.0.0.0/8",))
    client = client_of(model, config=config(flow_control=flow))
    assert line_of(client, "10.0.0.1", **{"x-llm-d-inference-fairness-id": "bob"}) == "gateway/bob"
    assert line_of(client, "192.0.2.1", **{"x-llm-d-inference-fairness-id": "bob"}) == ""
    assert line_of(client, "10.0.0.1", **{"x-llm-d-inference-fairness-id": "\x00"}) == ""


@pytest.mark.parametrize("entry", ["proxy.example", "10.0.0.1/8", ""])
def test_setting_names_the_invalid_entry(entry):
    with pytest.raises(ConfigError, match=r"trustedProxies\[1\]: must be an address, a network"):
        config("127.0.0.1", entry)
