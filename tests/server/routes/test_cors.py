"""Web pages of other servers may use the API, except operator routes, if their origin is configured."""

import pytest

from fairlead.base.config import ApiKey, Config, ConfigError, CorsConfig, Limits, ModelConfig
from fairlead.server.routes.route_table import ROUTES
from server.routes.conftest import client_of
from server.routes.raw_http import post, serving

CHAT = "/v1/chat/completions"
PAGE = "https://chat.example"
FROM_PAGE = {"Host": "localhost:8000", "Origin": PAGE}
FROM_OTHER_ORIGIN = {"Host": "localhost:8000", "Origin": "https://evil.example"}
PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization, x-stainless-os",
}
ACCESS = "access-control-allow-origin"


@pytest.fixture
def client_for(model):
    """A function that returns a client of an application that allows pages of these origins."""

    def make(*origins, api_keys=(), **changes):
        config = Config(
            models=(ModelConfig(path=".", name=model.name),),
            api_keys=api_keys,
            limits=Limits(sequences=8),
            cors=CorsConfig(origins=origins),
        )
        return client_of(model, config=config, **changes)

    return make


def of_cors(reply) -> set[str]:
    return {name for name in reply.headers if name.startswith("access-control") or name == "vary"}


async def test_by_default_no_page_is_allowed_and_no_response_has_cors_headers(client, chat):
    own = await client.post(CHAT, chat(), headers={"Host": "localhost", "Origin": "http://localhost"})
    foreign = await client.post(CHAT, chat(), headers=FROM_PAGE)
    preflight = await client.send("OPTIONS", CHAT, b"", headers=FROM_PAGE | PREFLIGHT)
    assert [own.status, foreign.status, preflight.status] == [200, 403, 403]
    assert [of_cors(reply) for reply in (own, foreign, preflight)] == [set()] * 3


@pytest.mark.parametrize("stream", [False, True])
async def test_configured_page_may_read_answers_and_their_headers(client_for, chat, stream):
    reply = await client_for(PAGE).post(CHAT, chat(stream=stream), headers=FROM_PAGE)
    assert (reply.status, reply.headers[ACCESS], reply.headers["vary"]) == (200, PAGE, "Origin")
    exposed = reply.headers["access-control-expose-headers"].lower().split(", ")
    assert {"x-request-id", "retry-after", "x-estimated-wait", "x-queue-position"} <= set(exposed)
    assert "access-control-allow-credentials" not in reply.headers


async def test_page_may_read_lists_and_errors_too(client_for, chat):
    client = client_for(PAGE)
    for reply in (
        await client.get("/v1/models", headers=FROM_PAGE),
        await client.get("/nothing", headers=FROM_PAGE),
        await client.get(CHAT, headers=FROM_PAGE),
        await client.post(CHAT, chat(model="nothing"), headers=FROM_PAGE),
        await client.post(CHAT, b"{", headers=FROM_PAGE),
    ):
        assert reply.headers[ACCESS] == PAGE


async def test_pages_of_other_origins_are_refused(client_for, chat):
    client = client_for(PAGE)
    for origin in (
        "https://evil.example",
        "http://chat.example",
        f"{PAGE}:8443",
        f"{PAGE}.evil.example",
        "null",
    ):
        headers = FROM_PAGE | {"Origin": origin}
        for reply in (
            await client.post(CHAT, chat(), headers=headers),
            await client.send("OPTIONS", CHAT, b"", headers=headers | PREFLIGHT),
        ):
            assert (reply.status, reply.error["param"]) == (403, "Origin")
            assert of_cors(reply) == {"vary"}
    assert client.gateway.jobs == []


async def test_host_is_checked_for_configured_pages_too(client_for, chat):
    reply = await client_for(PAGE).post(CHAT, chat(), headers=FROM_PAGE | {"Host": "evil.example"})
    assert (reply.status, reply.error["param"]) == (403, "Host")


async def test_preflight_needs_no_key(client_for):
    client = client_for(PAGE, api_keys=(ApiKey("sk"),))
    reply = await client.send("OPTIONS", CHAT, b"", headers=FROM_PAGE | PREFLIGHT)
    assert (reply.status, reply.body, reply.headers[ACCESS]) == (204, b"", PAGE)
    assert reply.headers["access-control-allow-methods"] == "OPTIONS, POST"
    assert reply.headers["access-control-allow-headers"] == "authorization, x-stainless-os"
    assert reply.headers["access-control-max-age"] == "600"
    reply = await client.send("OPTIONS", "/v1/models", b"", headers=FROM_PAGE | PREFLIGHT)
    assert reply.headers["access-control-allow-methods"] == "GET, HEAD, OPTIONS"


