"""The server of batches.py, with a simulated model and steps of a given duration.

    python bench/batches_server.py FOLDER SLOTS STEP_MS

Everything except the child's runner is as in `fairlead serve`. FOLDER has the files and batches. Prints its
port, then every `REPORT_S` a line `seats BATCH FREE TAKEN STOPPED`, all counted from the start: seat-seconds
in which lines of batches held the seats of the model, and in which nothing did; seat-seconds in which
sequences took the engine's slots; and lines that were stopped for other requests.
"""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import structlog
import trio

from fairlead.base.config import BatchesConfig, Config, ModelConfig, demonstration_model
from fairlead.base.errors import Displaced
from fairlead.base.runtime.gc_tuning import freeze
from fairlead.generation.timeline import RequestTimeline
from fairlead.language.text.model import TextModel
from fairlead.nodes.model_process import ModelProcess, ProcessOptions, make_process
from fairlead.router.fleet.fleet import Fleet
from fairlead.server.app import Composition
from fairlead.server.listener.listener import bind, serve_http

CHILD = (sys.executable, str(Path(__file__).with_name("queue_live_child.py")))
NAME = "simulated"
WATCH_S = 0.005
REPORT_S = 0.25


class Silent:
    """A terminal that nobody looks at."""

    def loading(self, model: str, fraction: float | None, stage: str) -> None:
        """Say nothing."""

    def ready(self, url: str, models: object) -> None:
        """Say nothing."""

    def failed(self, model: str, reason: str) -> None:
        """Say nothing: the benchmark ends with an error."""

    def stopping(self) -> None:
        """Say nothing."""


class StoppedLines:
    """Counts the jobs that were stopped for others: takes the place of the request log."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, timeline: RequestTimeline, _load_times: object) -> None:
        """Count a finished job."""
        self.count += timeline.outcome == Displaced.code

    async def run(self) -> None:
        """Do nothing."""


def _make_child(options: ProcessOptions) -> ModelProcess:
    return make_process(replace(options, engine_command=CHILD))


async def main(folder: Path, slots: int, step_ms: int) -> None:
    """Serve until killed."""
    path = Path(f"simulated:slots={slots},step_ms={step_ms}")
    config = Config(
        models=(ModelConfig(path=path, name=NAME, preload=True),),
        batches=BatchesConfig(folder=str(folder)),
        store="none",
    )
    text = replace(TextModel.load(demonstration_model(), name=NAME), path=path, max_model_len=100_000)

    async def read(_model: ModelConfig) -> TextModel:
        return text

    def make_fleet(*arguments: Any, **options: Any) -> Fleet:
        return Fleet(*arguments, **{**options, "read": read, "make_process": _make_child})

    stopped = StoppedLines()
    composition = Composition(
        config,
        Silent(),
        make_fleet=make_fleet,
        request_log=stopped,  # type: ignore[arg-type]
    )
    await composition.prepare()
    sockets = bind("127.0.0.1", 0)

    def loaded(_models: object) -> None:
        freeze()
        print(sockets[0].getsockname()[1], flush=True)

    async with trio.open_nursery() as nursery, composition.running(loaded) as app:
        nursery.start_soon(partial(watch, composition, stopped, slots))
        await serve_http(app, sockets, limits=config.limits, shutdown=composition.draining)


async def watch(composition: Composition, stopped: StoppedLines, slots: int) -> None:
    """Add up what the seats are used for, and print it regularly."""
    batch_s = free_s = taken_s = 0.0
    before = reports_at = trio.current_time()
    while True:
        await trio.sleep(WATCH_S)
        now = trio.current_time()
        passed_s, before = now - before, now
        running = [waiter.ticket.job for waiter in composition.dispatcher.estimator.running()]
        batch_s += passed_s * sum(job.when_idle for job in running)
        free_s += passed_s * (slots - len(running))
        (status,) = composition.fleet.models()
        taken_s += passed_s * (slots - status.engine.slots_free if status.engine is not None else 0)
        if now >= reports_at:
            reports_at = now + REPORT_S
            print(f"seats {batch_s:.3f} {free_s:.3f} {taken_s:.3f} {stopped.count}", flush=True)


if __name__ == "__main__":
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    folder, slots, step_ms = sys.argv[1:]
    trio.run(main, Path(folder), int(slots), int(step_ms))
