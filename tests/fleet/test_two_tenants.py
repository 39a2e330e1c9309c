"""Two tenants on one node: whatever happens to one's requests, the other's streams end whole."""

from functools import partial
from itertools import count
from typing import Any

import msgspec
import pytest
import trio

from fairlead.config import HealthConfig, NodeConfig
from fairlead.errors import NodeFailed
from fairlead.job import Job
from fairlead.nodes.remote_node import RemoteNode
from fairlead.process import health
from fairlead.process.health import Breaker, Change, Outcome
from fleet.running_fleet import RunningFleet, running_fleet
from nodes.listening import relayed_job, stub
from nodes.stub_server import StubServer, text

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


def job_of(tenant: str, **how: Any) -> Job:
    made = relayed_job(stub=how, request_id=f"{tenant}{next(_numbers)}")
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
