"""The lease in a real Redis, which is started on a loopback port."""

import gc
import shutil
import signal
import socket
import subprocess
import time

import pytest
import trio

pytest.importorskip("coredis")

from fairlead.distributed.lease import LeaseLost, StoredLease, redis

DURATION_S = 0.5

pytestmark = [
    # coredis does not close its queue of a connection that has ended.
    pytest.mark.filterwarnings("ignore:Unclosed <MemoryObject:ResourceWarning"),
    pytest.mark.skipif(shutil.which("redis-server") is None, reason="redis-server is not installed"),
]


class Server:
    def __init__(self, folder):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._folder = folder
        self.start()

    def start(self):
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self._folder)]
        options += ["--requirepass", "se/cret", "--appendonly", "yes", "--appendfsync", "always"]
        self.process = subprocess.Popen(["redis-server", *options], stdout=subprocess.DEVNULL)
        for _ in range(200):
            try:
                socket.create_connection(("127.0.0.1", self.port)).close()
            except OSError:
                time.sleep(0.02)
            else:
                return
        raise TimeoutError

    def stop(self):
        self.process.kill()
        self.process.wait()

    def lease(self):
        url = f"redis://:se%2Fcret@127.0.0.1:{self.port}/2"
        return StoredLease(
            lambda: redis.connect(url, "test:lease"), duration_s=DURATION_S, least_epoch=redis.least_epoch
        )


@pytest.fixture
def server(tmp_path):
    server = Server(tmp_path)
    yield server
    server.stop()
    gc.collect()  # while the warnings of coredis are ignored


async def test_standby_takes_over_at_once_after_a_release_with_a_higher_epoch(server):
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            async with trio.open_nursery() as first:
                term = await first.start(server.lease().hold)
                assert term.is_valid()
                first.cancel_scope.cancel()
            assert not term.is_valid()
            began = time.monotonic()
            later = await nursery.start(server.lease().hold)
            assert time.monotonic() - began < DURATION_S / 2
            assert later.epoch > term.epoch
            nursery.cancel_scope.cancel()


async def test_stopped_redis_ends_the_term_before_the_lease_may_be_taken(server):
    with trio.fail_after(10), pytest.raises(ExceptionGroup) as caught:  # noqa: PT012
        async with trio.open_nursery() as nursery:
            term = await nursery.start(server.lease().hold)
            server.process.send_signal(signal.SIGSTOP)
            stopped = time.monotonic()
            try:
                await trio.sleep_forever()
            finally:
                server.process.send_signal(signal.SIGCONT)
                assert time.monotonic() - stopped < DURATION_S * 1.5
                assert not term.is_valid()
    assert caught.group_contains(LeaseLost)


async def test_lease_and_epoch_outlive_a_restart_of_redis(server):
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            term = await nursery.start(server.lease().hold)
            server.stop()
            await trio.to_thread.run_sync(server.start)
            await trio.sleep(DURATION_S)
            assert term.is_valid()
            nursery.cancel_scope.cancel()
        async with trio.open_nursery() as nursery:
            assert (await nursery.start(server.lease().hold)).epoch > term.epoch
            nursery.cancel_scope.cancel()
