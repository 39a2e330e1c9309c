"""A real Fairlead in front of a stub with OpenAI's API: as a remote node, and as a command."""

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest
import trio
from openai import OpenAI

from e2e.real_server import TIMEOUT_S, RealServer, real_server, until
from nodes import stub_server
from nodes.stub_server import StubServer, text

FAR, LOCAL = "m", "local"
ASK = [{"role": "user", "content": "hello"}]
STREAMING = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")


@contextmanager
def stub_thread() -> Iterator[StubServer]:
    """Run a stub in a thread, so that tests can inspect the requests it received."""
    server = StubServer()
    started = threading.Event()
    scope = trio.CancelScope()
    tokens: list[trio.lowlevel.TrioToken] = []

    async def serve() -> None:
        tokens.append(trio.lowlevel.current_trio_token())
        with scope:
            async with trio.open_nursery() as nursery:
                await nursery.start(server.serve)
                started.set()

    thread = threading.Thread(target=trio.run, args=(serve,), daemon=True)
    thread.start()
    assert started.wait(TIMEOUT_S)
    yield server
    tokens[0].run_sync_soon(scope.cancel)
    thread.join(TIMEOUT_S)


@pytest.fixture(scope="module")
def stub() -> Iterator[StubServer]:
    with stub_thread() as server:
        yield server


