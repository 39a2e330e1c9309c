"""Two tenants on one node: whatever happens to one's requests, the other's streams end whole."""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import count
from random import Random
from typing import Any

import msgspec
import pytest
import trio

from fairlead.base.config import HealthConfig, NodeConfig
from fairlead.base.errors import FairleadError, NodeFailed
from fairlead.base.job import Job
from fairlead.nodes.processes import health
from fairlead.nodes.processes.health import Breaker, Change, Outcome
from fairlead.nodes.remote_node import RemoteNode
from fairlead.router.dispatch.fullness import FullModel, Pause
from fairlead.router.dispatch.ticket import Ticket
from nodes.listening import relayed_job, stub
from nodes.stub_server import StubServer, text
from router.fleet.running_fleet import RunningFleet, running_fleet

HEALTH = HealthConfig(interval_s=0.05, failures=2, timeout_s=60.0)
STREAMS = 20
# What the node does with a request of tenant A.
ERRORS = {f"status {status}": {"how": "status", "after": status} for status in (500, 502, 504, 507)}
ANSWERS = ERRORS | {
    "not an API": {"how": "kind"},
    "too large": {"how": "half", "after": 1, "words": 2000, "chunk_words": 2000},
    "ends early": {"how": "end", "after": 4},
    "error in the stream": {"how": "error", "after": 4},
}
BROKEN = {
    "closed before the head": {"how": "gone"},
    "reset before the head": {"how": "reset"},
    "closed after the head": {"how": "broken", "after": 0},
    "reset in the stream": {"how": "reset", "after": 4},
    "truncated": {"how": "broken", "after": 4},
    "garbage": {"how": "garbage"},
    "garbage in the stream": {"how": "bad_chunk", "after": 4},
}
_numbers = count()


def job_of(tenant: str, *, stream: bool = True, **how: Any) -> Job:
    made = relayed_job(stub=how, stream=stream, request_id=f"{tenant}{next(_numbers)}")
    return msgspec.structs.replace(made, tenant=tenant)


class TwoTenants:
    """One node for both. `texts` has the answers of tenant B's streams, and `failures` why others ended."""

    def __init__(self, server: StubServer, opened: RunningFleet) -> None:
        self.server = server
        self.opened = opened
        self.texts: list[str] = []
        self.failures: list[NodeFailed] = []

    async def stream(self, begun: trio.Event) -> None:
        try:
            job = job_of("B", waits=True, after=4)
            self.texts.append(await self.opened.run_job(job, begun=begun))
        except NodeFailed as error:
            self.failures.append(error)

    async def attack(self, how: dict[str, Any], *, times: int) -> None:
        for _ in range(times):
            with pytest.raises(NodeFailed):
                await self.opened.run_job(job_of("A", **how))
            # Everybody sees this, so it quotes nothing of the answer.
            assert self.opened.fleet.nodes()[0].problem in (None, "its latest requests failed")

    async def run(self, how: dict[str, Any], *, times: int = 4) -> None:
        """Hold tenant B's streams in their middle while the requests of tenant A fail; then let them end."""
        async with trio.open_nursery() as clients:
            begun = [trio.Event() for _ in range(STREAMS)]
            for event in begun:
                clients.start_soon(self.stream, event)
            for event in begun:
                await event.wait()
            await self.attack(how, times=times)
            self.held = self.opened.dispatcher.statistics().running
            for _ in range(2 * STREAMS):
                self.server.go.release()


async def both_tenants(how: dict[str, Any], **options: Any) -> tuple[TwoTenants, int]:
    """Return what happened, and how often the node was closed to new jobs."""
    async with stub() as server:
        node = NodeConfig(id="far", url=server.url, models=("m",), seats=STREAMS + 1, answer_bytes=3000)
        async with running_fleet(nodes=(node,), health_check=HEALTH) as opened:
            await opened.until(lambda: opened.fleet.nodes()[0].state == "up")
            tenants = TwoTenants(server, opened)
            await tenants.run(how, **options)
            await opened.until(lambda: opened.dispatcher.statistics().running == 0)
            sent_again = [job.stub for job in server.jobs if "waits" in job.stub][STREAMS:]
            assert not sent_again
            return tenants, opened.fleet.nodes()[0].downs


