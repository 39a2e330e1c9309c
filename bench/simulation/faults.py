"""Three nodes with faults in virtual time; everything but the sockets is the real code.

A round has clients with and without streams. One node crashes, one hangs and one is slow, at times and for
durations drawn from the seed. Occasionally a node refuses jobs or loses its connections, a client disconnects
or a job is cancelled. `run_round` reports as problems:

- an answer that is incomplete, differs from that of a server without faults, or mixes two answers;
- an unexplained error: a job may fail if two nodes failed it, or one node failed in the middle of a stream
  that no other node can continue; no job may wait without end;
- a job that ended twice or never, and a seat, alarm, connection or task that was not released.
"""

# ruff: noqa: SLF001  # leaks are counted in private attributes, and the seed of Trio's scheduler is private
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from random import Random
from typing import Any, NamedTuple
from unittest.mock import patch

import structlog
import trio
import trio._core._run as trio_run
from trio.testing import MockClock

from fairlead.base.config import HealthConfig, NodeConfig, QueueConfig, TimeoutsConfig
from fairlead.base.errors import Cancelled, FairleadError, NodeFailed
from fairlead.base.job import Delta, Job, Relay, Sampling
from fairlead.base.requester import Requester
from fairlead.base.supervision import unwrap
from fairlead.dialects.openai.chat import ChatDialect
from fairlead.generation.gateway import ATTEMPTS, Gateway
from fairlead.generation.timeline import RequestTimeline
from fairlead.nodes.remote_node import RemoteNode, remote_node
from fairlead.router.dispatch.dispatcher import Dispatcher
from fairlead.router.fleet.node_registry import NodeRegistry
from simulation.remote_servers import RemoteServer, words_of

NODES = 3
SEATS = CONFIGURED_SEATS = 4  # seats of a node, and seats in the configuration
HOUR_S = 20.0  # the time in which requests and faults start
TIMEOUT_S = 1000.0
HEALTH = HealthConfig(interval_s=1.0, failures=3, timeout_s=1.0)


class ClientRequest(NamedTuple):
    """A client's request. `repeatable`: greedy or seeded."""

    name: str
    tenant: str
    stream: bool
    repeatable: bool
    words: int
    arrives_s: float
    leaves_s: float
    is_cancelled: bool


class Verdict(NamedTuple):
    """The problems of a round, and its outcomes by kind; repeatable streams are counted separately."""

    problems: list[str]
    outcomes: Counter[str]
    replayed: int
    attempts: int


def run_round(seed: int, *, streams: int = 20, plain: int = 20) -> Verdict:
    """Run the round of a seed in a new Trio loop with a virtual clock."""
    simulated = _Round(seed, streams, plain)
    ordered = patch.object(trio_run, "_ALLOW_DETERMINISTIC_SCHEDULING", new=True)
    with ordered, structlog.testing.capture_logs():
        trio_run._r.seed(seed)
        trio.run(simulated.run, clock=MockClock(autojump_threshold=0))
    return simulated.verdict()


