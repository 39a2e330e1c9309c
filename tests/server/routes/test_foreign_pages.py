"""Web pages of other servers may call no route without API keys; with keys, they need one."""

import pytest

from fairlead.base.config import ApiKey
from server.routes.raw_http import get, post, serving
from server.routes.test_paths import paths_of

CHAT = "/v1/chat/completions"
OWN = {"Host": "localhost:8000", "Origin": "http://localhost:8000"}
OTHER_ORIGIN = [
    ({"Host": "evil.example:8000"}, "Host"),
    ({"Host": "evil.example:8000", "Origin": "http://evil.example:8000"}, "Host"),
    ({"Host": "localhost:8000", "Origin": "http://evil.example"}, "Origin"),
    ({"Host": "localhost:8000", "Origin": "null"}, "Origin"),
    ({"Origin": "http://localhost:8000"}, "Origin"),
]
PROBES = {"/health", "/ping", "/ready"}


@pytest.mark.parametrize(("headers", "param"), OTHER_ORIGIN)
async def test_without_keys_every_route_refuses_pages_of_other_servers(client, headers, param):
    for path in sorted(paths_of(client.app) - PROBES):
        for method in ("GET", "POST", "DELETE", "OPTIONS"):
            reply = await client.send(method, path, b"{}", headers=headers)
            assert (path, reply.status) == (path, 403)
            if path.startswith("/api/"):  # Ollama's errors are only a message, which begins with the field
                assert reply.error.startswith(f"{param}: ")
            else:
                assert (reply.error["code"], reply.error["param"]) == ("forbidden", param)
    assert client.gateway.jobs == []


@pytest.mark.parametrize(("headers", "_param"), OTHER_ORIGIN)
async def test_probes_are_open_for_every_host_and_origin(client, headers, _param):
    for path in PROBES:
        assert (await client.get(path, headers=headers)).status == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null"])
async def test_request_that_needs_no_preflight_is_refused(client, chat, origin):
    """A page may send it to any server, as its content type is one that HTML forms use."""
    headers = {"Host": "127.0.0.1:8000", "Origin": origin, "Content-Type": "text/plain"}
    for path, body in (
        (CHAT, chat()),
        ("/tokenize", {"prompt": "hello"}),
        ("/models/load", {"model": "small"}),
    ):
        reply = await client.post(path, body, headers=headers)
        assert (reply.status, reply.error["code"]) == (403, "forbidden")
    assert client.gateway.jobs == []


@pytest.mark.parametrize("headers", [{}, OWN, {"Host": "10.0.0.2:8000"}])
async def test_programs_and_our_own_page_may_call_every_route(client, chat, headers):
    assert (await client.post(CHAT, chat(), headers=headers)).status == 200
    for path in ("/", "/v1/models", "/queue", "/running", "/metrics", "/openapi.json"):
        assert (await client.get(path, headers=headers)).status == 200


async def test_program_that_uses_http_1_0_need_not_send_host(client):
    async with serving(client.app) as server:
        for path in ("/nodes", "/v1/models", "/health"):
            request = get(path, version="1.0").replace(b"Host: localhost\r\n", b"")
            assert (await server.fetch(request)).status == 200


@pytest.mark.parametrize(
    "host", ["x" * 300, "a..b", "x" * 64 + ".example", "%ff", "xn--a", "a:0", "1.2.3.4.5"]
)
async def test_host_that_is_invalid_in_dns_causes_no_failure(client_with, host):
    client = client_with(ApiKey("sk"))
    for path in ("/health", "/v1/models", "/nothing"):
        reply = await client.get(path, headers={"Host": host, "Authorization": "Bearer sk"})
        assert reply.status == (404 if path == "/nothing" else 200)


async def test_server_named_in_the_target_is_checked_like_host(client):
    async with serving(client.app) as server:
        assert (await server.fetch(get("http://evil.example/v1/models"))).status == 403
        assert (await server.fetch(get("http://localhost/v1/models"))).status == 200


@pytest.mark.parametrize(("headers", "_param"), OTHER_ORIGIN)
async def test_with_keys_a_page_needs_one_and_operator_routes_refuse_it(client_with, chat, headers, _param):
    client = client_with(ApiKey("sk"))
    assert (await client.post(CHAT, chat(), headers=headers)).status == 401
    headers = headers | {"Authorization": "Bearer sk"}
    assert (await client.post(CHAT, chat(), headers=headers)).status == 200
    assert (await client.get("/v1/models", headers=headers)).status == 200
    assert (await client.get("/", headers=headers)).status == 200
    assert (await client.get("/nodes", headers=headers)).status == 403


async def test_removal_of_the_keys_turns_the_check_on(client_with, chat):
    client = client_with(ApiKey("sk"))
    other_origin = {"Host": "evil.example", "Authorization": "Bearer sk"}
    assert (await client.post(CHAT, chat(), headers=other_origin)).status == 200
    client.app.change_keys(())
    assert (await client.post(CHAT, chat(), headers=other_origin)).status == 403
    client.app.change_keys((ApiKey("sk"),))
    assert (await client.post(CHAT, chat(), headers=other_origin)).status == 200


async def test_refusal_of_a_page_is_sent_although_its_body_was_not_read(client):
    async with serving(client.app) as server:
        answer = await server.fetch(post(b"x" * 100_000, CHAT, "Origin: null"))
    assert (answer.status, answer.error["code"]) == (403, "forbidden")
