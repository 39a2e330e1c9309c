"""The log line of a refused request: its method, path and client, and the nearest route."""

import pytest

from fairlead.base.config import ApiKey
from fairlead.base.errors import QueueFull
from fairlead.router.fleet.status import ModelStatus
from fairlead.server.listener.refusals import LOGGED_LENGTH
from fairlead.server.routes.paths import COMPARED_LENGTH, nearest_route
from fake_fleet import FakeFleet
from server.routes.raw_http import get, serving

CHAT = "/v1/chat/completions"


async def line_of(client, log, method: str, path: str, body: bytes = b"", **options) -> dict:
    await client.send(method, path, body, **options)
    (line,) = [entry for entry in log if entry["event"] == "request refused"]
    return line


@pytest.mark.parametrize(
    ("method", "path", "outcome"),
    [
        ("POST", CHAT, "invalid_request"),
        ("GET", CHAT, "method_not_allowed"),
        ("GET", "/v1/models/none", "model_not_found"),
        ("DELETE", "/nowhere", "not_found"),
    ],
)
async def test_refusal_is_logged_with_method_path_and_client(client, log, method, path, outcome):
    line = await line_of(client, log, method, path, b"{")
    assert (line["outcome"], line["method"], line["path"]) == (outcome, method, path)
    assert line["client"] == "192.0.2.7"


async def test_refused_key_is_logged_with_method_path_and_client(client_with, log):
    line = await line_of(client_with(ApiKey("sk-1")), log, "GET", "/queue?model=small")
    assert (line["outcome"], line["method"], line["path"]) == ("invalid_api_key", "GET", "/queue")
    assert line["client"] == "192.0.2.7"


@pytest.mark.parametrize(
    ("path", "nearest"),
    [
        ("/v1/chat/completion", CHAT),
        ("/v1/chats/completions", CHAT),
        ("/v1/chat/completions/", CHAT),
        ("/v1/model", "/v1/models"),
        ("/helth", "/health"),
    ],
)
async def test_unknown_path_is_logged_with_the_nearest_route(client, log, path, nearest):
    assert (await line_of(client, log, "GET", path))["nearest_route"] == nearest


@pytest.mark.parametrize("path", ["/zzzzzzzzzzzz", "/" + "x" * COMPARED_LENGTH])
async def test_path_that_resembles_no_route_is_logged_without_one(client, log, path):
    assert "nearest_route" not in await line_of(client, log, "GET", path)


async def test_missing_model_is_logged_without_a_route(client, log):
    assert "nearest_route" not in await line_of(client, log, "GET", "/v1/models/none")


async def test_long_path_is_cut_in_the_log(client, log):
    path = "/" + "x" * 5000
    assert (await line_of(client, log, "GET", path))["path"] == path[:LOGGED_LENGTH]


async def test_job_has_its_route_and_client_for_the_log(client, chat):
    client.gateway.refusal = QueueFull("full")
    await client.post(CHAT, chat())
    assert (client.gateway.job.path, client.gateway.job.client) == (CHAT, "192.0.2.7")


BROKEN_BODY = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n".encode()
OF_LISTENER = {
    get(CHAT + "?a=b", "Expect: more"): ("expectation_failed", 417, "GET", CHAT),
    get(CHAT, "Upgrade: websocket"): ("invalid_request", 400, "GET", CHAT),
    get("/" + "x" * 5000, *["A: b"] * 200): (
        "headers_too_large",
        431,
        "GET",
        ("/" + "x" * 5000)[:LOGGED_LENGTH],
    ),
    BROKEN_BODY: ("invalid_request", 400, "POST", CHAT),
    b"nonsense\r\n\r\n": ("invalid_request", 400, None, None),
}


@pytest.mark.parametrize(("request_bytes", "expected"), OF_LISTENER.items(), ids=range(len(OF_LISTENER)))
async def test_refusal_of_the_listener_is_logged_with_what_is_known_of_the_request(
    client, log, request_bytes, expected
):
    async with serving(client.app) as server:
        answer = await server.fetch(request_bytes)
    (line,) = [entry for entry in log if entry["event"] == "request refused"]
    assert (line["outcome"], line["status"], line.get("method"), line.get("path")) == expected
    assert (line["client"], line["reason"]) == ("127.0.0.1", answer.error["message"])
    assert (answer.status, answer.error["code"]) == (line["status"], line["outcome"])


async def test_long_path_of_a_job_is_cut_for_the_log(client_with):
    external = ModelStatus(model="external", kind="command", node="command:external", state="ready")
    client = client_with(fleet=FakeFleet(statuses=[external]))
    client.gateway.refusal = QueueFull("full")
    path = "/upstream/external/" + "x" * 1000
    assert (await client.get(path)).status == 429
    assert client.gateway.job.path == path[:LOGGED_LENGTH]


def test_nearest_route_of_an_application_without_routes_is_none():
    assert nearest_route("/health", []) is None