class _Round:
    """One round."""

    def __init__(self, seed: int, streams: int, plain: int) -> None:
        self._random = Random(seed)
        self._requests = [self._draw(number, stream=number < streams) for number in range(streams + plain)]
        self._servers: dict[str, RemoteServer] = {}
        self._nodes: list[RemoteNode] = []
        self._texts: dict[str, str] = {}
        self._errors: dict[str, FairleadError] = {}
        self._has_read: set[str] = set()
        self._disconnected: set[str] = set()
        self._timelines: dict[str, list[RequestTimeline]] = {request.name: [] for request in self._requests}
        self._problems: list[str] = []
        queue = QueueConfig(capacity=len(self._requests), timeout_s=TIMEOUT_S)
        self._dispatcher = Dispatcher(queue, random=Random(seed))
        self._registry = NodeRegistry(self._dispatcher.scheduler)
        self._gateway = Gateway(
            self._dispatcher, self._registry, request_timeout_s=TIMEOUT_S, on_finished=self._record
        )

    def _draw(self, number: int, *, stream: bool) -> ClientRequest:
        random = self._random
        leaves = random.random() < 0.05
        return ClientRequest(
            name=f"r{number}",
            tenant=random.choice("ABC"),
            stream=stream,
            repeatable=random.random() < 0.7,
            words=random.randint(1, 10),
            arrives_s=random.uniform(0, HOUR_S),
            leaves_s=random.uniform(0, 5) if leaves else TIMEOUT_S,
            is_cancelled=random.random() < 0.03,
        )

    def _record(self, timeline: RequestTimeline) -> None:
        self._timelines[timeline.job.request_id].append(timeline)

    # The round ---------------------------------------------------------------------------------------

    async def run(self) -> None:
        with patch("fairlead.nodes.http.client.connect", self._connect):
            async with trio.open_nursery() as services:
                async with self._open(services):
                    with trio.move_on_after(2 * TIMEOUT_S) as scope:
                        async with trio.open_nursery() as clients:
                            clients.start_soon(self._inject_faults)
                            for request in self._requests:
                                clients.start_soon(self._send, request)
                    if scope.cancelled_caught:
                        self._problems.append("hang: a client still waits")
                    await trio.sleep(2)  # for work that waits for capacity of a node
                    for _ in range(5):  # a probe may be using a connection
                        if any(node.status().connections.busy for node in self._nodes):
                            await trio.sleep(0.15)
                    self._check_for_leaks()
                left = [wire for server in self._servers.values() for wire in server.wires]
                if left:
                    self._problems.append(f"leak: {len(left)} connections of nodes that are gone")
                services.cancel_scope.cancel()

    @asynccontextmanager
    async def _open(self, services: trio.Nursery) -> AsyncIterator[None]:
        for number in range(NODES):
            host = f"node{number}"
            self._servers[host] = RemoteServer(
                host, SEATS, Random(self._random.random()), services, self._problems
            )
            config = NodeConfig(
                id=host,
                url=f"http://{host}:80",
                seats=CONFIGURED_SEATS,
                models=("m",),
                timeouts=TimeoutsConfig(
                    connect_s=5.0,
                    first_byte_s=self._random.choice([10.0, 60.0]),
                    between_bytes_s=self._random.choice([1.5, 5.0, 60.0]),
                ),
            )
            self._nodes.append(remote_node(config, self._registry.report, HEALTH))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._dispatcher.run)
            for node in self._nodes:
                nursery.start_soon(node.run)
            yield
            nursery.cancel_scope.cancel()

    async def _connect(self, host: str, _port: int, _context: object, **_options: object) -> Any:
        await trio.lowlevel.checkpoint()
        return self._servers[host].connect()

    async def _inject_faults(self) -> None:
        """Crash one node, hang one and slow one down, with smaller faults; then undo each of them."""
        servers = list(self._servers.values())
        self._random.shuffle(servers)
        killed, stopped, slow = servers
        faults: list[tuple[Callable[[], None], Callable[[], None]]] = [
            (killed.crash, killed.recover),
            (stopped.hang, stopped.recover),
            (partial(slow.slow_down, self._random.choice([3, 10])), partial(slow.slow_down, 1)),
        ]
        for server in servers:
            if self._random.random() < 0.3:
                faults.append((server.refuse_jobs, server.accept_jobs))
            if self._random.random() < 0.3:
                faults.append((server.drop_connections, lambda: None))
        async with trio.open_nursery() as nursery:
            for inject, undo in faults:
                nursery.start_soon(self._inject, inject, undo)

    async def _inject(self, inject: Callable[[], None], undo: Callable[[], None]) -> None:
        await trio.sleep(self._random.uniform(0, HOUR_S))
        inject()
        await trio.sleep(self._random.choice([0.5, 5, 40, 100]))
        undo()

    async def _send(self, request: ClientRequest) -> None:
        await trio.sleep(request.arrives_s)
        with trio.move_on_after(request.leaves_s) as scope:
            try:
                async with trio.open_nursery() as exchange:
                    if request.is_cancelled:
                        exchange.start_soon(self._cancel, request)
                    answer = await exchange.start(self._gateway.serve, _job(request))
                    self._texts[request.name] = await self._read(request, answer.deltas)
                    exchange.cancel_scope.cancel()
            except* FairleadError as group:
                error = unwrap(group)
                assert isinstance(error, FairleadError)
                self._errors[request.name] = error
        if scope.cancelled_caught:
            self._disconnected.add(request.name)

    async def _cancel(self, request: ClientRequest) -> None:
        await trio.sleep(self._random.uniform(0, 3))
        await self._gateway.cancel(request.name, Requester("somebody"))

    async def _read(self, request: ClientRequest, deltas: Any) -> str:
        """Read as the routes do: a stream in pieces, any other answer when it is complete."""
        raw: list[bytes] = []

        def collect(deltas_read: list[Delta]) -> bool:
            self._has_read.add(request.name)
            raw.extend(piece for delta in deltas_read for piece in delta.raw)
            return True

        if not request.stream:
            await deltas.ended()
        while deltas_read := await deltas.take(collect):
            collect(deltas_read)
        return _streamed(b"".join(raw)) if request.stream else _plain(b"".join(raw))

    # The verdict -------------------------------------------------------------------------------------

    def _check_for_leaks(self) -> None:
        counts = self._dispatcher.statistics()
        upstreams = [node.status().connections for node in self._nodes]
        wires = sum(len(server.wires) for server in self._servers.values())
        alarms = [alarm for _, _, alarm in self._dispatcher._timer._alarms if not alarm.dropped]
        left = {
            "jobs that wait": counts.waiting,
            "jobs that run": counts.running,
            "seats": sum(node.status().busy for node in self._nodes),
            "exchanges": sum(each.busy + each.waiting for each in upstreams),
            "connections of no pool": wires - sum(each.idle for each in upstreams),
            # One is for charging; nodes that are full or have failed keep theirs.
            "alarms": len(alarms) - 1 - len(self._dispatcher._pauses) - len(self._dispatcher._failed),
            "waiters": len(self._dispatcher._waiters),
        }
        self._problems += [f"leak: {count} {what}" for what, count in left.items() if count]

    def verdict(self) -> Verdict:
        """Check the outcome of every request."""
        outcomes: Counter[str] = Counter()
        replayed = attempts = 0
        for request in self._requests:
            problem, outcome = self._judge(request)
            self._problems += [f"{request.name}: {problem}"] if problem else []
            outcomes[
                f"{outcome}, repeatable stream" if request.stream and request.repeatable else outcome
            ] += 1
            tried = sum(timeline.attempts for timeline in self._timelines[request.name])
            attempts += tried
            replayed += outcome == "answered" and tried > 1
        return Verdict(self._problems, outcomes, replayed, attempts)

    def _judge(self, request: ClientRequest) -> tuple[str, str]:
        """Return a problem ('' if there is none) and the outcome."""
        timelines = self._timelines[request.name]
        if request.name in self._disconnected and request.name not in self._texts:
            return "" if len(timelines) <= 1 else "ended twice", "left"
        if len(timelines) != 1:
            return f"ended {len(timelines)} times", "lost"
        if (error := self._errors.get(request.name)) is not None:
            return self._explain(request, error, timelines[0]), error.code
        if (text := self._texts.get(request.name)) is None:
            return "neither an answer nor an error", "lost"
        salt = "" if request.repeatable else text.split("/")[1] if "/" in text else "?"
        expected = "".join(words_of(request.name, salt, request.words))
        return "" if text == expected else f"{text!r} instead of {expected!r}", "answered"

    def _explain(self, request: ClientRequest, error: FairleadError, timeline: RequestTimeline) -> str:
        if isinstance(error, Cancelled):
            return "" if request.is_cancelled else "was cancelled without a request"
        if not isinstance(error, NodeFailed):
            return f"failed with {error.code}"
        full = sum(server.refusals.get(request.name, 0) for server in self._servers.values())
        cannot_go_on = request.stream and not request.repeatable and request.name in self._has_read
        if timeline.attempts - full >= ATTEMPTS or cannot_go_on:
            return ""
        return f"gave up after {timeline.attempts} attempts, {full} of them at full nodes: {error.message}"


def _job(request: ClientRequest) -> Job:
    body = {"model": "m", "stream": request.stream, "id": request.name, "words": request.words}
    body |= {"repeatable": request.repeatable}
    sampling = Sampling(max_tokens=request.words, temperature=0.0 if request.repeatable else 1.0)
    return Job(
        request.name,
        request.tenant,
        "m",
        (),
        sampling,
        stream=request.stream,
        request_id=request.name,
        relay=Relay(ChatDialect.path, json.dumps(body).encode(), request.stream),
    )


def _streamed(raw: bytes) -> str:
    *events, done, rest = raw.split(b"\n\n")
    if (done, rest) != (b"data: [DONE]", b""):
        return f"no end: {raw[-80:]!r}"
    choices = [json.loads(event.removeprefix(b"data: "))["choices"][0] for event in events]
    return "".join(choice["delta"].get("content", "") for choice in choices)


def _plain(raw: bytes) -> str:
    return str(json.loads(raw)["choices"][0]["message"]["content"])