@pytest.fixture(scope="module")
def server(stub: StubServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    configuration = {
        "models": {
            LOCAL: {
                "cmd": f"{sys.executable} {Path(stub_server.__file__)} --port ${{PORT}}",
                "aliases": ["here"],
                "concurrencyLimit": 4,
            }
        },
        "nodes": [{"id": "remote", "url": stub.url, "seats": 4}],
        "healthCheck": {"interval": "100ms"},
        "queue": {"keepAlive": "0s"},  # a slow answer contains only what the node sent
    }
    file = tmp_path_factory.mktemp("relaying") / "fairlead.yaml"
    file.write_text(json.dumps(configuration))  # JSON is valid YAML
    with real_server("--config", str(file)) as running:
        until(lambda: node(running, "remote")["state"] == "up")
        yield running


@pytest.fixture(scope="module")
def client(server: RealServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def node(server: RealServer, node_id: str) -> dict:
    return next(each for each in server.http.get("/nodes").json() if each["id"] == node_id)


def relay_body(model: str = FAR, **fields: object) -> bytes:
    return json.dumps({"unheard_of": {"of": None}, "model": model, "messages": ASK, **fields}).encode()


def post(url: str, body: bytes) -> httpx.Response:
    return httpx.post(url, content=body, timeout=TIMEOUT_S)


# Answers are relayed unchanged ---------------------------------------------------------------------


@pytest.mark.parametrize("path", [*STREAMING, "/v1/embeddings", "/v1/messages/count_tokens"])
def test_relayed_answer_equals_that_of_the_node(server, stub, path):
    direct = post(f"{stub.url}{path}", relay_body())
    relayed = server.http.post(path, content=relay_body(), headers={"X-Request-Id": "mine"})
    assert (direct.status_code, direct.content) == (relayed.status_code, relayed.content)
    assert direct.headers["content-type"] == relayed.headers["content-type"]
    assert "mine" == relayed.headers["x-request-id"] == stub.jobs[-1].headers["x-request-id"]
    assert json.loads(relay_body()) == stub.jobs[-1].document


def streamed(stub: StubServer, server: RealServer, path: str, **fields: object) -> Iterator[bytes]:
    """Yield the stream as the stub sends it, and then as the server relays it."""
    body = relay_body(stream=True, stream_options={"include_usage": True}, **fields)
    for url in (stub.url, server.url):
        answer = post(f"{url}{path}", body)
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield answer.content


@pytest.mark.parametrize("path", STREAMING)
def test_relayed_stream_equals_that_of_the_node(server, stub, path):
    direct, relayed = streamed(stub, server, path)
    assert direct == relayed


@pytest.mark.parametrize("path", STREAMING[:2])
def test_each_of_several_relayed_choices_equals_that_of_the_node(server, stub, path):
    # The order of choices that arrive at the same time may differ.
    direct, relayed = (content.split(b"\n\n") for content in streamed(stub, server, path, n=3))
    assert sorted(direct) == sorted(relayed)
    for index in range(3):
        secret = b'"index": %d' % index
        assert [event for event in direct if secret in event] == [
            event for event in relayed if secret in event
        ]
    assert direct[-3:] == relayed[-3:]  # the usage and [DONE]


def test_answer_to_several_prompts_is_relayed_unchanged(server):
    body = {"model": FAR, "prompt": ["a", "b"], "n": 2}
    answer = server.http.post("/v1/completions", json=body).json()
    assert len(answer["choices"]) == 2  # the stub makes only n choices; its answer is relayed unchanged


@pytest.mark.parametrize("stream", [False, True])
def test_nodes_answer_to_a_bad_request_is_relayed(server, stub, stream):
    body = relay_body(stream=stream, stub={"how": "status", "after": 422})
    direct, relayed = (post(f"{url}{STREAMING[0]}", body) for url in (stub.url, server.url))
    assert (relayed.status_code, relayed.content) == (422, direct.content)


@pytest.mark.parametrize(
    ("how", "expected"), [("status", 502), ("gone", 502), ("gzip", 502), ("garbage", 502), ("half", 502)]
)
def test_invalid_answer_of_a_node_is_a_502_with_our_own_error(server, how, expected):
    reply = server.http.post(STREAMING[0], content=relay_body(stub={"how": how, "after": 500}))
    assert expected == reply.status_code
    assert reply.json()["error"]["code"] in {"node_failed", "no_node"}
    until(lambda: node(server, "remote")["state"] == "up")


def test_model_that_no_node_has_is_not_found(server):
    for path in STREAMING:
        reply = server.http.post(path, content=relay_body("huge"))
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")


def test_client_that_disconnects_amid_a_stream_frees_its_seat(server, stub):
    body = relay_body(stream=True, stub={"how": "stall", "after": 4})
    with server.http.stream("POST", STREAMING[0], content=body) as answer:
        assert answer.status_code == 200
        pieces = answer.iter_bytes()
        assert next(pieces)
        # Requests of earlier tests may not have ended yet.
        until(lambda: node(server, "remote")["busy"] == 1 and server.queue()["running"] == 1)
    until(lambda: node(server, "remote")["busy"] == 0 and server.queue()["running"] == 0)
    assert server.http.post(STREAMING[0], content=relay_body()).status_code == 200


# The official client -------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [FAR, LOCAL, "here"])
def test_official_client_receives_the_same_responses(client, model):
    answer = client.chat.completions.create(model=model, messages=ASK)
    assert text() == answer.choices[0].message.content
    with client.chat.completions.create(model=model, messages=ASK, stream=True) as stream:
        assert text() == "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text() == client.completions.create(model=model, prompt="hello").choices[0].text
    assert client.embeddings.create(model=model, input="hello").data[0].embedding == [0.25, -1.0]
    events = client.responses.create(model=model, input="hello", stream=True)
    assert text() == "".join(event.delta for event in events if event.type == "response.output_text.delta")


def test_official_client_raises_what_the_node_answered(client):
    with pytest.raises(openai.UnprocessableEntityError) as raised:
        client.chat.completions.create(
            model=FAR, messages=ASK, extra_body={"stub": {"how": "status", "after": 422}}
        )
    assert raised.value.body == {"message": "status 422", "code": "of the stub"}


@pytest.mark.parametrize("how", ["error", "end", "reset"])
def test_official_client_notices_a_stream_that_is_not_whole(client, server, how, tmp_path):
    blocking_file = tmp_path / "blocking_file"
    blocking_file.touch()
    stub = {"how": how, "after": 4, "held": str(blocking_file)}
    stream = client.chat.completions.create(model=FAR, messages=ASK, stream=True, extra_body={"stub": stub})
    next(stream)  # it has begun; otherwise it would be retried
    blocking_file.unlink()
    with pytest.raises(openai.APIError, match="remote"):
        list(stream)
    until(lambda: node(server, "remote")["state"] == "up" and node(server, "remote")["busy"] == 0)


def test_official_client_lists_the_models(client):
    assert {model.id for model in client.models.list()} == {FAR, LOCAL}
    assert client.models.retrieve("here").id == LOCAL


# What an operator does -----------------------------------------------------------------------------


def test_load_starts_the_process_of_a_command_and_unload_ends_it(server):
    loaded = server.http.post("/models/load", json={"model": "here"}).json()
    assert tuple(loaded[field] for field in ("model", "kind", "state", "seats")) == (
        LOCAL,
        "command",
        "ready",
        4,
    )
    (running,) = server.http.get("/running").json()
    assert running["model"] == LOCAL
    pid = running["output"][0].rpartition("process ")[2]  # the stub's first line
    assert Path(f"/proc/{pid}").exists()
    unloaded = server.http.post("/models/unload", json={"model": LOCAL}).json()
    assert unloaded["state"] == "stopped"
    assert not Path(f"/proc/{pid}").exists()
    assert server.http.get("/running").json() == []


def test_load_of_a_remote_model_is_refused(server):
    reply = server.http.post("/models/load", json={"model": FAR})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "model")


def test_node_is_added_drained_and_removed(server):
    with stub_thread() as new_model:
        new_model.models = ["new"]
        added = server.http.post("/nodes", json={"id": "team/new", "url": new_model.url, "seats": 2})
        assert (added.status_code, added.json()["id"]) == (201, "team/new")
        until(lambda: node(server, "team/new")["state"] == "up")
        answer = server.http.post(STREAMING[0], content=relay_body("new"))
        assert (answer.status_code, len(new_model.jobs)) == (200, 1)
        assert server.http.post("/nodes", json={"id": "team/new", "url": new_model.url}).status_code == 400
        assert server.http.post("/nodes/team/new/drain").json()["state"] == "draining"
        assert server.http.delete("/nodes/team/new").status_code == 200
        assert server.http.delete("/nodes/team/new").status_code == 404
        assert server.http.post(STREAMING[0], content=relay_body("new")).status_code == 404
        until(lambda: new_model.connections == 0)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.1.2.3"])
def test_server_refuses_its_own_address_as_a_node(server, host):
    url = f"http://{host}:{server.address[1]}/v1"
    before = server.http.get("/nodes").json()
    reply = server.http.post("/nodes", json={"id": "me", "url": url})
    if host == "127.1.2.3":  # the server does not listen there: the node is accepted, and is down
        assert (reply.status_code, reply.json()["state"]) == (201, "down")
        assert server.http.delete("/nodes/me").status_code == 200
    else:
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "url")
        assert f"url: {url} is this server itself" == reply.json()["error"]["message"]
    assert [each["id"] for each in before] == [each["id"] for each in server.http.get("/nodes").json()]


def test_operators_routes_refuse_requests_of_foreign_pages(server):
    page = {"Origin": "http://evil.example"}
    for reply in (
        server.http.post("/models/unload", json={"model": LOCAL}, headers=page),
        server.http.get("/nodes", headers={"Host": "evil.example"}),
    ):
        assert (reply.status_code, reply.json()["error"]["code"]) == (403, "forbidden")
    own = {"Origin": server.url}
    assert server.http.post("/models/unload", json={"model": LOCAL}, headers=own).status_code == 200
