"""A rank that fails to load its part fails the whole load, with its reason."""

import sys

import pytest
import trio

from engine.worker.children import TIMEOUT_S, failure_of, is_running
from fairlead.base.config import demonstration_model
from fairlead.base.errors import LoadFailed
from fairlead.base.messages import WorkerSpec
from fairlead.nodes.engines.client import Worker

# Rank 0 is a real one; rank 1 runs this code after it has received its first message.
RANK_0 = """
import sys
from fairlead.engine.worker import main, ranks
ranks.COMMAND = (sys.executable, "-c", {script!r})
sys.exit(main.main())
"""
RANK_1 = """
import os, socket, sys
import msgspec
from fairlead.base.frames import FrameSocket
from fairlead.engine.worker.rank_connection import RankFailed, StartRank
connection = FrameSocket(socket.socket(fileno=int(sys.argv[2])), msgspec.msgpack.Decoder(StartRank))
start = connection.receive()
print("the pid of rank", start.rank, "is", os.getpid(), flush=True)
"""


async def test_limit_that_no_rank_can_keep_is_reported_as_by_one_process():
    path = str(demonstration_model())
    error = await failure_of(Worker(WorkerSpec(path=path, device="cpu", parallel=2, kv_cache_bytes=10)))
    assert isinstance(error, LoadFailed)
    assert error.message.startswith("5 bytes of KV cache do not hold one block")


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (
            'connection.send(RankFailed("no room for its part"))\nconnection.receive()',
            "rank 1 of 2: no room for its part",
        ),
        ("sys.exit(3)", "rank 1 of 2 ended with exit status 3"),
    ],
)
async def test_rank_that_cannot_load_fails_the_load_with_its_reason(code, reason):
    spec = WorkerSpec(path=str(demonstration_model()), device="cpu", parallel=2)
    lines: list[str] = []
    command = [sys.executable, "-c", RANK_0.format(script=RANK_1 + code)]
    error = await failure_of(Worker(spec, command=command, on_line=lines.append))
    assert isinstance(error, LoadFailed)
    assert reason in error.message
    [line] = [line for line in lines if line.startswith("the pid of rank 1")]
    pid = int(line.rpartition(" ")[2])
    with trio.fail_after(TIMEOUT_S):
        while is_running(pid):  # noqa: ASYNC110  # no event reports the end of another's child
            await trio.sleep(0.01)
