"""Three nodes in a bad hour, in virtual time, with everything real but the sockets.

A round has clients who stream and who do not, and nodes of which one is killed, one stopped and one slow,
each at a time and for a time drawn from the seed; now and then a node turns jobs away or loses its
connections, and clients leave or have their jobs cancelled. `run_round` says what should not have been:

- an answer that is not whole, or not exactly what an undisturbed server says, or that is made of two;
- an error that nothing explains: a job may fail when two nodes failed it, or one node in the middle of a
  stream that no other could go on with; nobody may wait without end;
- a job that ended twice or never, and a seat, an alarm, a connection or a task that is left.
"""

# ruff: noqa: SLF001  # what is left of a round is counted where it would be, and Trio's order has no public seed
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

from fairlead.api.exchange import unwrap
from fairlead.config import HealthConfig, NodeConfig, QueueConfig, TimeoutsConfig
from fairlead.dispatch.dispatcher import Dispatcher
from fairlead.errors import Cancelled, FairleadError, NodeFailed
from fairlead.gateway import ATTEMPTS, Gateway
from fairlead.job import Delta, Job, Relay, Sampling
from fairlead.journey import Journey
from fairlead.nodes.remote_node import RemoteNode, remote_node
from simulation.far_servers import FarServer, words_of

NODES = 3
SEATS = LENT_SEATS = 4  # that a node has, and that we take it to have
HOUR_S = 20.0  # in which clients come and nodes go
PATIENCE_S = 1000.0
HEALTH = HealthConfig(interval_s=1.0, failures=3, timeout_s=1.0)


class Asked(NamedTuple):
    """One client's request. `repeatable`: greedy or seeded."""

    name: str
    tenant: str
    stream: bool
    repeatable: bool
    words: int
    arrives_s: float
    leaves_s: float
    is_cancelled: bool


class Verdict(NamedTuple):
    """What came of a round: `problems`, and the outcomes by kind, those of repeatable streams apart."""

    problems: list[str]
    outcomes: Counter[str]
    replayed: int
    attempts: int


def run_round(seed: int, *, streams: int = 20, plain: int = 20) -> Verdict:
    """Run the seed's round in a Trio of its own, on a virtual clock."""
    hour = _Hour(seed, streams, plain)
    ordered = patch.object(trio_run, "_ALLOW_DETERMINISTIC_SCHEDULING", new=True)
    with ordered, structlog.testing.capture_logs():
        trio_run._r.seed(seed)
        trio.run(hour.run, clock=MockClock(autojump_threshold=0))
    return hour.verdict()