async def test_key_is_needed_for_everything_except_the_preflight(client_for, chat):
    client = client_for(PAGE, api_keys=(ApiKey("sk"),))
    refused = await client.post(CHAT, chat(), headers=FROM_PAGE)
    assert (refused.status, refused.headers[ACCESS]) == (401, PAGE)
    for headers in (FROM_PAGE, FROM_OTHER_ORIGIN | PREFLIGHT, {"Host": "localhost"} | PREFLIGHT):
        assert (await client.send("OPTIONS", CHAT, b"", headers=headers)).status == 401
    assert (await client.send("OPTIONS", "/nothing", b"", headers=FROM_PAGE | PREFLIGHT)).status == 401
    with_key = FROM_PAGE | {"Authorization": "Bearer sk"}
    assert (await client.post(CHAT, chat(), headers=with_key)).status == 200


@pytest.mark.parametrize("names", ["", "a\tb:", "a b", "a,,b", "é", "x" * 5000])
async def test_invalid_header_names_are_not_repeated(client_for, names):
    headers = FROM_PAGE | PREFLIGHT | {"Access-Control-Request-Headers": names}
    reply = await client_for(PAGE).send("OPTIONS", CHAT, b"", headers=headers)
    assert (reply.status, "access-control-allow-headers" in reply.headers) == (204, False)


async def test_star_allows_every_page(client_for, chat):
    client = client_for("*")
    for headers in (FROM_PAGE, FROM_OTHER_ORIGIN, FROM_PAGE | {"Origin": "null"}, {}):
        reply = await client.post(CHAT, chat(), headers=headers)
        assert (reply.status, reply.headers[ACCESS]) == (200, "*")
        assert "vary" not in reply.headers


@pytest.mark.parametrize("origins", [(PAGE,), ("*",)])
@pytest.mark.parametrize("keys", [(), (ApiKey("sk"),)])
async def test_operator_routes_are_closed_to_configured_pages(client_for, origins, keys):
    client = client_for(*origins, api_keys=keys)
    authorized = {"Authorization": "Bearer sk"} if keys else {}
    for route in (route for route in ROUTES if route.permission.is_strict):
        path = route.path.replace("{node_id}", "big").replace("{name}", "small")
        path = path.replace("{key_id}", "key_1").replace("{project_id}", "research")
        path = path.replace("{budget_id}", "budget_1")
        reply = await client.send("OPTIONS", path, b"", headers=FROM_PAGE | PREFLIGHT | authorized)
        assert (reply.status, of_cors(reply)) == (403, set())
    for method, path in (
        ("POST", "/models/load"),
        ("POST", "/models/unload"),
        ("GET", "/nodes"),
        ("POST", "/nodes"),
        ("DELETE", "/nodes/big"),
        ("POST", "/nodes/big/drain"),
    ):
        reply = await client.send(method, path, b'{"model": "small"}', headers=FROM_PAGE | authorized)
        assert (reply.status, reply.error["param"], of_cors(reply)) == (403, "Origin", set())


async def test_stream_over_a_socket_has_the_headers(client_for):
    body = b'{"messages": [{"role": "user", "content": "hello"}], "stream": true}'
    async with serving(client_for(PAGE).app) as server:
        answer = await server.fetch(post(body, CHAT, f"Origin: {PAGE}"))
    assert (answer.status, answer.headers[ACCESS]) == (200, PAGE)


@pytest.mark.parametrize(
    "origin",
    [
        *("", "chat.example", "https://", "https://chat.example/", "https://Chat.example", "null", "**"),
        *("https://chat.example:443", "http://chat.example:80", "https://*.example", "https://a b"),
    ],
)
def test_origin_that_no_browser_sends_is_refused_by_name(origin):
    with pytest.raises(ConfigError, match=r"cors\.origins\[1\]: must be"):
        Config(models=(), cors=CorsConfig(origins=(PAGE, origin)))


@pytest.mark.parametrize(
    "origin",
    ["*", "http://localhost:3000", "https://[::1]:8443", "tauri://localhost", "chrome-extension://abc"],
)
def test_origin_may_be_any_page_or_one_of_any_scheme(origin):
    assert Config(models=(), cors=CorsConfig(origins=(origin,))).cors.origins == (origin,)
