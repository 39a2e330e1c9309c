"""The ASGI application's lifespan: startup, failures, shutdown, and its configuration."""

import json
from contextlib import asynccontextmanager

import pytest
import trio
from msgspec.structs import replace
from structlog.testing import capture_logs

from fairlead.base.config import NO_OPERATOR, ApiKey, Config, ConfigError, Limits, ModelConfig, NodeConfig
from fairlead.server import asgi
from fairlead.server.asgi import AsgiApp, create_app
from fairlead.server.routes.request import json_response
from fairlead.server.routes.routes import Application

BLOCKED = "/version"
EMPTY = Config(models=())


async def call(app, path="/health", **scope) -> tuple[int, dict]:
    """Send a GET directly to the application; return the status and the JSON body."""
    sent = []
    received = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive():
        if not received:
            await trio.sleep_forever()
        return received.pop()

    async def send(message):
        sent.append(message)

    request = {
        "type": "http",
        "method": "GET",
        "scheme": "http",
        "http_version": "1.1",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", b"localhost")],
        **scope,
    }
    await app(request, receive, send)
    return sent[0]["status"], json.loads(b"".join(message["body"] for message in sent[1:]))


class Server:
    """Runs a lifespan as a server does."""

    def __init__(self) -> None:
        self.messages: list[dict] = []
        self.has_sent = trio.Event()
        self._send, self._receive = trio.open_memory_channel(2)
        self._send.send_nowait({"type": "lifespan.startup"})

    def shut_down(self) -> None:
        self._send.send_nowait({"type": "lifespan.shutdown"})

    async def run(self, app) -> None:
        async def send(message):
            self.messages.append(message)
            self.has_sent.set()

        await app({"type": "lifespan"}, self._receive.receive, send)


async def test_requests_without_a_lifespan_get_503_with_the_reason():
    status, body = await call(create_app(EMPTY))
    assert (status, body["error"]["code"]) == (503, "not_started")
    assert "must run its lifespan" in body["error"]["message"]


async def test_routes_answer_between_startup_and_shutdown_and_after_a_restart(autojump_clock):
    app = create_app(EMPTY)
    for _ in range(2):
        async with app.test_app() as running:
            client = running.test_client()
            assert (await client.get("/ready")).status_code == 200
            assert (await call(app, "/ready"))[0] == 200
            assert (await client.post("/v1/chat/completions", json={"model": "m"})).status_code == 404
        assert (await call(app))[0] == 503


@pytest.mark.parametrize(("role", "warnings"), [("user", 1), ("operator", 0)])
async def test_keys_of_which_none_is_an_operators_are_warned_about(autojump_clock, role, warnings):
    app = create_app(replace(EMPTY, api_keys=(ApiKey("sk-1", role=role),)))
    with capture_logs() as log:
        async with app.test_app():
            pass
    assert len([line for line in log if line["event"] == NO_OPERATOR]) == warnings


async def test_all_routes_belong_to_the_quart_application():
    app = create_app(EMPTY)
    async with app.test_app():
        assert isinstance(app._quart, Application)
        paths = {path for _, path in app._quart._views}
        assert {"/v1/chat/completions", "/v1/embeddings", "/tokenize", "/metrics", "/"} <= paths
        assert all(map(callable, app._quart._views.values()))
        assert not app._quart._bypasses_quart


async def test_client_without_a_lifespan_is_refused():
    with pytest.raises(RuntimeError, match="run the lifespan first"):
        create_app(EMPTY).test_client()


async def test_app_can_be_mounted_by_starlette(autojump_clock):
    app = create_app(EMPTY)
    outer_lifespan = app.lifespan  # Starlette calls it with the outer application

    async with outer_lifespan(object()):
        assert (await call(app, "/llm/ready", root_path="/llm"))[0] == 200
        assert (await call(app, "/ready", root_path="/llm"))[0] == 200
        assert (await call(app, "/other/ready", root_path="/llm"))[0] == 404
        assert (await call(app, "/llm/openapi.json", root_path="/llm"))[1]["servers"] == [{"url": "/llm"}]
        assert "servers" not in (await call(app, "/openapi.json"))[1]
    assert (await call(app))[0] == 503


async def test_second_concurrent_lifespan_is_refused(autojump_clock):
    app = create_app(EMPTY)
    async with app.test_app():
        server = Server()
        await server.run(app)
        (message,) = server.messages
        assert message["type"] == "lifespan.startup.failed"
        assert "this application runs already" in message["message"]
        assert (await call(app))[0] == 200


async def test_error_in_the_block_ends_the_server_and_is_raised(autojump_clock):
    app = create_app(EMPTY)
    with pytest.raises(ExceptionGroup) as raised:
        async with app.lifespan():
            raise LookupError("the outer application's")
    assert raised.group_contains(LookupError)
    assert (await call(app))[0] == 503


