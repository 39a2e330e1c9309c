"""Connects the ranks of a model for the exchange of tensors: by gloo on CPUs, by NCCL on GPUs.

The ranks find each other in a file that only they can open. Gloo listens on loopback only, and so does NCCL,
which uses sockets to set up its own connections, unless NCCL_SOCKET_IFNAME is set.
"""

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fairlead.engine.models.parallel import Ranks

# A rank that waits in vain is ended otherwise: by the parent's watchdog, or because another one has ended.
TIMEOUT = timedelta(days=1)


def connect(ranks: Ranks, file: str, device: torch.device, *, timeout: timedelta = TIMEOUT) -> None:
    """Connect this rank to the others, which must do so at the same time, with the same empty file."""
    store = dist.FileStore(file, ranks.size)  # type: ignore[attr-defined]
    if device.type == "cuda":
        torch.cuda.set_device(device)
        ranks.join(_nccl(ranks, store, timeout))
    else:
        ranks.join(_gloo(ranks, store, timeout))
    ranks.numbers(0, device)  # NCCL connects at the first exchange


def _gloo(ranks: Ranks, store: Any, timeout: timedelta) -> Any:
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # noqa: SLF001  it has no other name
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]  # noqa: SLF001
    options._timeout = timeout  # noqa: SLF001
    return dist.ProcessGroupGloo(store, ranks.rank, ranks.size, options)


def _nccl(ranks: Ranks, store: Any, timeout: timedelta) -> Any:
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    options: Any = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout  # noqa: SLF001
    return dist.ProcessGroupNCCL(store, ranks.rank, ranks.size, options)
