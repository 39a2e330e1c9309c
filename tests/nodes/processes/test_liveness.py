"""Whether a silent server is alive, judged by what it sends and its CPU time, on a virtual clock."""

import os
import signal
import subprocess
import sys
from contextlib import asynccontextmanager

import pytest
import trio

from fairlead.base.config import HealthConfig
from fairlead.nodes.http.client import UpstreamFailed
from fairlead.nodes.processes.health import HealthCheck
from fairlead.nodes.processes.liveness import LivenessProbe
from fairlead.nodes.processes.memory import computed_s

HEALTH = HealthConfig(interval_s=5.0, failures=3, timeout_s=5.0)
LONG_S = 10 * HEALTH.interval_s


class Server:
    """A fake server that sends `answer`, or nothing while that is None. `cpu_s_a_second` is its CPU usage."""

    def __init__(self, answer=None, *, probes_per_answer=None, cpu_s_a_second=0.0, monkeypatch=None):
        self.answer = answer
        self.probes_per_answer = probes_per_answer
        self.cpu_s_a_second = cpu_s_a_second
        self.last_received_at = -float("inf")
        self.probes = 0
        monkeypatch.setattr("fairlead.nodes.processes.liveness.computed_s", self.computed_s)

    def computed_s(self, group):
        assert group == 4711
        return None if self.cpu_s_a_second is None else self.cpu_s_a_second * trio.current_time()

    @asynccontextmanager
    async def exchange(self, method, path):
        assert (method, path) == ("GET", "/health")
        self.probes += 1
        answers = self.probes_per_answer is not None and not self.probes % self.probes_per_answer
        if self.answer is None and not answers:
            await trio.sleep_forever()
        if self.answer == "refused":
            raise UpstreamFailed("refused")
        yield self

    async def read_all(self, most_bytes):
        return self.answer or b"ok"


@pytest.fixture
def server(monkeypatch):
    return lambda *arguments, **options: Server(*arguments, **options, monkeypatch=monkeypatch)


async def stopped_after_s(server, health=HEALTH, within_s=LONG_S):
    """Return after how many seconds the server was found stopped; None if it was not."""
    began = trio.current_time()
    with trio.move_on_after(within_s):
        await LivenessProbe(server, "/health", group=4711).stopped(HealthCheck(health))
        return trio.current_time() - began
    return None


async def test_server_that_answers_is_alive_whatever_it_sends(server, autojump_clock):
    answering = server(b"I am busy")
    assert await stopped_after_s(answering) is None
    assert answering.probes >= 10


@pytest.mark.parametrize("cpu_s_a_second", [0.0, 0.09, None])
async def test_silent_idle_server_counts_as_stopped_after_three_probes(
    server, autojump_clock, cpu_s_a_second
):
    assert await stopped_after_s(server(cpu_s_a_second=cpu_s_a_second)) == 15.0


@pytest.mark.parametrize("cpu_s_a_second", [0.11, 1.0, 8.0])
async def test_silent_server_that_uses_the_cpu_is_alive(server, autojump_clock, cpu_s_a_second):
    assert await stopped_after_s(server(cpu_s_a_second=cpu_s_a_second)) is None


@pytest.mark.parametrize("cpu_s_a_second", [0.0, 1.0])
async def test_server_that_refuses_connections_counts_as_stopped(server, autojump_clock, cpu_s_a_second):
    assert await stopped_after_s(server("refused", cpu_s_a_second=cpu_s_a_second)) == 10.0


async def test_server_that_sends_a_long_response_is_alive(server, autojump_clock):
    streaming = server()

    async def stream():
        while True:
            streaming.last_received_at = trio.current_time()
            await trio.sleep(1.0)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(stream)
        assert await stopped_after_s(streaming) is None
        nursery.cancel_scope.cancel()


async def test_answer_between_missed_probes_resets_the_count(server, autojump_clock):
    server_with_few_answers = server(probes_per_answer=HEALTH.failures)
    assert await stopped_after_s(server_with_few_answers) is None
    assert server_with_few_answers.probes >= 2 * HEALTH.failures


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_cpu_time_of_a_process_group_is_measured():
    busy = subprocess.Popen([sys.executable, "-IS", "-c", "while True: pass"], start_new_session=True)
    try:
        while not computed_s(busy.pid):
            assert busy.poll() is None
        os.kill(busy.pid, signal.SIGSTOP)
        os.waitpid(busy.pid, os.WUNTRACED)
        assert computed_s(busy.pid) == computed_s(busy.pid) > 0
    finally:
        busy.kill()
        busy.wait()
    assert computed_s(busy.pid) == 0
