"""A front whose dispatcher does not answer, or has an earlier clock, as on different machines."""

from contextlib import asynccontextmanager
from functools import partial

import httpx
import pytest
import trio

from distributed.supervisor.running_server import Announced
from fairlead.base.config import Config, DispatcherConfig, NodeConfig, QueueConfig
from fairlead.server.processes import machines
from nodes.listening import stub

KEY = "a key that only these processes have"


async def _ignore_signals(*_options):
    """Do nothing: a signal would end the tests."""


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """The settings of a dispatcher and its fronts, which share a key and an address where nothing listens."""
    monkeypatch.setattr(machines, "watch_signals", _ignore_signals)
    monkeypatch.setattr(machines, "_end_at_signal", _ignore_signals)
    (tmp_path / "key").write_text(KEY)
    return {"key_file": str(tmp_path / "key")}


@asynccontextmanager
async def front(settings, address, **options):
    """Run a front; return a client of it."""
    config = Config(
        models=(),
        port=0,
        dispatcher=DispatcherConfig(addresses=(address,), **settings),
        queue=QueueConfig(capacity=10, timeout_s=options.pop("timeout_s", 60.0)),
    )
    async with trio.open_nursery() as nursery:
        url = await nursery.start(partial(machines.serve_front, config, Announced()))
        async with httpx.AsyncClient(base_url=url, timeout=30) as client:
            yield client
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def unused_address():
    """Return an address that is reserved, but where nothing listens."""
    with trio.socket.socket() as sock:
        await sock.bind(("127.0.0.1", 0))
        yield f"tcp://127.0.0.1:{sock.getsockname()[1]}"


@asynccontextmanager
async def dispatcher(settings, address, node):
    """Run a dispatcher with one node; return the epoch with which it has started."""
    config = Config(
        models=(),
        dispatcher=DispatcherConfig(listen=address, **settings),
        nodes=(NodeConfig(id="n", url=node),),
    )
    async with trio.open_nursery() as nursery:
        yield await nursery.start(partial(machines.dispatch, config, Announced()))
        nursery.cancel_scope.cancel()


async def test_front_without_a_dispatcher_answers_probes_at_once_and_refuses_jobs_in_the_end(settings):
    async with unused_address() as address, front(settings, address, timeout_s=1.0) as client:
        with trio.fail_after(5):
            health, ready = await client.get("/health"), await client.get("/ready")
        assert (health.status_code, health.json()["status"]) == (200, "ok")
        assert (ready.status_code, ready.json()) == (503, {"status": "loading"})
        job = await client.post("/v1/completions", json={"model": "m", "prompt": "a"})
        assert (job.status_code, job.json()["error"]["code"]) == (503, "no_node")
        assert (await client.get("/v1/models")).status_code == 503


async def test_front_that_is_drained_before_it_had_a_dispatcher_refuses_what_waits_and_ends(settings):
    async with unused_address() as address:
        config = Config(models=(), port=0, dispatcher=DispatcherConfig(addresses=(address,), **settings))
        links = []

        class Link(machines.NoSupervisor):
            def __init__(self):
                super().__init__()
                links.append(self)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(machines, "NoSupervisor", Link)
            with trio.fail_after(20):
                async with trio.open_nursery() as nursery:
                    url = await nursery.start(partial(machines.serve_front, config, Announced()))
                    async with httpx.AsyncClient(base_url=url, timeout=30) as client:

                        async def drain():
                            await trio.sleep(0.3)
                            links[0].drain()

                        nursery.start_soon(drain)
                        job = await client.post("/v1/completions", json={"model": "m", "prompt": "a"})
                        assert job.status_code == 503


async def test_job_that_arrives_before_the_dispatcher_is_served_when_there_is_one(settings):
    async with unused_address() as address:
        pass
    async with stub() as server, front(settings, address) as client, trio.open_nursery() as nursery:
        answers = []

        async def use():
            answers.append(await client.post("/v1/completions", json={"model": "m", "prompt": "a"}))

        nursery.start_soon(use)
        await trio.sleep(0.2)
        assert answers == []
        async with dispatcher(settings, address, server.url):
            with trio.fail_after(20):
                while not answers:  # noqa: ASYNC110  there is no event for it
                    await trio.sleep(0.05)
            assert answers[0].status_code == 200


async def test_dispatcher_that_starts_again_with_an_earlier_clock_serves_the_same_front(
    settings, monkeypatch
):
    async with unused_address() as address:
        pass
    async with stub() as server, front(settings, address) as client:
        epochs = []
        for offset_s in (0, -3600, 0, -3600):
            monkeypatch.setattr(machines.time, "time", lambda offset_s=offset_s: 1.8e9 + offset_s)
            async with dispatcher(settings, address, server.url) as epoch:
                epochs.append(epoch)
                with trio.fail_after(20):
                    job = await client.post("/v1/completions", json={"model": "m", "prompt": "a"})
                assert job.status_code == 200
        assert epochs == [1.8e9, 1.8e9 - 3600] * 2
