"""A kind of model is one entry for its settings and one for what runs it: this kind repeats its prompts."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import ClassVar

import msgspec
import trio

from fairlead.base.config import MODEL_KINDS, HealthConfig
from fairlead.base.errors import NodeFailed
from fairlead.base.job import Delta
from fairlead.nodes.limits import NodeLimits
from fairlead.nodes.model_process import PROCESS_KINDS, ProcessKind, ProcessOptions
from fairlead.nodes.status import ProcessStatus
from fairlead.server.configfile import read_config
from router.fleet.running_fleet import question, running_fleet


class EchoConfig(msgspec.Struct, frozen=True):
    kind: ClassVar = "echo"
    is_relayed: ClassVar = False
    unlisted: ClassVar = False

    echo: str
    name: str
    aliases: tuple[str, ...] = ()
    ttl_s: float = msgspec.field(default=0.0, name="ttl")
    memory_mb: int | None = None
    preload: bool = False
    send_loading_state: bool | None = None


class EchoProcess:
    pid = gpu = stuck = None

    def __init__(self, options: ProcessOptions) -> None:
        self.id = f"echo:{options.config.name}"
        self.models = frozenset({options.config.name})
        self._prefix = options.config.echo
        self._report = options.report

    def change_health(self, _health: HealthConfig) -> None:
        """It has no health check."""

    def status(self) -> ProcessStatus:
        return ProcessStatus(seats=1, sequences=0)

    async def run(self) -> None:
        self._report(self, NodeLimits(seats=1, max_model_len=100))
        try:
            await trio.sleep_forever()
        finally:
            self._report(self, None)
        raise NodeFailed("unreachable")

    @asynccontextmanager
    async def generate(self, job, into, *, grant=None, seats=None) -> AsyncIterator[None]:
        into.put(Delta(0, f"{self._prefix} {len(job.prompts[0])}", finish_reason="stop"))
        yield


async def test_new_kind_is_read_from_a_file_loaded_and_run(tmp_path, monkeypatch):
    monkeypatch.setitem(MODEL_KINDS, "echo", EchoConfig)
    monkeypatch.setitem(
        PROCESS_KINDS, "echo", ProcessKind(EchoProcess, reports_progress=False, has_group=False)
    )
    file = tmp_path / "config.yaml"
    file.write_text("models: {m: {echo: heard}}")
    async with running_fleet(*read_config(file, {}).config.models) as opened:
        assert await opened.run_job(question()) == "heard 10"
        status = opened.status()
        assert (status.kind, status.node, status.state) == ("echo", "echo:m", "ready")
        await opened.fleet.unload("m")
        assert opened.status().state == "stopped"
