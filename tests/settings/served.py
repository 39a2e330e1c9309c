"""One real server with its configuration file on a simulated machine, and the requests of its clients."""

import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import trio
from trio.testing import MockClock

from fairlead.base.config import Config, demonstration_model
from fairlead.language.text.model import TextModel
from fairlead.server.configfile import read_config
from settings import other_package
from settings.documents import Document
from settings.engine_child import EngineChild, EnginePlan
from settings.simulated_upstream import SimulatedUpstream
from simulation import entropy, virtual_time
from simulation.boundary import System
from simulation.engine_child import ChildPlan
from simulation.http_client import Answer, Client, request
from simulation.parent import Parent
from simulation.processes import Process
from simulation.supervised import SupervisedServer

Scenario = Callable[["Served"], Awaitable[None]]

LONGEST_S = 3600.0
END_S = 600.0  # of the server, after the scenario
START_S = 30.0
RELOAD_S = 5.0  # a watched file is read within two seconds, and a model loaded again within three
BUFFER_BYTES = 1 << 24  # bytes in transit: enough that whatever a client sends arrives at once
NODE = ("10.0.2.1", 8080)
SECOND = ("10.0.2.2", 8080)


class Pending:
    """A request in progress. `ended_s` is when its answer was complete, by the virtual clock."""

    def __init__(self) -> None:
        self.answer: Answer | None = None
        self.began_s = trio.current_time()
        self.ended_s = float("inf")
        self._over = trio.Event()
        self.request_scope = trio.CancelScope()

    def __repr__(self) -> str:
        answer = self.answer
        text = "no answer" if answer is None else f"{answer.status} {answer.body[:200]!r}"
        return f"<{self.began_s:.2f} to {self.ended_s:.2f} s: {text}>"

    @property
    def took_s(self) -> float:
        """The seconds from the request to the end of its answer."""
        return self.ended_s - self.began_s

    @property
    def is_over(self) -> bool:
        """Whether the answer is complete, or the connection was closed."""
        return self._over.is_set()

    async def done(self) -> Answer:
        """Wait for the answer."""
        await self._over.wait()
        assert self.answer is not None, "the connection was closed without an answer"
        return self.answer

    def _end(self, answer: Answer | None) -> None:
        self.answer, self.ended_s = answer, trio.current_time()
        self._over.set()


class EngineParent(Parent):
    """The server with the real engine in its children, and some environment variables."""

    environment: Mapping[str, str] = {}
    arguments: Callable[[Config], Config] = staticmethod(lambda config: config)

    def _read(self, running: Config | None = None) -> Config:
        return self.arguments(read_config(self.file, self.environment, running=running).config)  # type: ignore[arg-type]


class EngineServer(EngineParent, SupervisedServer):
    """The same as several processes, of which the supervisor reads the configuration."""


class Served:
    """A running server, and the simulated machine and servers around it.

    `upstream` is another server: it listens at `NODE`, and wherever a command starts its server. `second`
    listens at `SECOND`. `engine` is the plan of our engine's children. `stopped` has the ids of the processes
    that `stopper` was called for, and `environments` has the variables of each process.
    """

    clients: trio.Nursery

    def __init__(
        self,
        system: System,
        parent: EngineParent | EngineServer,
        engine: EnginePlan,
        added: Document,
    ) -> None:
        self.system = system
        self._added = added
        self.parent = parent
        self.engine = engine
        self.upstream = SimulatedUpstream()
        self.second = SimulatedUpstream()
        self.stopped: list[int] = []
        self.environments: dict[int, Mapping[str, str]] = {}
        self._hosts = 0

    async def fetch(self, path: str, body: object = None, **options: Any) -> Answer:
        """Make a request and return its answer; options as for `start`."""
        return await self.start(path, body, **options).done()

    def start(
        self,
        path: str,
        body: object = None,
        *,
        method: str = "",
        host: str = "",
        headers: dict[str, str] | None = None,
        key: str = "",
    ) -> Pending:
        """Begin a request from `host`, by default a new address; with an API key if one is given."""
        pending = Pending()
        self._hosts += 1
        headers = {**(headers or {}), **({"Authorization": f"Bearer {key}"} if key else {})}
        data = request(method or ("GET" if body is None else "POST"), path, body, headers=headers, close=True)
        if "Host" in headers:
            data = data.replace(b"Host: 10.0.0.1\r\n", b"", 1)
        self.clients.start_soon(self._exchange, pending, data, host or f"10.0.3.{self._hosts}")
        return pending

    def complete(self, prompt: str = "hello", *, tokens: int = 5, model: str = "m", **more: Any) -> Pending:
        """Begin a completion of exactly this many tokens, as the tenant `user`."""
        options = {name: more.pop(name) for name in ("headers", "key", "host") if name in more}
        fields = {
            "model": model,
            "prompt": prompt,
            "max_tokens": tokens,
            "ignore_eos": True,
            "temperature": 0,
        }
        return self.start("/v1/completions", fields | more, **options)

    async def get_json(self, path: str, **options: Any) -> Any:
        """Return the JSON document of a GET."""
        answer = await self.fetch(path, **options)
        assert answer.status == 200, answer
        return answer.document

    async def until(self, reached: Callable[[], object], within_s: float = 60.0) -> None:
        """Wait until a condition holds."""
        with trio.move_on_after(within_s):
            while not reached():  # noqa: ASYNC110  # the condition may be anything
                await trio.sleep(0.05)
        assert reached(), f"it is not so after {within_s:g} s"

    async def state(self, model: str, *states: str) -> None:
        """Wait until a model is in one of these states."""
        last_state = ""
        with trio.move_on_after(120):
            while (last_state := (await self.states()).get(model, "unknown")) not in states:  # noqa: ASYNC110
                await trio.sleep(0.1)
        assert last_state in states, f"{model} is {last_state}"

    async def states(self) -> dict[str, str]:
        """Return the state of each model."""
        nodes = await self.get_json("/nodes")
        return {model: node["state"] for node in nodes for model in node["models"]}

    def connect(self, host: str = "10.0.4.1") -> Client:
        """Open a connection, for requests that `start` cannot make."""
        return Client(self.system.network.open_connection(host, buffer_bytes=BUFFER_BYTES))

    async def reload(self, document: Document) -> list[str]:
        """Change the configuration file; return the settings that are reported as needing a restart."""
        seen = len(self.log)
        self.rewrite(document)
        await trio.sleep(RELOAD_S)
        events = {event["event"]: event for event in self.log[seen:]}
        assert "configuration reloaded" in events, f"the configuration was not reloaded: {events}"
        return list(events.get("these settings need a restart", {}).get("settings", ()))

    def rewrite(self, document: Document) -> None:
        """Change the configuration file, but not the number of fronts."""
        self.parent.rewrite(document | self._added)

    def add_programs(self) -> None:
        """Let the server start the programs of its models: our engine, `model-server` and `stopper`."""
        programs = self.system.processes.programs

        async def engine(process: Process, _args: Sequence[str]) -> int:
            return await EngineChild(process, self.engine).run()

        async def model_server(process: Process, args: Sequence[str]) -> int:
            process.ignores_term = self.upstream.ignores_term
            await process.pause(1.0)
            address = ("127.0.0.1", int(args[1]))
            self.system.network.serve(address, self.upstream.serve)
            try:
                await trio.sleep_forever()
            finally:
                self.system.network.stop_serving(address)
            return 0

        async def stopper(_process: Process, args: Sequence[str]) -> int:
            self.stopped.append(int(args[1]))
            return 0

        opened = self.system.processes.open

        async def open_process(command: Sequence[str], *, env: Any = None, **options: Any) -> Process:
            process = await opened(command, **options)
            self.environments[process.pid] = env
            return process

        self.system.processes.open = open_process  # type: ignore[method-assign]
        programs |= {"fairlead.engine.worker.main": engine, "model-server": model_server, "stopper": stopper}

    def processes_of(self, program: str) -> list[Process]:
        """Return the running processes of a program, or of a name: "front 1", "dispatcher 1"."""
        return [process for process in self.system.processes.running if program in process.args]

    def kill(self, name: str) -> None:
        """Kill the process of this name."""
        (process,) = self.processes_of(name)
        process.send_signal(signal.SIGKILL)

    @property
    def log(self) -> list[Document]:
        """The events of the log."""
        return self.system.log.events

    async def _exchange(self, pending: Pending, data: bytes, host: str) -> None:
        client = Client(self.system.network.open_connection(host, buffer_bytes=BUFFER_BYTES))
        answer = None
        try:
            with pending.request_scope:
                answer = await client.fetch(data)
        finally:
            client.leave()
            pending._end(answer)


