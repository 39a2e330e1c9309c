"""The responses of a complete server to clients and a load balancer while its model hangs."""

import json
from contextlib import asynccontextmanager
from functools import partial

import httpx
import pytest
import trio

from e2e.slow_motion import stopped
from fairlead.base.config import Config, ModelConfig, demonstration_model
from fairlead.router.fleet.fleet import Fleet
from fairlead.server import app

pytestmark = pytest.mark.slow


class Silent:
    """An announcer which prints nothing."""

    def __getattr__(self, name: str):
        return lambda *_: None


@asynccontextmanager
async def server(monkeypatch, **model: object):
    """Serve the demonstration model on a free port; yield a client and a function for the child's pid."""
    fleets = []

    def recording_fleet(*arguments, **options):
        fleets.append(Fleet(*arguments, **options))
        return fleets[-1]

    monkeypatch.setattr(app, "Composition", partial(app.Composition, make_fleet=recording_fleet))
    card = ModelConfig(path=demonstration_model(), name="m", preload=True, **model)
    config = Config(models=(card,), port=0)
    async with trio.open_nursery() as nursery:
        with trio.fail_after(60):
            url = await nursery.start(app.serve, config, Silent())
            async with httpx.AsyncClient(base_url=url, timeout=60) as client:
                yield client, lambda: fleets[0]._local["m"].pid
        nursery.cancel_scope.cancel()


async def until(client: httpx.AsyncClient, path: str, status: int) -> httpx.Response:
    with trio.fail_after(60):
        while (reply := await client.get(path)).status_code != status:
            await trio.sleep(0.05)
    return reply


async def test_health_is_503_while_a_model_is_stuck(monkeypatch):
    # A stopped process does not act on SIGTERM: with this wait it is stuck until the checks are done.
    monkeypatch.setattr("fairlead.nodes.engines.client.END_WAIT_S", 3600)
    ask = {"model": "m", "prompt": "one two", "max_tokens": 8, "temperature": 0}
    async with server(monkeypatch, watchdog_s=4) as (client, pid):
        assert (await client.get("/health")).status_code == 200
        first = (await client.post("/v1/completions", json=ask)).json()["choices"]
        replies = []
        async with trio.open_nursery() as clients:
            with stopped(pid()):
                clients.start_soon(partial(_post, client, {**ask, "stream": True}, replies))
                health = await until(client, "/health", 503)
                assert health.json()["status"] == "stuck"
                assert "no progress for 4 s" in health.json()["models"]["m"]
                assert (await client.get("/ready")).status_code == 503
                assert replies == []
        assert [(200, [choice["text"] for choice in first])] == replies
        await until(client, "/health", 200)
        await until(client, "/ready", 200)
        assert first == (await client.post("/v1/completions", json=ask)).json()["choices"]
        (status,) = (await client.get("/running")).json()
        assert (status["counts"]["restarts"], status["problem"]) == (1, None)
        assert status["engine"]["mean_step_ms"] > 0


async def _post(client: httpx.AsyncClient, body: dict, replies: list) -> None:
    reply = await client.post("/v1/completions", json=body)
    chunks = [json.loads(event[6:]) for event in reply.text.split("\n\n") if event.startswith("data: {")]
    texts = [choice["text"] for chunk in chunks for choice in chunk["choices"]]
    replies.append((reply.status_code, ["".join(texts)]))
