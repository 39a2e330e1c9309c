"""The process of a model's rank other than rank 0: loads its part, then runs rank 0's steps with it.

Rank 0 starts it. Guarantees to end with rank 0, however that ends, also within a step that waits for it.
"""

import argparse
import faulthandler
import signal
import socket
import sys
import time
import traceback
from typing import NoReturn

import msgspec
import torch

from fairlead.base.config import ConfigError
from fairlead.base.errors import LoadFailed
from fairlead.base.frames import FrameSocket, PeerGone
from fairlead.base.runtime import gc_tuning
from fairlead.base.runtime.compilers import explained
from fairlead.engine import process_groups
from fairlead.engine.loading import load_runner
from fairlead.engine.models.parallel import Ranks
from fairlead.engine.ranks import Follower, FromRankZero, Membership
from fairlead.engine.torch_loading import follower_of
from fairlead.engine.worker.lifeline import end_with_parent
from fairlead.engine.worker.rank_connection import RankFailed, RankLoaded, StartRank

# Mostly rank 0 fails to load for the same reason, and reports it. It ends this process then.
SAME_FAILURE_WAIT_S = 3.0

_decoder = msgspec.msgpack.Decoder(StartRank | FromRankZero)

Connection = FrameSocket[StartRank | FromRankZero]


def main() -> int:
    """Run a rank on the socket with descriptor `--fd`; return its exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent decides
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    parser = argparse.ArgumentParser(description="A part of a model's process, which starts it.")
    parser.add_argument("--fd", type=int, required=True, help="the inherited socket to rank 0")
    with socket.socket(fileno=parser.parse_args().fd) as connection:
        try:
            if end_with_parent():
                run(FrameSocket(connection, _decoder))
        except PeerGone as gone:
            if not str(gone):
                return 0
            traceback.print_exception(gone)
            return 1
        except (LoadFailed, ConfigError) as error:
            print(error, file=sys.stderr, flush=True)  # noqa: T201  the parent reads these lines
            time.sleep(SAME_FAILURE_WAIT_S)
            return 1
        except Exception as error:  # noqa: BLE001  its last line says why, as the parent reports it
            traceback.print_exception(error)
            return 1
    return 0


def run(connection: Connection) -> NoReturn:
    """Load the part that the first message names, and execute all others, until rank 0 is gone."""
    start = connection.receive()
    assert isinstance(start, StartRank)
    ranks = Ranks(start.rank, start.spec.parallel)
    follower = _load(start, ranks, connection)
    gc_tuning.freeze()  # as rank 0 does, which would wait
    while True:
        message = connection.receive()
        assert not isinstance(message, StartRank)
        follower.execute(message)


def _load(start: StartRank, ranks: Ranks, connection: Connection) -> Follower:
    has_joined = False

    def join(device: torch.device) -> None:
        nonlocal has_joined
        connection.send(RankLoaded())
        has_joined = True
        process_groups.connect(ranks, start.store, device)

    membership = Membership(ranks, join, send=_never, give_up=_never)
    try:
        loaded = load_runner(start.spec, lambda _fraction, _stage: None, membership=membership)
    except Exception as error:
        if has_joined:  # rank 0 reads no more, but notices the end of this process
            raise
        connection.send(
            RankFailed(str(error) if isinstance(error, LoadFailed | ConfigError) else explained(error))
        )
        connection.receive()  # until rank 0, which reports the reason, has ended
        raise
    return follower_of(loaded, ranks)


def _never(_argument: object) -> NoReturn:
    raise AssertionError("only rank 0 runs steps on others")


if __name__ == "__main__":
    sys.exit(main())