@pytest.mark.parametrize("what", ANSWERS)
async def test_answers_to_one_tenant_neither_end_streams_nor_stop_new_jobs(what):
    tenants, closings = await both_tenants(ANSWERS[what])
    assert (tenants.texts, tenants.failures) == ([text()] * STREAMS, [])
    assert (tenants.held, closings) == (STREAMS, 0)


@pytest.mark.parametrize("what", BROKEN)
async def test_broken_connections_of_one_tenant_do_not_stop_jobs_of_another_that_is_served(what):
    tenants, closings = await both_tenants(BROKEN[what])
    assert (tenants.texts, tenants.failures) == ([text()] * STREAMS, [])
    assert (tenants.held, closings) == (STREAMS, 0)


@pytest.mark.parametrize("what", BROKEN)
async def test_broken_connections_while_nobody_else_is_served_stop_new_jobs_and_end_no_stream(
    what, monkeypatch
):
    monkeypatch.setattr(health, "SERVED_S", -1.0)  # as if the other streams were silent
    tenants, closings = await both_tenants(BROKEN[what])
    assert (tenants.texts, tenants.failures) == ([text()] * STREAMS, [])
    assert tenants.held == STREAMS  # their seats are counted while the node is closed, and afterwards
    assert closings > 0


async def test_node_that_is_closed_and_reopened_gets_no_more_jobs_than_it_has_seats(monkeypatch):
    monkeypatch.setattr(health, "SERVED_S", -1.0)
    most = 0
    async with stub() as server:
        node = NodeConfig(id="far", url=server.url, models=("m",), seats=3)
        async with (
            running_fleet(nodes=(node,), health_check=HEALTH) as opened,
            trio.open_nursery() as clients,
        ):
            await opened.until(lambda: opened.fleet.nodes()[0].state == "up")
            for _ in range(2):
                begun = trio.Event()
                held = job_of("B", waits=True, after=4)
                clients.start_soon(partial(opened.run_job_and_return_error, held, begun))
                await begun.wait()
            for _ in range(3):
                with pytest.raises(NodeFailed):
                    await opened.run_job(job_of("A", how="gone"))
            await opened.until(lambda: opened.fleet.nodes()[0].state == "up")
            for _ in range(4):
                clients.start_soon(opened.run_job_and_return_error, job_of("A", waits=True))
            for _ in range(6):
                most = max(most, opened.fleet.nodes()[0].busy)
                await trio.sleep(0.05)
                server.go.release()
            assert opened.fleet.nodes()[0].downs > 0
    assert opened.errors == []
    assert most == 3


def _kill(self: Breaker, outcome: Outcome, tenant: str, *, at: float) -> Change | None:
    return REQUESTED(self, outcome, tenant, at=at) and "dead"


def _fail(self: RemoteNode) -> None:
    self._fail(NodeFailed("closed"))


REQUESTED = Breaker.requested


@pytest.mark.parametrize(
    ("changed", "name", "mutant"), [(Breaker, "requested", _kill), (RemoteNode, "_close", _fail)]
)
async def test_breaker_that_ends_running_streams_is_detected(changed, name, mutant, monkeypatch):
    monkeypatch.setattr(changed, name, mutant)
    with pytest.raises(AssertionError):
        await test_broken_connections_while_nobody_else_is_served_stop_new_jobs_and_end_no_stream(
            "truncated", monkeypatch
        )


async def test_breaker_that_knows_no_tenants_is_detected(monkeypatch):
    monkeypatch.setattr(Breaker, "_serves_others", lambda _self, _at: False)
    with pytest.raises(AssertionError):
        await test_broken_connections_of_one_tenant_do_not_stop_jobs_of_another_that_is_served("truncated")


# A minute of failures ------------------------------------------------------------------------------

STATUSES = (400, 401, 403, 404, 405, 407, 408, 413, 422, 429, 500, 501, 502, 503, 504, 529)
EVERY_FAILURE: list[dict[str, Any]] = [
    *({"how": "status", "after": status} for status in STATUSES),
    *({"how": "status", "after": status, "retry_after": 2} for status in (429, 503)),
    *ANSWERS.values(),
    *BROKEN.values(),
    *({"how": how} for how in ("silent", "early")),
    {"how": "stall", "after": 4},
    {"delay_s": 2.0},
    {"how": "well"},
]
STREAMS_A_MINUTE = 100
# A pause of one second after a rejection, an interval of probes after failed connections, and the queue.
LONGEST_WAIT_S = 15.0