async def test_limits_of_the_configuration_are_enforced(autojump_clock):
    app = create_app(Config(models=(), limits=Limits(body_bytes=10)))
    async with app.test_app() as running:
        reply = await running.test_client().post("/v1/chat/completions", data=b"x" * 11)
        assert (reply.status_code, (await reply.get_json())["error"]["code"]) == (413, "body_too_large")


async def test_keys_are_required_except_for_probes(autojump_clock):
    app = create_app(Config(models=(), api_keys=(ApiKey(key="sk-1"),)))
    async with app.test_app() as running:
        client = running.test_client()
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/queue")).status_code == 401
        assert (await client.get("/queue", headers={"Authorization": "Bearer sk-1"})).status_code == 200


async def test_websocket_is_closed(autojump_clock):
    app = create_app(EMPTY)
    sent = []

    async def receive():
        return {"type": "websocket.connect"}

    async def send(message):
        sent.append(message["type"])

    async with app.test_app():
        await app({"type": "websocket", "path": "/"}, receive, send)
    assert sent == ["websocket.close"]


# Shutting down -------------------------------------------------------------------------------------


@asynccontextmanager
async def running_request(app, path: str, answered: list):
    """Start a request before the block runs; wait for its answer after the block."""
    async with trio.open_nursery() as nursery:

        async def run():
            answered.append(await call(app, path))

        nursery.start_soon(run)
        await trio.testing.wait_all_tasks_blocked()
        yield


def blocked_route(app: AsgiApp) -> trio.Event:
    """Give a route a view that answers once the event is set."""
    unblock = trio.Event()

    async def blocked(_request):
        await unblock.wait()
        return json_response({"blocked": False})

    app._quart._views["GET", BLOCKED] = blocked
    return unblock


async def test_shutdown_waits_for_running_requests(autojump_clock):
    app, server, answered = create_app(EMPTY), Server(), []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.run, app)
        await server.has_sent.wait()
        unblock = blocked_route(app)
        async with running_request(app, BLOCKED, answered):
            server.shut_down()
            await trio.sleep(20)
            assert [message["type"] for message in server.messages] == ["lifespan.startup.complete"]
            unblock.set()
    assert answered == [(200, {"blocked": False})]
    assert [message["type"] for message in server.messages][1:] == ["lifespan.shutdown.complete"]


async def test_request_beyond_the_drain_timeout_gets_503(autojump_clock):
    app, server, answered = create_app(Config(models=(), limits=Limits(drain_s=10))), Server(), []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.run, app)
        await server.has_sent.wait()
        blocked_route(app)
        async with running_request(app, BLOCKED, answered):
            server.shut_down()
            began = trio.current_time()
    assert [(status, body["error"]["code"]) for status, body in answered] == [(503, "draining")]
    assert trio.current_time() - began == pytest.approx(10)


async def test_event_stream_ends_when_the_server_drains(autojump_clock):
    app = create_app(EMPTY)
    async with app.test_app() as running:
        async with running.test_client().request("/events") as stream:
            await stream.send_complete()
            assert (await stream.receive()).startswith(b"event: history")
            app.drain()
            app.drain()
        response = await stream.as_response()
        assert response.status_code == 200
    app.drain()  # has no effect without a lifespan


async def test_failure_of_the_server_is_raised_in_the_lifespan_and_ends_requests(monkeypatch):
    fails = trio.Event()

    async def run(_dispatcher):
        await fails.wait()
        raise ZeroDivisionError

    monkeypatch.setattr("fairlead.server.app.Dispatcher.run", run)
    app, server, answered = create_app(EMPTY), Server(), []
    with pytest.RaisesGroup(ZeroDivisionError):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.run, app)
            await server.has_sent.wait()
            blocked_route(app)
            with trio.CancelScope(shield=True):
                async with running_request(app, BLOCKED, answered):
                    fails.set()
    assert [(status, body["error"]["code"]) for status, body in answered] == [(503, "draining")]
    status, body = await call(app)
    assert (status, body["error"]["message"]) == (503, "Fairlead has been shut down here")


# Failed startups -----------------------------------------------------------------------------------


async def failure_of(app) -> str:
    server = Server()
    await server.run(app)
    (message,) = server.messages
    assert message["type"] == "lifespan.startup.failed"
    assert (await call(app))[0] == 503
    return message["message"]


async def test_startup_fails_with_the_invalid_setting_of_a_file(tmp_path):
    file = tmp_path / "fairlead.yaml"
    file.write_text("queue:\n  capacity: -1\n")
    assert await failure_of(create_app(file)) == f"{file}:2: queue.capacity: must be at least 0"