def serve(
    scenario: Scenario,
    document: Document,
    *,
    fronts: int = 1,
    environment: Mapping[str, str] | None = None,
    arguments: Callable[[Config], Config] | None = None,
) -> None:
    """Run a scenario on a server with this configuration, once it is ready. Raises what the scenario raises.

    With several `fronts`, it is a supervisor with a dispatcher and these, which get connections in turn.
    `arguments` changes the configuration as the command line does. An `AssertionError` comes from the
    scenario, or means that the scenario has not ended.
    """
    added = {} if fronts == 1 else {"fronts": fronts}
    kind = EngineParent if fronts == 1 else EngineServer

    async def run(clock: MockClock) -> None:
        entropy.use(entropy.Source(0, clock.current_time))
        system = System(0)
        engine = EnginePlan()
        parent = kind(system, document | added, plan_of=lambda _: ChildPlan(), servers={}, is_watched=True)
        parent.environment = environment or {}
        if arguments is not None:
            parent.arguments = arguments
        system.network.names["localhost"] = "127.0.0.1"
        served = Served(system, parent, engine, added)
        served.add_programs()
        system.network.serve(NODE, served.upstream.serve)
        system.network.serve(SECOND, served.second.serve)
        with system.installed(), other_package.installed(), patch.object(TextModel, "load", _load_text):
            async with trio.open_nursery() as machine:
                await machine.start(system.machine.run)
                async with trio.open_nursery() as served.clients, trio.open_nursery() as running:
                    await running.start(parent.run)
                    with trio.move_on_after(LONGEST_S) as bound:
                        await _started(parent)
                        await scenario(served)
                    running.cancel_scope.cancel()  # before the machine, so that processes can end
                    served.clients.cancel_scope.cancel()
                assert not bound.cancelled_caught, f"it is not over after {LONGEST_S:g} s"
                machine.cancel_scope.cancel()

    virtual_time.run(run, 0, longest_s=LONGEST_S + END_S)


_load = TextModel.load
_texts: dict[str, TextModel] = {}


def _load_text(path: Path, **options: Any) -> TextModel:
    """Replace `TextModel.load`: read the demonstration model once, as each front of each server would do it.

    That takes 14 ms, a third of a server's start, and depends on its arguments only.
    """
    if path != demonstration_model():
        return _load(path, **options)
    key = repr(sorted(options.items()))
    if key not in _texts:
        _texts[key] = _load(path, **options)
    return _texts[key]


async def _started(parent: Parent) -> None:
    with trio.move_on_after(START_S):
        while not (parent.has_ended.is_set() or parent.announcer.is_ready):  # noqa: ASYNC110
            await trio.sleep(0.01)
    if parent.crash is not None:
        raise parent.crash
    if not parent.announcer.is_ready:
        raise RuntimeError("the server is not ready")
