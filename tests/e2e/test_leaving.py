"""Clients which disconnect at any moment, over real sockets: all they hold must be released."""

import json
import random
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from e2e.real_server import RealServer, configured, real_server, until
from e2e.slow_motion import slowed, stopped

RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close with a reset instead of a FIN


def request(*, stream: bool, max_tokens: int = 300, n: int = 1) -> bytes:
    body = json.dumps(
        {
            "model": "fairlead-demo",
            "prompt": "Count from 1 to 90.",
            "n": n,
            "stream": stream,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "user": f"user-{random.randrange(5)}",
        }
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def send_and_disconnect(
    server: RealServer, after_s: float, *, stream: bool, reset: bool, cut: int | None
) -> None:
    """Send a request, or its first `cut` bytes; read for up to `after_s` seconds; then disconnect."""
    connection = await trio.open_tcp_stream(*server.address)
    try:
        with trio.move_on_after(after_s):
            await connection.send_all(request(stream=stream)[:cut])
            while await connection.receive_some(65536):
                pass
    except trio.BrokenResourceError:
        pass
    finally:
        if reset:
            connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        connection.socket.close()


async def run_storm(server: RealServer, clients: int, *, seed: int) -> None:
    chance = random.Random(seed)
    limit = trio.CapacityLimiter(60)

    async def run_client(after_s: float, *, stream: bool, reset: bool, cut: int | None) -> None:
        async with limit:
            await send_and_disconnect(server, after_s, stream=stream, reset=reset, cut=cut)

    async with trio.open_nursery() as nursery:
        for _ in range(clients):
            after_s = chance.choice([0.0, 0.002, 0.02, 0.1, 0.3]) * chance.random()
            cut = chance.randrange(1, 150) if chance.random() < 0.1 else None
            stream, reset = chance.random() < 0.6, chance.random() < 0.5
            nursery.start_soon(
                lambda a=after_s, s=stream, r=reset, c=cut: run_client(a, stream=s, reset=r, cut=c)
            )


async def test_two_hundred_clients_that_disconnect_at_random_times_free_everything(server: RealServer):
    await run_storm(server, 200, seed=1)
    assert await trio.to_thread.run_sync(server.wait_until_at_rest) == {
        "waiting": 0,
        "running": 0,
        "sequences": 0,
        "slots_taken": 0,
        "blocks_taken": 0,
    }


@pytest.mark.slow
async def test_two_thousand_clients_that_disconnect_at_random_times_free_everything(server: RealServer):
    await run_storm(server, 2000, seed=2)
    assert not any((await trio.to_thread.run_sync(server.wait_until_at_rest)).values())
    assert server.http.get("/health").status_code == 200


async def test_cancelled_waiter_leaves_the_queue_before_the_next_answer(tmp_path: Path):
    with real_server(*configured(tmp_path, {"slots": 1})) as server:
        with stopped(server.child_pid()):  # so that no answer ends before the check
            holder = await trio.open_tcp_stream(*server.address)
            await holder.send_all(request(stream=True, max_tokens=450))
            await reached(lambda: server.queue()["running"] == 1)
            waiters = [await trio.open_tcp_stream(*server.address) for _ in range(5)]
            for waiter in waiters:
                await waiter.send_all(request(stream=False, max_tokens=5))
            await reached(lambda: server.queue()["waiting"] == 5)
            for waiter in waiters:
                await waiter.aclose()
            await reached(lambda: server.queue()["waiting"] == 0)
            assert server.queue()["running"] == 1
        await holder.aclose()
        assert not any((await trio.to_thread.run_sync(server.wait_until_at_rest)).values())


@pytest.mark.parametrize("stream", [True, False])
async def test_cancelled_running_job_frees_its_slot_and_blocks(server: RealServer, stream):
    assert not any((await trio.to_thread.run_sync(server.wait_until_at_rest)).values())
    with slowed(server.child_pid()):  # unless cancelled, it would take minutes
        connection = await trio.open_tcp_stream(*server.address)
        await connection.send_all(request(stream=stream, max_tokens=900, n=64))
        await reached(lambda: server.running()["sequences"])
        await connection.aclose()
        counts = await trio.to_thread.run_sync(server.wait_until_at_rest)
    assert not any(counts.values())


async def reached(holds: Callable[[], object]) -> None:
    await trio.to_thread.run_sync(until, holds)
