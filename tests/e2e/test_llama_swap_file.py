"""A configuration file of llama-swap on a real server: listed aliases, `/upstream`, the loading state."""

import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from e2e.real_server import RealServer, real_server, until
from fairlead.base.config import demonstration_model
from nodes.echo_server import BIG
from router.fleet.running_fleet import STUB, free_port

ECHO = f"{sys.executable} -I {Path(__file__).parents[1] / 'nodes' / 'echo_server.py'} ${{PORT}}"
KEY = {"Authorization": "Bearer sk-all"}
NO_LOADING_STATE = "quiet"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    stub = " ".join((*STUB, "${PORT}", "--healthy-after", "1.5"))
    settings = {
        "startPort": free_port(20),
        "includeAliasesInList": True,
        "sendLoadingState": True,
        "upstream": {"ignorePaths": [r"\.ico$", "^/ignored"]},
        "routing": {"router": {"use": "lru", "settings": {"lru": {"maxLoaded": 1}}}},
        "apiKeys": [
            {"key": "sk-all", "role": "operator"},
            {"key": "sk-echo", "models": ["lab/echo"]},
            {"key": "sk-few-tokens", "limits": {"tokensPerMinute": 1000}},
        ],
        "models": {
            "lab/echo": {"cmd": ECHO, "aliases": ["mirror"], "concurrencyLimit": 1},
            "other": {"cmd": ECHO, "unlisted": True},
            "slow": {"cmd": stub},
            NO_LOADING_STATE: {"cmd": stub, "sendLoadingState": False},
            "demo": {"path": str(demonstration_model()), "device": "cpu"},
        },
    }
    file = tmp_path_factory.mktemp("llama-swap") / "config.yaml"
    file.write_text(json.dumps(settings))
    with real_server("--config", str(file)) as opened:
        opened.http.headers.update(KEY)
        yield opened


def loaded(server: RealServer) -> list[str]:
    return [each["model"] for each in server.http.get("/running").json()]


def unload(server: RealServer) -> None:
    for model in loaded(server):
        assert server.http.post("/models/unload", json={"model": model}).status_code == 200


def test_aliases_are_in_the_list(server: RealServer):
    names = [card["id"] for card in server.http.get("/v1/models").json()["data"]]
    assert names == ["lab/echo", "slow", "quiet", "demo", "mirror"]


# Requests to a model's own server -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lab/echo", "lab%2Fecho", "mirror"])
@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "PATCH", "DELETE"])
def test_request_of_any_method_reaches_the_server_of_a_model(server: RealServer, name: str, method: str):
    content = b"\x00any bytes" if method in ("POST", "PUT", "PATCH") else None
    reply = server.http.request(
        method,
        f"/upstream/{name}/some/path%2Fescaped?a=b%20c&d",
        content=content,
        headers={"Content-Type": "image/png"} if content else {},
    )
    assert reply.status_code == 200
    request = reply.json()
    assert request["method"] == method
    assert request["path"] == "/some/path%2Fescaped?a=b%20c&d"
    assert request["body"] == (content or b"").decode("latin-1")
    assert request["headers"].get("content-type") == ("image/png" if content else None)


def test_request_loads_its_model_and_evicts_another(server: RealServer):
    unload(server)
    assert server.http.get("/upstream/other/x").status_code == 200
    assert loaded(server) == ["other"]
    assert server.http.get("/upstream/mirror/x").status_code == 200
    assert loaded(server) == ["lab/echo"]


def test_keys_cookies_and_hop_by_hop_headers_are_not_forwarded(server: RealServer):
    headers = {
        "X-Api-Key": "sk-all",
        "Cookie": "a=b",
        "Connection": "keep-alive, X-Hop",
        "X-Hop": "1",
        "TE": "trailers",
        "X-Mine": "kept",
        "Accept": "text/plain",
    }
    sent = server.http.get("/upstream/mirror/x", headers=headers).json()["headers"]
    assert (sent["x-mine"], sent["accept"], sent["user-agent"]) == ("kept", "text/plain", "fairlead")
    assert not {"authorization", "x-api-key", "cookie", "x-hop", "te"} & set(sent)
    assert sent["host"].startswith("localhost:")


def test_headers_that_concern_the_whole_origin_are_not_returned(server: RealServer):
    reply = server.http.get("/upstream/mirror/page")
    assert (reply.status_code, reply.text) == (200, "<h1>hello</h1>")
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    assert (reply.headers["x-custom"], reply.headers["etag"]) == ("kept", '"1"')
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert not {"set-cookie", "access-control-allow-origin", "x-hop"} & set(reply.headers)


def test_answer_of_head_has_the_length_and_no_body(server: RealServer):
    for _ in range(3):  # on one connection to the server: waiting for a body would block the next request
        reply = server.http.head("/upstream/mirror/page")
        assert (reply.status_code, reply.headers["content-length"], reply.content) == (200, "14", b"")


@pytest.mark.parametrize("status", [404, 429, 500, 503])
def test_status_of_the_server_is_passed_on(server: RealServer, status: int):
    reply = server.http.get(f"/upstream/mirror/status/{status}")
    assert (reply.status_code, reply.json()) == (status, {"theirs": True})