@asynccontextmanager
async def stub_on_socket_pairs(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[StubServer]:
    """Serve the stub to every client over a socket pair, so that virtual time waits for no delivery."""
    server = StubServer()

    async def connect(_host: str, _port: int) -> trio.SocketStream:
        await trio.lowlevel.checkpoint()
        ours, theirs = (trio.socket.from_stdlib_socket(end) for end in socket.socketpair())
        connections.start_soon(server._connection, trio.SocketStream(theirs))
        return trio.SocketStream(ours)

    monkeypatch.setattr(trio, "open_tcp_stream", connect)
    async with trio.open_nursery() as connections:
        yield server
        connections.cancel_scope.cancel()


async def attack_and_serve(opened: RunningFleet, random: Random) -> tuple[list[str], list[float]]:
    """Let tenant A fail in every way for a minute; return the texts of B's streams, and their waits."""
    texts, waits = [], []

    async def attack() -> None:
        while True:
            for how in random.sample(EVERY_FAILURE, len(EVERY_FAILURE)):
                with trio.move_on_after(random.uniform(0.1, 3)), suppress(FairleadError):
                    await opened.run_job(job_of("A", stream=random.random() < 0.5, **how))

    async def stream() -> None:
        job, arrived, begun = job_of("B", delay_s=random.uniform(0, 0.5)), trio.current_time(), trio.Event()
        async with trio.open_nursery() as client:

            async def wait() -> None:
                await begun.wait()
                waits.append(trio.current_time() - arrived)

            client.start_soon(wait)
            texts.append(await opened.run_job(job, begun=begun))

    async def attack_for_long() -> None:
        await trio.sleep(45)
        with suppress(FairleadError):
            await opened.run_job(job_of("A", how="status", after=503, retry_after=60))

    async with trio.open_nursery() as attackers:
        attackers.start_soon(attack_for_long)
        for _ in range(3):
            attackers.start_soon(attack)
        async with trio.open_nursery() as clients:
            for _ in range(STREAMS_A_MINUTE):
                await trio.sleep(60.0 / STREAMS_A_MINUTE)
                clients.start_soon(stream)
        attackers.cancel_scope.cancel()
    return texts, waits


async def minute_of_failures(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    health_check = HealthConfig(interval_s=5.0, failures=2, timeout_s=5.0)
    async with stub_on_socket_pairs(monkeypatch) as server:
        node = NodeConfig(id="far", url="http://127.0.0.1:1", models=("m",), seats=8, answer_bytes=3000)
        async with running_fleet(nodes=(node,), health_check=health_check) as opened:
            await opened.until(lambda: opened.fleet.nodes()[0].state == "up")
            texts, waits = await attack_and_serve(opened, Random(seed))
    assert texts == [text()] * STREAMS_A_MINUTE
    assert max(waits) < LONGEST_WAIT_S
    came = [job.stub for job in server.jobs]
    assert sum(how in came for how in EVERY_FAILURE) > 0.7 * len(EVERY_FAILURE)


SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(1, 20))]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("opens", [False, pytest.param(True, marks=pytest.mark.nightly)])
async def test_minute_of_every_failure_of_one_tenant_ends_no_stream_of_another(
    seed, opens, autojump_clock, monkeypatch
):
    if opens:  # the breaker counts failures although others are served
        monkeypatch.setattr(health, "SERVED_S", -1.0)
    await minute_of_failures(seed, monkeypatch)


def _pauses_all_tenants(
    self: FullModel, ticket: Ticket, named_s: float | None, *, is_limit: bool
) -> list[tuple[str | None, float]]:
    self.of_all = self.of_all or Pause()
    return [(None, self.of_all.begin(named_s, is_limit=is_limit, grows=ticket.is_trial))]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("changed", "name", "mutant"),
    [
        (Breaker, "requested", _kill),
        (RemoteNode, "_close", _fail),
        (FullModel, "rejected", _pauses_all_tenants),
        (FullModel, "resume", lambda _self, _tenant: None),
    ],
)
async def test_failures_of_one_tenant_that_reach_another_are_detected(
    changed, name, mutant, autojump_clock, monkeypatch
):
    monkeypatch.setattr(health, "SERVED_S", -1.0)
    monkeypatch.setattr(changed, name, mutant)
    with pytest.raises((AssertionError, ExceptionGroup)):
        await minute_of_failures(0, monkeypatch)
