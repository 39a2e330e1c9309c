"""Whether a silent server lives: by what it sends, by what it computes, on a virtual clock."""

import os
import signal
import subprocess
import sys
from contextlib import asynccontextmanager

import pytest
import trio

from fairlead.config import HealthConfig
from fairlead.nodes.health import HealthCheck
from fairlead.nodes.memory import computed_s
from fairlead.nodes.pulse import Pulse
from fairlead.nodes.upstream import UpstreamFailed

HEALTH = HealthConfig(interval_s=5.0, failures=3, timeout_s=5.0)
LONG_S = 10 * HEALTH.interval_s


class Server:
    """Says what it is told to, and nothing while that is None. It computes a part of the time: `works`."""

    def __init__(self, answer=None, *, answers_every=None, works=0.0, monkeypatch=None):
        self.answer = answer
        self.answers_every = answers_every
        self.works = works
        self.last_heard = -float("inf")
        self.asked = 0
        monkeypatch.setattr("fairlead.nodes.pulse.computed_s", self.computed_s)

    def computed_s(self, group):
        assert 4711 == group
        return None if self.works is None else self.works * trio.current_time()

    @asynccontextmanager
    async def exchange(self, method, path):
        assert ("GET", "/health") == (method, path)
        self.asked += 1
        answers = self.answers_every is not None and not self.asked % self.answers_every
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
    """When it was given up; None if it was not."""
    began = trio.current_time()
    with trio.move_on_after(within_s):
        await Pulse(server, "/health", group=4711).stopped(HealthCheck(health))
        return trio.current_time() - began
    return None


async def test_a_server_that_answers_lives_whatever_it_says(server, autojump_clock):
    answering = server(b"I am busy")
    assert await stopped_after_s(answering) is None
    assert answering.asked >= 10


@pytest.mark.parametrize("works", [0.0, 0.09, None])
async def test_one_that_is_silent_and_does_nothing_is_given_up_after_three(server, autojump_clock, works):
    assert 15.0 == await stopped_after_s(server(works=works))


@pytest.mark.parametrize("works", [0.11, 1.0, 8.0])
async def test_one_that_is_silent_while_it_works_lives(server, autojump_clock, works):
    assert await stopped_after_s(server(works=works)) is None


@pytest.mark.parametrize("works", [0.0, 1.0])
async def test_one_that_takes_no_connections_is_given_up_however_busy_it_is(server, autojump_clock, works):
    assert 10.0 == await stopped_after_s(server("refused", works=works))


async def test_one_that_sends_a_long_answer_lives(server, autojump_clock):
    streaming = server()

    async def stream():
        while True:
            streaming.last_heard = trio.current_time()
            await trio.sleep(1.0)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(stream)
        assert await stopped_after_s(streaming) is None
        nursery.cancel_scope.cancel()


async def test_a_sign_of_life_between_silences_begins_the_count_anew(server, autojump_clock):
    wavering = server(answers_every=HEALTH.failures)
    assert await stopped_after_s(wavering) is None
    assert wavering.asked >= 2 * HEALTH.failures


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_what_a_group_computes_is_counted_while_it_does():
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
    assert 0 == computed_s(busy.pid)