def test_long_answer_is_passed_on_whole(server: RealServer):
    assert server.http.get("/upstream/mirror/big").content == BIG


def test_broken_answer_has_no_regular_end(server: RealServer):
    with pytest.raises(httpx.RemoteProtocolError):
        server.http.get("/upstream/mirror/cut")
    until(lambda: server.queue()["running"] == 0)


def test_client_that_disconnects_frees_its_seat(server: RealServer):
    with server.http.stream("GET", "/upstream/mirror/hang") as reply:
        pieces = reply.iter_raw()  # its deletion closes the connection
        assert next(pieces) == b"begun"
        assert server.queue()["running"] == 1
    until(lambda: server.queue()["running"] == 0)
    assert server.http.get("/upstream/mirror/x").status_code == 200


def test_requests_take_turns_at_the_seats_of_the_model(server: RealServer):
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda _: server.http.get("/upstream/mirror/big").status_code, range(8)))
    assert replies == [200] * 8
    assert (server.queue()["running"], server.queue()["waiting"]) == (0, 0)
    (status,) = [each for each in server.http.get("/running").json() if each["model"] == "lab/echo"]
    assert (status["seats"], status["busy"]) == (1, 0)


def test_name_alone_is_redirected_to_the_root_of_the_server(server: RealServer):
    reply = server.http.get("/upstream/lab/echo?x=1", follow_redirects=False)
    assert (reply.status_code, reply.headers["location"]) == (301, "/upstream/lab/echo/?x=1")
    assert server.http.post("/upstream/mirror", follow_redirects=False).status_code == 308
    assert server.http.get("/upstream/mirror/").json()["path"] == "/"


@pytest.mark.parametrize("path", ["/favicon.ico", "/ignored/by/all"])
def test_ignored_path_does_not_load_the_model_but_reaches_one_that_is_loaded(server: RealServer, path: str):
    unload(server)
    reply = server.http.get(f"/upstream/mirror{path}")
    assert (reply.status_code, reply.json()["error"]["code"]) == (409, "unloaded")
    assert loaded(server) == []
    assert server.http.get("/upstream/mirror/x").status_code == 200
    assert server.http.get(f"/upstream/mirror{path}").status_code == 200


@pytest.mark.parametrize(
    ("path", "status", "message"),
    [
        ("demo/v1/models", 404, "the model 'demo' has no server of its own"),
        ("nobody/x", 404, "model 'nobody' not found: it is not served here"),
        ("mirror/%2e%2e/x", 404, "there is no such route"),
        ("mirror//x", 404, "there is no such route"),
        (f"mirror/{'a' * 3000}", 400, "the path must have at most 2048 characters"),
    ],
)
def test_request_that_cannot_be_forwarded_is_refused_with_the_reason(
    server: RealServer, path: str, status: int, message: str
):
    # As a raw path, because httpx would resolve the dots.
    url = httpx.URL(server.url).copy_with(raw_path=f"/upstream/{path}".encode())
    reply = server.http.send(httpx.Request("GET", url, headers=KEY))
    assert reply.status_code == status
    assert message in reply.json()["error"]["message"]


def test_key_without_the_model_or_with_a_limit_of_tokens_is_refused(server: RealServer):
    def status(model: str, key: str) -> int:
        headers = {"Authorization": f"Bearer {key}"}
        return server.http.get(f"/upstream/{model}/x", headers=headers).status_code

    assert status("mirror", "sk-echo") == 200
    assert status("other", "sk-echo") == 403
    assert status("mirror", "sk-few-tokens") == 403
    assert status("mirror", "sk-wrong") == 401


# The loading state --------------------------------------------------------------------------------------


def reasoning(server: RealServer, model: str, begun: Callable[[], object] = lambda: None) -> tuple[str, str]:
    """Return the reasoning and the answer of a streamed chat; call `begun` at its first event."""
    body = {"model": model, "messages": [{"role": "user", "content": "hello"}], "stream": True}
    deltas: list[dict[str, str]] = []
    with server.http.stream("POST", "/v1/chat/completions", json={**body, "max_tokens": 5}) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                if not deltas:
                    begun()
                deltas += [choice["delta"] for choice in json.loads(line[6:])["choices"]]
    return tuple(
        "".join(each.get(name) or "" for each in deltas) for name in ("reasoning_content", "content")
    )


@pytest.mark.parametrize("model", ["slow", "demo"])
def test_streamed_chat_reports_the_load_of_its_model(server: RealServer, model: str):
    """The load waits for the model before it, so that it takes longer than a report needs to begin."""
    unload(server)
    with server.http.stream("GET", "/upstream/mirror/hang") as busy:
        assert next(busy.iter_raw()) == b"begun"
        reasoning_text, answer = reasoning(server, model, busy.close)
    assert reasoning_text.startswith(f"Loading the model {model}\n")
    assert "Loaded after" in reasoning_text
    assert answer
    again, answer = reasoning(server, model)
    assert (again, bool(answer)) == ("", True)


def test_model_may_have_no_loading_state(server: RealServer):
    unload(server)
    reasoning_text, answer = reasoning(server, NO_LOADING_STATE)
    assert (reasoning_text, bool(answer)) == ("", True)
