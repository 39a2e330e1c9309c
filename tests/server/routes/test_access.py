"""API keys, and the tenants of requests."""

import pytest

from fairlead.base.config import ApiKey
from fairlead.base.job import Job
from fairlead.router.quotas.access import MAX_TENANT_LENGTH

ALICE = ApiKey("sk-alice", user="alice")
NAMELESS = ApiKey("sk-nameless")
PORTAL = ApiKey("sk-portal", user="portal", trusted=True)
CHAT = "/v1/chat/completions"
USER_HEADER = "X-OpenWebUI-User-Id"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "sk-alice"},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer "},
        {"Authorization": "Basic sk-alice"},
        {"Authorization": "Bearer sk-alic"},
        {"Authorization": "Bearer sk-alicee"},
        {"Authorization": "Bearer sk-alic\xe9"},
        {"x-api-key": "sk-bob"},
        {"x-api-key": ""},
    ],
)
async def test_missing_or_wrong_key_is_a_401(client_with, headers):
    reply = await client_with(ALICE).get("/v1/models", headers=headers)
    assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")
    assert reply.error["type"] == "authentication_error"
    assert reply.headers["www-authenticate"] == "Bearer"
    assert "x-request-id" in reply.headers


@pytest.mark.parametrize(
    "headers", [bearer("sk-alice"), {"Authorization": "bearer  sk-alice "}, {"x-api-key": "sk-alice"}]
)
async def test_known_key_is_accepted(client_with, headers):
    reply = await client_with(NAMELESS, ALICE).get("/v1/models", headers=headers)
    assert reply.status == 200


async def test_key_that_is_not_ascii_works_too(client_with):
    client = client_with(ApiKey("schlüssel"))
    reply = await client.get("/v1/models", headers=bearer("schlüssel".encode().decode("latin-1")))
    assert reply.status == 200


@pytest.mark.parametrize(
    "path",
    ["/v1/models", "/v1/models/small", "/models", "/queue", "/running", "/version", "/nowhere", "/health/"],
)
async def test_key_is_checked_before_the_route_except_for_probes(client_with, path):
    assert (await client_with(ALICE).get(path)).status == 401


@pytest.mark.parametrize("path", ["/health", "/ready"])
async def test_probes_need_no_key(client_with, path):
    assert (await client_with(ALICE).get(path)).status == 200
    assert (await client_with(ALICE).get(path, headers=bearer("wrong"))).status == 200


async def test_key_is_checked_before_the_method(client_with):
    assert (await client_with(ALICE).get(CHAT)).status == 401


async def tenant(client, chat, *, headers=None, address="192.0.2.7", **fields) -> str:
    client.gateway.jobs.clear()
    reply = await client.post(CHAT, chat(**fields), headers=headers or {}, client=(address, 4711))
    assert reply.status == 200, reply.body
    job: Job = client.gateway.job
    return job.tenant


async def test_keys_user_is_the_tenant_whatever_user_the_request_names(client_with, chat):
    claims = {**bearer("sk-alice"), USER_HEADER: "bob"}
    assert await tenant(client_with(ALICE), chat, headers=claims, user="bob") == "alice"


async def test_tenant_name_of_a_key_without_a_user_does_not_reveal_the_key(client_with, chat):
    client = client_with(NAMELESS, ApiKey("sk-other"))
    first = await tenant(client, chat, headers=bearer("sk-nameless"), user="bob")
    assert first == await tenant(client, chat, headers=bearer("sk-nameless"))
    assert first != await tenant(client, chat, headers=bearer("sk-other"))
    assert first.startswith("key-")
    assert "nameless" not in first


async def test_trusted_key_may_name_users_of_its_own(client_with, chat):
    client = client_with(ALICE, PORTAL)
    assert await tenant(client, chat, headers={**bearer("sk-portal"), USER_HEADER: "alice"}) == "portal/alice"
    assert await tenant(client, chat, headers=bearer("sk-portal"), user="bob") == "portal/bob"
    assert await tenant(client, chat, headers=bearer("sk-portal"), safety_identifier="eve") == "portal/eve"
    assert await tenant(client, chat, headers=bearer("sk-portal")) == "portal"


async def test_without_keys_any_request_may_name_a_user_and_the_header_comes_first(client, chat):
    headers = {USER_HEADER: "alice"}
    assert await tenant(client, chat, headers=headers, user="bob", safety_identifier="eve") == "user/alice"
    assert await tenant(client, chat, user="bob", safety_identifier="eve") == "user/bob"
    assert await tenant(client, chat, safety_identifier="eve") == "user/eve"


async def test_without_keys_and_users_the_address_is_the_tenant(client, chat):
    assert await tenant(client, chat) == "address/192.0.2.7"


async def test_header_cannot_forge_the_address(client, chat):
    assert await tenant(client, chat, headers={"Remote-Addr": "10.0.0.1"}) == "address/192.0.2.7"


async def test_all_addresses_of_one_ipv6_client_are_one_tenant(client, chat):
    first = await tenant(client, chat, address="2001:db8:1:2:3::4")
    assert first == await tenant(client, chat, address="2001:db8:1:2:ffff::")
    assert first != await tenant(client, chat, address="2001:db8:1:3::")
    assert await tenant(client, chat, address="::1") == "address/::1"
    assert await tenant(client, chat, address="fe80::1%eth0") == "address/fe80::/64"


async def test_long_name_becomes_a_hash_that_still_distinguishes_tenants(client, chat):
    first, second = "a" * 10_000 + "b", "a" * 10_000 + "c"
    names = [await tenant(client, chat, user=name) for name in (first, first, second)]
    assert names[0] == names[1] != names[2]
    assert all(len(name) <= MAX_TENANT_LENGTH for name in names)