async def test_startup_fails_if_the_file_is_missing(tmp_path):
    assert str(tmp_path / "none.yaml") in await failure_of(create_app(str(tmp_path / "none.yaml")))


async def test_startup_fails_if_a_model_cannot_be_read(tmp_path):
    model = ModelConfig(path=tmp_path, name="empty", preload=True)
    assert "config.json" in await failure_of(create_app(Config(models=(model,))))


async def test_startup_fails_with_the_type_of_an_unexpected_error():
    def broken():
        raise ZeroDivisionError("a bug")

    assert await failure_of(AsgiApp(broken, standalone=False)) == "ZeroDivisionError: a bug"


def test_lifespan_and_requests_fail_without_trio_with_the_reason():
    app = create_app(EMPTY)
    sent = []

    async def receive():
        return {"type": "lifespan.startup"}

    async def send(message):
        sent.append(message)

    for scope in ({"type": "lifespan"}, {"type": "http", "path": "/"}):
        with pytest.raises(StopIteration):
            app(scope, receive, send).send(None)
    assert "hypercorn --worker-class trio" in sent[0]["message"]
    assert sent[1]["status"] == 503
    assert b"hypercorn --worker-class trio" in sent[2]["body"]


def test_watching_requires_a_file():
    with pytest.raises(ConfigError, match="watch_config: needs a file"):
        create_app(EMPTY, watch_config=True)


# Sources of the configuration ----------------------------------------------------------------------


def test_model_and_settings_are_read_from_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("FAIRLEAD_MODEL", str(tmp_path))
    monkeypatch.setenv("FAIRLEAD_HOST", "0.0.0.0")
    monkeypatch.setenv("FAIRLEAD_API_KEY", "sk-1 ana=sk-2")
    config, source = asgi._read_environment()
    assert config == Config(
        models=(ModelConfig(path=tmp_path, name=tmp_path.name, preload=True),),
        host="0.0.0.0",
        api_keys=(ApiKey(key="sk-1"), ApiKey(key="sk-2", user="ana")),
        store="none",  # that of all tests
    )
    assert source is None


def test_demonstration_model_is_the_default():
    config, _ = asgi._read_environment()
    assert [model.name for model in config.models] == ["fairlead-demo"]


NODE = NodeConfig(id="remote", url="http://127.0.0.1:9")
FILE = "nodes: [{id: remote, url: 'http://127.0.0.1:9'}]\napiKeys: [sk-file]\n"


@pytest.fixture
def file(tmp_path, monkeypatch):
    file = tmp_path / "fairlead.yaml"
    file.write_text(FILE)
    file.chmod(0o600)
    monkeypatch.setenv("FAIRLEAD_CONFIG", str(file))
    return file


def test_environment_overrides_the_file_that_it_names(monkeypatch, file):
    monkeypatch.setenv("FAIRLEAD_API_KEY", "sk-1")
    config, source = asgi._read_environment()
    assert config == Config(models=(), nodes=(NODE,), api_keys=(ApiKey(key="sk-1"),), store="none")
    assert source is None


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"FAIRLEAD_CONFIG": "/no/such/file"}, "FAIRLEAD_CONFIG"),
        ({"FAIRLEAD_MODEL": "/no/such/folder"}, "FAIRLEAD_MODEL"),
        ({"FAIRLEAD_PORT": "http"}, "FAIRLEAD_PORT"),
        ({"FAIRLEAD_WATCH_CONFIG": "maybe"}, "FAIRLEAD_WATCH_CONFIG"),
        ({"FAIRLEAD_WATCH_CONFIG": "true"}, "FAIRLEAD_WATCH_CONFIG: needs FAIRLEAD_CONFIG"),
    ],
)
async def test_startup_fails_with_the_invalid_variable(monkeypatch, variables, named):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert named in await failure_of(create_app())


@pytest.mark.parametrize("from_environment", [True, False])
async def test_watched_file_is_read_again_after_a_change(monkeypatch, file, from_environment):
    monkeypatch.setattr(
        "fairlead.router.fleet.reload.POLL_INTERVAL_S", 0.01
    )  # a thread reads the file, in real time
    if from_environment:
        monkeypatch.setenv("FAIRLEAD_WATCH_CONFIG", "true")
    app = create_app() if from_environment else create_app(file, watch_config=True)
    async with app.test_app() as running:
        client = running.test_client()
        new = {"Authorization": "Bearer sk-new"}
        assert (await client.get("/queue", headers=new)).status_code == 401
        file.write_text(FILE.replace("sk-file", "sk-new"))
        with trio.fail_after(60):
            while (await client.get("/queue", headers=new)).status_code != 200:  # noqa: ASYNC110  # another thread
                await trio.sleep(0.01)
