"""Rank 0's side of the other ranks of its model: starts their processes, and ends when one of them has ended.

They end with this process: each has a pipe from it as its stdin. So all ranks are one process to the parent.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

import msgspec

from fairlead.base.errors import LoadFailed
from fairlead.base.frames import FrameSocket, PeerGone
from fairlead.base.messages import WorkerSpec
from fairlead.engine.worker.rank_connection import FromRank, RankFailed, StartRank

if TYPE_CHECKING:
    import torch

    from fairlead.engine.loading import LoadedModel
    from fairlead.engine.models.parallel import Ranks

COMMAND = (sys.executable, "-P", "-m", "fairlead.engine.worker.rank")
# A step that fails because another rank has ended is reported as that, once it is known.
ENDED_WAIT_S = 1.0

_decoder = msgspec.msgpack.Decoder(FromRank)


def load_on_ranks(spec: WorkerSpec, report: Callable[[float, str], None]) -> "LoadedModel":
    """Load the model of `spec` on `spec.parallel` ranks, of which this process is rank 0.

    See `engine.loading.load_runner`. From now on this process ends if any of the others does.
    """
    if not hasattr(os, "memfd_create"):
        raise LoadFailed("parallel: a model can be divided among processes on Linux only")
    processes = RankProcesses(spec)
    # The other processes import torch at the same time.
    from fairlead.engine.loading import load_runner
    from fairlead.engine.models.parallel import Ranks
    from fairlead.engine.ranks import Membership

    ranks = Ranks(0, spec.parallel)
    membership = Membership(
        ranks,
        join=lambda device: processes.join(ranks, device),
        send=processes.send,
        give_up=processes.give_up,
    )
    return load_runner(spec, report, membership=membership)


class RankProcesses:
    """The processes of all ranks but rank 0. They inherit a file without a name, to find each other."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._size = spec.parallel
        store = os.memfd_create("ranks")
        self._store = f"/proc/self/fd/{store}"
        self._connections: list[FrameSocket[FromRank]] = []
        for rank in range(1, spec.parallel):
            ours, theirs = socket.socketpair()
            with theirs:
                process = _start(theirs.fileno(), store)
            connection = FrameSocket(ours, _decoder)
            self._connections.append(connection)
            threading.Thread(target=self._watch, args=(rank, process), daemon=True).start()
            connection.send(StartRank(spec, rank, self._store))

    def join(self, ranks: "Ranks", device: "torch.device") -> None:
        """Wait until all ranks have loaded their weights, and connect to them. Raises `LoadFailed`."""
        from fairlead.engine import process_groups

        for rank, connection in enumerate(self._connections, 1):
            try:
                answer = connection.receive()
            except PeerGone as error:
                raise LoadFailed(f"{self._name(rank)} ended while it loaded the model") from error
            if isinstance(answer, RankFailed):
                raise LoadFailed(f"{self._name(rank)}: {answer.message}")
        process_groups.connect(ranks, self._store, device)

    def send(self, message: msgspec.Struct) -> None:
        """Send a message to all ranks."""
        for connection in self._connections:
            try:
                connection.send(message)
            except PeerGone as error:
                self.give_up(error)

    def give_up(self, error: Exception) -> NoReturn:
        """End this process, and with it all ranks, because a step has failed on this one."""
        time.sleep(ENDED_WAIT_S)  # if a rank has ended, `_watch` ends this process meanwhile
        traceback.print_exception(error)
        _end(f"{self._name(0)} failed in a step, which the others cannot finish")

    def _watch(self, rank: int, process: "subprocess.Popen[bytes]") -> None:
        _end(f"{self._name(rank)} {_description(process.wait())}")

    def _name(self, rank: int) -> str:
        return f"rank {rank} of {self._size}"


def _start(connection: int, store: int) -> "subprocess.Popen[bytes]":
    # Nothing is ever written to its stdin: the end of the pipe ends it, also if we are killed.
    command = [*COMMAND, "--fd", str(connection)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[connection, store])  # noqa: S603


def _description(status: int) -> str:
    """Return how a process ended, by its exit status; a negative one is a signal's."""
    names = {number.value: number.name for number in signal.Signals}
    if status < 0:
        return f"was killed by {names.get(-status, f'signal {-status}')}"
    return f"ended with exit status {status}"


def _end(reason: str) -> NoReturn:
    """End this process at once, from any thread, even if another one waits in a step."""
    print(reason, file=sys.stderr, flush=True)  # noqa: T201  the parent reads the lines of its child
    os._exit(1)