class _Hour:
    """One round."""

    def __init__(self, seed: int, streams: int, plain: int) -> None:
        self._random = Random(seed)
        self._asked = [self._draw(number, stream=number < streams) for number in range(streams + plain)]
        self._servers: dict[str, FarServer] = {}
        self._nodes: list[RemoteNode] = []
        self._texts: dict[str, str] = {}
        self._errors: dict[str, FairleadError] = {}
        self._has_read: set[str] = set()
        self._left: set[str] = set()
        self._journeys: dict[str, list[Journey]] = {asked.name: [] for asked in self._asked}
        self._problems: list[str] = []
        queue = QueueConfig(capacity=len(self._asked), timeout_s=PATIENCE_S)
        self._desk = Dispatcher(queue, random=Random(seed))
        self._gateway = Gateway(self._desk, request_timeout_s=PATIENCE_S, tell=self._tell)

    def _draw(self, number: int, *, stream: bool) -> Asked:
        random = self._random
        leaves = random.random() < 0.05
        return Asked(
            name=f"r{number}",
            tenant=random.choice("ABC"),
            stream=stream,
            repeatable=random.random() < 0.7,
            words=random.randint(1, 10),
            arrives_s=random.uniform(0, HOUR_S),
            leaves_s=random.uniform(0, 5) if leaves else PATIENCE_S,
            is_cancelled=random.random() < 0.03,
        )

    def _tell(self, journey: Journey) -> None:
        self._journeys[journey.job.request_id].append(journey)

    # The round ---------------------------------------------------------------------------------------

    async def run(self) -> None:
        with patch("fairlead.nodes.upstream.connect", self._connect):
            async with trio.open_nursery() as world:
                async with self._open(world):
                    with trio.move_on_after(2 * PATIENCE_S) as patience:
                        async with trio.open_nursery() as clients:
                            clients.start_soon(self._trouble)
                            for asked in self._asked:
                                clients.start_soon(self._ask, asked)
                    if patience.cancelled_caught:
                        self._problems.append("hang: somebody is still here")
                    await trio.sleep(2)  # what is put off until a node has room
                    for _ in range(5):  # a probe may be under way, but not for long
                        if any(node.status().connections.busy for node in self._nodes):
                            await trio.sleep(0.15)
                    self._look_for_leaks()
                left = [wire for server in self._servers.values() for wire in server.wires]
                if left:
                    self._problems.append(f"leak: {len(left)} connections of nodes that are gone")
                world.cancel_scope.cancel()

    @asynccontextmanager
    async def _open(self, world: trio.Nursery) -> AsyncIterator[None]:
        for number in range(NODES):
            host = f"node{number}"
            self._servers[host] = FarServer(host, SEATS, Random(self._random.random()), world, self._problems)
            config = NodeConfig(
                id=host,
                url=f"http://{host}:80",
                seats=LENT_SEATS,
                models=("m",),
                timeouts=TimeoutsConfig(
                    connect_s=5.0,
                    first_byte_s=self._random.choice([10.0, 60.0]),
                    between_bytes_s=self._random.choice([1.5, 5.0, 60.0]),
                ),
            )
            self._nodes.append(remote_node(config, self._desk, HEALTH))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._desk.run)
            for node in self._nodes:
                nursery.start_soon(node.run)
            yield
            nursery.cancel_scope.cancel()

    async def _connect(self, host: str, _port: int, _context: object) -> Any:
        await trio.lowlevel.checkpoint()
        return self._servers[host].connect()

    async def _trouble(self) -> None:
        """Kill one node, stop one and slow one down, and give all of them back; and some smaller troubles."""
        servers = list(self._servers.values())
        self._random.shuffle(servers)
        killed, stopped, slow = servers
        strikes: list[tuple[Callable[[], None], Callable[[], None]]] = [
            (killed.die, killed.come_back),
            (stopped.stop, stopped.come_back),
            (partial(slow.slow_down, self._random.choice([3, 10])), partial(slow.slow_down, 1)),
        ]
        for server in servers:
            if self._random.random() < 0.3:
                strikes.append((server.fill_up, server.have_room))
            if self._random.random() < 0.3:
                strikes.append((server.drop, lambda: None))
        async with trio.open_nursery() as nursery:
            for strike, amends in strikes:
                nursery.start_soon(self._strike, strike, amends)

    async def _strike(self, strike: Callable[[], None], amends: Callable[[], None]) -> None:
        await trio.sleep(self._random.uniform(0, HOUR_S))
        strike()
        await trio.sleep(self._random.choice([0.5, 5, 40, 100]))
        amends()

    async def _ask(self, asked: Asked) -> None:
        await trio.sleep(asked.arrives_s)
        with trio.move_on_after(asked.leaves_s) as stay:
            try:
                async with trio.open_nursery() as exchange:
                    if asked.is_cancelled:
                        exchange.start_soon(self._cancel, asked)
                    answer = await exchange.start(self._gateway.serve, _job(asked))
                    self._texts[asked.name] = await self._read(asked, answer.deltas)
                    exchange.cancel_scope.cancel()
            except* FairleadError as group:
                error = unwrap(group)
                assert isinstance(error, FairleadError)
                self._errors[asked.name] = error
        if stay.cancelled_caught:
            self._left.add(asked.name)

    async def _cancel(self, asked: Asked) -> None:
        await trio.sleep(self._random.uniform(0, 3))
        self._gateway.cancel(asked.name, owner="")

    async def _read(self, asked: Asked, deltas: Any) -> str:
        """Read as the routes do: a stream as it comes, anything else when it is whole."""
        raw: list[bytes] = []

        def pour(taken: list[Delta]) -> bool:
            self._has_read.add(asked.name)
            raw.extend(piece for delta in taken for piece in delta.raw)
            return True

        if not asked.stream:
            await deltas.ended()
        while taken := await deltas.take(pour):
            pour(taken)
        return _streamed(b"".join(raw)) if asked.stream else _plain(b"".join(raw))

    # The verdict -------------------------------------------------------------------------------------

    def _look_for_leaks(self) -> None:
        counts = self._desk.statistics()
        upstreams = [node.status().connections for node in self._nodes]
        wires = sum(len(server.wires) for server in self._servers.values())
        alarms = [alarm for _, _, alarm in self._desk._timer._alarms if not alarm.dropped]
        left = {
            "jobs that wait": counts.waiting,
            "jobs that run": counts.running,
            "seats": sum(node.status().busy for node in self._nodes),
            "exchanges": sum(each.busy + each.waiting for each in upstreams),
            "connections of no pool": wires - sum(each.idle for each in upstreams),
            "alarms": len(alarms) - 1,  # the meter's
            "waiters": len(self._desk._waiters),
        }
        self._problems += [f"leak: {count} {what}" for what, count in left.items() if count]

    def verdict(self) -> Verdict:
        """Judge what became of everybody."""
        outcomes: Counter[str] = Counter()
        replayed = attempts = 0
        for asked in self._asked:
            problem, outcome = self._judge(asked)
            self._problems += [f"{asked.name}: {problem}"] if problem else []
            outcomes[f"{outcome}, repeatable stream" if asked.stream and asked.repeatable else outcome] += 1
            tried = sum(journey.attempts for journey in self._journeys[asked.name])
            attempts += tried
            replayed += outcome == "answered" and tried > 1
        return Verdict(self._problems, outcomes, replayed, attempts)

    def _judge(self, asked: Asked) -> tuple[str, str]:
        """Return what is wrong, '' if nothing is, and how the job ended."""
        journeys = self._journeys[asked.name]
        if asked.name in self._left and asked.name not in self._texts:
            return "" if len(journeys) <= 1 else "ended twice", "left"
        if len(journeys) != 1:
            return f"ended {len(journeys)} times", "lost"
        if (error := self._errors.get(asked.name)) is not None:
            return self._explain(asked, error, journeys[0]), error.code
        if (text := self._texts.get(asked.name)) is None:
            return "neither an answer nor an error", "lost"
        salt = "" if asked.repeatable else text.split("/")[1] if "/" in text else "?"
        expected = "".join(words_of(asked.name, salt, asked.words))
        return "" if text == expected else f"{text!r} instead of {expected!r}", "answered"

    def _explain(self, asked: Asked, error: FairleadError, journey: Journey) -> str:
        if isinstance(error, Cancelled):
            return "" if asked.is_cancelled else "was cancelled by nobody"
        if not isinstance(error, NodeFailed):
            return f"failed with {error.code}"
        full = sum(server.turned_away.get(asked.name, 0) for server in self._servers.values())
        cannot_go_on = asked.stream and not asked.repeatable and asked.name in self._has_read
        if journey.attempts - full >= ATTEMPTS or cannot_go_on:
            return ""
        return f"gave up after {journey.attempts} attempts, {full} of them at full nodes: {error.message}"


def _job(asked: Asked) -> Job:
    body = {"model": "m", "stream": asked.stream, "id": asked.name, "words": asked.words}
    body |= {"repeatable": asked.repeatable}
    sampling = Sampling(max_tokens=asked.words, temperature=0.0 if asked.repeatable else 1.0)
    return Job(
        asked.name,
        asked.tenant,
        "m",
        (),
        sampling,
        stream=asked.stream,
        request_id=asked.name,
        relay=Relay("/v1/chat/completions", json.dumps(body).encode(), asked.stream),
    )


def _streamed(raw: bytes) -> str:
    *events, done, rest = raw.split(b"\n\n")
    if (done, rest) != (b"data: [DONE]", b""):
        return f"no end: {raw[-80:]!r}"
    choices = [json.loads(event.removeprefix(b"data: "))["choices"][0] for event in events]
    return "".join(choice["delta"].get("content", "") for choice in choices)


def _plain(raw: bytes) -> str:
    return str(json.loads(raw)["choices"][0]["message"]["content"])
