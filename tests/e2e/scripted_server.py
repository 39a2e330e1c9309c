"""A server in a thread, with one model that answers with a script."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import trio

from fairlead.base.config import ApiKey, Config, ModelConfig
from fairlead.generation.metrics.job_metrics import JobMetrics, JobStatistics
from fairlead.generation.services import Services
from fairlead.language.text.model import TextModel
from fairlead.server.listener.listener import bind, serve_http
from fairlead.server.routes.routes import Application
from fake_fleet import FakeFleet
from server.routes.conftest import FakeGateway, Script, hello_world

DEMO = Path(__file__).resolve().parents[2] / "src" / "fairlead" / "server" / "demo" / "fairlead-demo"


class Gateway(FakeGateway):
    """Reports statistics without any job."""

    def statistics(self) -> JobStatistics:
        return JobMetrics().statistics()


async def no_wait(_model: str, _tenant: str, _priority: int, _team: str) -> dict[str, Any]:
    """Return the estimate for an empty queue."""
    return {"position": 0, "estimated_wait_s": 0}


@contextmanager
def scripted_server(
    *api_keys: str | ApiKey, script: Script = hello_world, fleet: FakeFleet | None = None
) -> Iterator[tuple[str, Gateway]]:
    """Serve in a thread a model which answers with `script`; with `api_keys`, clients need one of them."""
    model = TextModel.load(DEMO, name="scripted")
    gateway = Gateway(script)
    config = Config(
        models=(ModelConfig(path=DEMO, name="scripted"),),
        api_keys=tuple(ApiKey(key=key) if isinstance(key, str) else key for key in api_keys),
    )
    services = Services(
        config=config,
        gateway=gateway,
        fleet=fleet or FakeFleet(["scripted"]),
        models={"scripted": model},
        aliases={},
        ready=lambda: True,
        queue_statistics=lambda: {"waiting": 0, "running": 0, "capacity": 100, "seats": 8},
        estimate=no_wait,
    )
    (listening,) = bind("127.0.0.1", 0)
    url = "http://{}:{}".format(*listening.getsockname())
    began = threading.Event()
    ends: list[Callable[[], None]] = []

    async def serve() -> None:
        with trio.CancelScope() as scope:
            token = trio.lowlevel.current_trio_token()
            ends.append(lambda: token.run_sync_soon(scope.cancel))
            began.set()
            await serve_http(Application(services), [listening], limits=config.limits, shutdown=trio.Event())

    thread = threading.Thread(target=partial(trio.run, serve))
    thread.start()
    began.wait()
    try:
        yield url, gateway
    finally:
        ends[0]()
        thread.join()
