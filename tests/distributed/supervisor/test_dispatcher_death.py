"""The dispatcher's process is killed or stopped under load: streams go on, waiting jobs keep their order."""

import json
import os
import signal

import httpx
import pytest
import trio

from distributed.supervisor.running_server import COMPLETION, SINGLE, SLOTS, completion

STREAMS = 200
TOKENS = 25


class Streams:
    """Streams over connections of their own: their texts, and how many have begun."""

    def __init__(self, client):
        self.texts = []
        self.begun = 0
        self._client = client

    async def use(self):
        pieces, last = [], ""
        body = completion(TOKENS, stream=True)
        async with self._client.stream("POST", COMPLETION, json=body) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    if not pieces:
                        self.begun += 1
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event
                    pieces.append(event["choices"][0]["text"])
                last = line or last
        assert last == "data: [DONE]"
        self.texts.append("".join(pieces))


def many_connections(server):
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncClient(base_url=server.supervisor.url, timeout=300, limits=limits)


async def until(condition):
    with trio.fail_after(120):
        while not condition():  # noqa: ASYNC110  there is no event for it
            await trio.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_200_streams_do_not_notice_that_the_dispatcher_is_replaced(server, how):
    epoch = server.supervisor.epoch
    async with many_connections(server) as client:
        first = Streams(client)
        await first.use()
        streams = Streams(client)
        async with trio.open_nursery() as nursery:
            for _ in range(STREAMS):
                nursery.start_soon(streams.use)
            await until(lambda: streams.begun >= 2 * SLOTS)
            os.kill(server.dispatcher_pid, how)
        assert streams.texts == first.texts * STREAMS
        assert server.supervisor.epoch == epoch + 1
        await server.until("/queue", running=0, waiting=0, seats=SLOTS + 1)
        assert (await server.post(COMPLETION, completion(5))).status_code == 200


async def test_waiting_jobs_keep_their_order_at_the_next_dispatcher(server):
    await server.post(COMPLETION, completion(1, SINGLE))
    ended = []

    async def use(name, tenant):
        await server.post(COMPLETION, completion(10, SINGLE, user=tenant))
        ended.append(name)

    engine, epoch = server.pid_of(SINGLE), server.supervisor.epoch
    async with trio.open_nursery() as nursery:
        os.kill(engine, signal.SIGSTOP)
        nursery.start_soon(server.post, COMPLETION, completion(1, SINGLE))
        await server.until("/queue", running=1)
        for number, tenant in enumerate("AAAABBC"):
            nursery.start_soon(use, f"{tenant}{number}", tenant)
            await server.until("/queue", waiting=number + 1)
        os.kill(server.dispatcher_pid, signal.SIGKILL)
        await until(lambda: server.supervisor.epoch == epoch + 1)
        await server.until("/queue", waiting=7, running=1)
        os.kill(engine, signal.SIGCONT)
    assert ended == ["A0", "B4", "C6", "A1", "B5", "A2", "A3"]


async def test_dispatcher_that_is_stopped_for_a_short_time_goes_on_as_before(server):
    await server.post(COMPLETION, completion(1, SINGLE))
    statuses, epoch = [], server.supervisor.epoch

    async def use():
        statuses.append((await server.post(COMPLETION, completion(10, SINGLE))).status_code)

    async with trio.open_nursery() as nursery:
        os.kill(server.dispatcher_pid, signal.SIGSTOP)
        for _ in range(6):
            nursery.start_soon(use)
        await trio.sleep(0.4)  # the supervisor would give it up after a second
        os.kill(server.dispatcher_pid, signal.SIGCONT)
    assert statuses == [200] * 6
    assert server.supervisor.epoch == epoch
    await server.until("/queue", running=0, waiting=0, seats=SLOTS + 1)
