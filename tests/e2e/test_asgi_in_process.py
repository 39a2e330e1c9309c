"""`fairlead.asgi` in the test's own process, with a real model: Quart-Trio's test client, and Hypercorn."""

import json
from contextlib import asynccontextmanager

import hypercorn.config
import hypercorn.trio
import pytest
import trio

from e2e.own_copy import own_copy
from e2e.slow_motion import stopped
from e2e.stock_server import documented
from fairlead.base.config import Config, ModelConfig, QueueConfig, demonstration_model
from fairlead.server.asgi import create_app

MODEL = "fairlead-demo"
CARD = ModelConfig(path=demonstration_model(), name=MODEL, preload=True, slots=1, watchdog_s=3600)
CONFIG = Config(models=(CARD,), queue=QueueConfig(timeout_s=3600))
CHAT = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Count from 1 to 5."}],
    "temperature": 0,
}
LONG = {"model": MODEL, "prompt": "Count", "max_tokens": 900, "ignore_eos": True}


async def test_documented_test_passes():
    module: dict = {}
    exec(documented("test_counting.py"), module)
    await module["test_the_model_counts"]()


async def test_quart_trios_test_client_chats_and_streams():
    async with create_app(CONFIG).test_app() as running:
        client = running.test_client()
        assert await (await client.get("/ready")).get_json() == {"status": "ready"}
        whole = await (await client.post("/v1/chat/completions", json=CHAT)).get_json()
        assert whole["choices"][0]["message"]["content"] == "1, 2, 3, 4, 5"
        request = client.request("/v1/chat/completions", method="POST")
        body = b""
        async with request as stream:
            await stream.send(json.dumps({**CHAT, "stream": True}).encode())
            await stream.send_complete()
            while not body.endswith(b"data: [DONE]\n\n"):
                body += await stream.receive()
        chunks = [json.loads(event[6:]) for event in body.split(b"\n\n")[:-2]]
        texts = [chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks]
        assert "".join(texts) == "1, 2, 3, 4, 5"


async def test_model_that_the_environment_names_is_served(monkeypatch, tmp_path):
    monkeypatch.setenv("FAIRLEAD_MODEL", str(own_copy(tmp_path / "named-so")))
    async with create_app().test_app() as running:
        chat = CHAT | {"model": "named-so"}
        answer = await (await running.test_client().post("/v1/chat/completions", json=chat)).get_json()
    assert answer["choices"][0]["message"]["content"] == "1, 2, 3, 4, 5"


@asynccontextmanager
async def hypercorn_serving(app):
    """Serve on a free port with an unmodified Hypercorn; yield the port."""
    config = hypercorn.config.Config()
    config.bind = ["127.0.0.1:0"]
    config.accesslog = config.errorlog = None
    shutdown = trio.Event()
    async with trio.open_nursery() as nursery:
        serve = lambda task_status: hypercorn.trio.serve(  # noqa: E731
            app, config, shutdown_trigger=shutdown.wait, task_status=task_status
        )
        with trio.fail_after(60):
            (bind,) = await nursery.start(serve)
        yield int(bind.rpartition(":")[2])
        shutdown.set()


def post(body: dict) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


@pytest.mark.parametrize("stream", [True, False])
async def test_disconnected_client_frees_its_seat_at_once_and_its_slot_within_two_steps(stream):
    app = create_app(CONFIG)
    async with hypercorn_serving(app) as port:
        composition = app._composition
        managed_model = composition.fleet._local[MODEL]
        statistics = managed_model.instance.node.statistics
        client = await trio.open_tcp_stream("127.0.0.1", port)
        await client.send_all(post({**LONG, "stream": stream, "n": 8}))
        with trio.fail_after(60):
            await _reached(lambda: statistics().running)
            with stopped(managed_model.pid):
                steps = await _stable_value(lambda: statistics().steps)
                await client.aclose()
                await _reached(lambda: composition.dispatcher.statistics().running == 0)
            await _reached(lambda: statistics().running + statistics().pending == 0)
        assert statistics().steps - steps <= 2


async def _reached(holds) -> None:
    while not holds():
        await trio.sleep(0.001)


async def _stable_value(value) -> int:
    """Return a value once it no longer changes, because all pending messages have arrived."""
    before = -1
    while value() != before:
        before = value()
        await trio.sleep(0.1)
    return before
