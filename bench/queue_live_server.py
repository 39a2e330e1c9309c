"""The server of queue_live.py, with a simulated model and steps of a given duration.

    python bench/queue_live_server.py SLOTS STEP_MS CAPACITY TIMEOUT_S FAIRNESS

Everything except the child's runner is as in `fairlead serve`: HTTP server, routes, queue, child process and
frames. Prints its port, then a line `free SLOTS TIME` whenever the number of free slots has changed, checked
every `WATCH_S`. The time is that of the monotonic clock, in seconds.
"""

import sys
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import structlog
import trio

from fairlead.base.config import Config, ModelConfig, QueueConfig, demonstration_model
from fairlead.base.runtime.gc_tuning import freeze
from fairlead.generation.gateway import Gateway
from fairlead.generation.services import Services
from fairlead.language.text.model import TextModel
from fairlead.nodes.model_process import ModelProcess, ProcessOptions, make_process
from fairlead.router.dispatch.dispatcher import Dispatcher
from fairlead.router.fleet.fleet import Fleet
from fairlead.router.fleet.node_registry import NodeRegistry
from fairlead.server.listener.listener import bind, serve_http
from fairlead.server.routes.routes import Application

CHILD = (sys.executable, str(Path(__file__).with_name("queue_live_child.py")))
NAME = "simulated"
WATCH_S = 0.002


def _make_child(options: ProcessOptions) -> ModelProcess:
    return make_process(replace(options, engine_command=CHILD))


async def main(slots: int, step_ms: int, queue: QueueConfig) -> None:
    """Serve until killed."""
    path = Path(f"simulated:slots={slots},step_ms={step_ms}")
    model = ModelConfig(path=path, name=NAME, preload=True)
    config = Config(models=(model,), queue=queue)
    text = replace(TextModel.load(demonstration_model(), name=NAME), path=path, max_model_len=100_000)

    async def read(_model: ModelConfig) -> TextModel:
        return text

    dispatcher = Dispatcher(queue)
    nodes = NodeRegistry(dispatcher.scheduler)
    fleet = Fleet(config, dispatcher, nodes, read=read, make_process=_make_child)
    await fleet.prepare()
    services = Services(
        config=config,
        gateway=Gateway(dispatcher, nodes, request_timeout_s=600),
        fleet=fleet,
        models=fleet.catalog.texts,
        aliases={},
        ready=lambda: fleet.is_ready,
        estimate=dispatcher.estimate,
        queue_statistics=lambda: msgspec.structs.asdict(dispatcher.statistics()),
    )
    sockets = bind("127.0.0.1", 0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(dispatcher.run)
        await nursery.start(fleet.run)
        app = Application(services)
        freeze()
        print(sockets[0].getsockname()[1], flush=True)
        nursery.start_soon(watch, fleet)
        await serve_http(app, sockets, limits=config.limits, shutdown=trio.Event())


async def watch(fleet: Fleet) -> None:
    """Print the number of free slots whenever it changes."""
    printed: int | None = 0  # the number before the child's first report
    while True:
        (status,) = fleet.models()
        free = None if status.engine is None else status.engine.slots_free
        if free != printed:
            print(f"free {free} {time.monotonic():.6f}", flush=True)
            printed = free
        await trio.sleep(WATCH_S)


if __name__ == "__main__":
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    slots, step_ms, capacity, timeout_s, fairness = sys.argv[1:]
    trio.run(
        main,
        int(slots),
        int(step_ms),
        QueueConfig(capacity=int(capacity), timeout_s=float(timeout_s), fairness=fairness),  # type: ignore[arg-type]
    )
