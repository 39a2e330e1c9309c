"""A program that runs tiny models on two ranks on CUDA, and writes their texts and logits to a file.

    python ranks_on_cuda.py FILE DIRECTORY...

NCCL refuses two ranks of one GPU on the same host. On a machine with one GPU both ranks use it, each with a
host id of its own. Then NCCL exchanges tensors through sockets.
"""

import os
import sys

import torch

from engine.models.cuda_models import ROOM, outputs_of
from fairlead.base.messages import WorkerSpec
from fairlead.engine import loading
from fairlead.engine.devices import find_device
from fairlead.engine.worker import rank, ranks

DTYPE = os.environ.get("RANKS_DTYPE", "float32")


def share_one_gpu():
    if torch.cuda.device_count() < 2:
        os.environ["NCCL_HOSTID"] = f"process-{os.getpid()}"
        loading.find_device = lambda name, _ranks: find_device(name, loading.ALONE)


def run_rank_zero(file, directories):
    results = []
    for directory in directories:
        spec = WorkerSpec(path=directory, device="cuda:0", dtype=DTYPE, parallel=2, **ROOM)
        loaded = ranks.load_on_ranks(spec, lambda _fraction, _stage: None)
        results.append((loaded.kernel, outputs_of(loaded), outputs_of(loaded, ahead=True)[0]))
    torch.save(results, file)


if __name__ == "__main__":
    share_one_gpu()
    if sys.argv[1] == "--fd":  # another rank, as `engine/worker/ranks.py` starts it
        sys.exit(rank.main())
    ranks.COMMAND = (sys.executable, __file__)
    run_rank_zero(sys.argv[1], sys.argv[2:])
    sys.stdout.flush()
    os._exit(0)  # the other ranks end with this process
