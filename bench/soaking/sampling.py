"""Measurements of a soak's processes every few seconds: memory, descriptors, threads, tasks and queue.

Memory is read from Linux's /proc/PID/smaps_rollup. USS is the memory that only this process uses. PSS also
contains its part of shared memory. Both are in bytes.
"""

import json
import time
from pathlib import Path

import msgspec
import trio

from soaking.deployment import SWAPPING, Deployment


class Memory(msgspec.Struct, frozen=True):
    """The memory of a process, in bytes."""

    uss: int
    pss: int


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the server at one time. `children` is the memory (USS) of all its children together.

    `heap` are the bytes allocated by malloc, and `blocks` is the number of Python's small objects. Unlike
    `uss`, they do not include freed memory that is kept for reuse.
    """

    at_s: float
    uss: int
    pss: int
    steady_uss: int
    children: int
    descriptors: int
    threads: int
    tasks: int
    heap: int
    blocks: int
    waiting: int
    running: int
    requests: int


def memory_of(pid: int) -> Memory:
    """Return the memory of a process. Raises `OSError` if the process has ended."""
    kib: dict[str, int] = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, _, value = line.partition(":")
        kib[name] = int(value.split()[0])
    return Memory((kib["Private_Clean"] + kib["Private_Dirty"]) * 1024, kib["Pss"] * 1024)


def descriptors_of(pid: int) -> int:
    """Return the number of open file descriptors of a process."""
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def threads_of(pid: int) -> int:
    """Return the number of threads of a process."""
    return sum(1 for _ in Path(f"/proc/{pid}/task").iterdir())


async def sample(deployment: Deployment, requests: int) -> Sample:
    """Take one sample."""
    deployment.read_reports()
    client = deployment.client("admin")
    answer = await client.ask("GET", "/queue")
    client.close()
    queue = json.loads(answer.body) if answer.status == 200 else {}
    memory = memory_of(deployment.pid)
    children = 0
    for pid in deployment.children():
        try:
            children += memory_of(pid).uss
        except (OSError, KeyError):  # the process has just ended
            continue
    return Sample(
        at_s=time.monotonic() - deployment.began_s,
        uss=memory.uss,
        pss=memory.pss,
        steady_uss=memory_of(deployment.steady_pid).uss,
        children=children,
        descriptors=descriptors_of(deployment.pid),
        threads=threads_of(deployment.pid),
        tasks=deployment.tasks,
        heap=deployment.heap,
        blocks=deployment.blocks,
        waiting=queue.get("waiting", -1),
        running=queue.get("running", -1),
        requests=requests,
    )


class Idle(msgspec.Struct, frozen=True):
    """The counts of the idle server: the minimum of each over some seconds."""

    descriptors: int
    tasks: int
    threads: int
    busy: tuple[str, ...]


async def idle(deployment: Deployment, within_s: float, before: Idle | None = None) -> Idle:
    """Wait up to `within_s` until the server is idle; return its counts.

    Ends early if no count exceeds that of `before`.
    Only `steady` stays loaded, so that two results are comparable. `busy` lists the counts that are not zero.
    """
    client = deployment.client("admin")
    for model in SWAPPING:
        await client.ask("POST", "/models/unload", {"model": model})
    deadline_s = time.monotonic() + within_s
    busy = await _busy(deployment)
    while busy and time.monotonic() < deadline_s:
        await trio.sleep(0.2)
        busy = await _busy(deployment)
    client.close()
    seen = []
    for _ in range(12):  # a probe of a node, or the request for the queue itself, may be counted for a moment
        await trio.sleep(0.25)
        deployment.read_reports()
        seen.append((descriptors_of(deployment.pid), deployment.tasks, threads_of(deployment.pid)))
        descriptors, tasks, threads = (min(column) for column in zip(*seen, strict=True))
        counts = Idle(descriptors, tasks, threads, tuple(busy))
        if before is not None and descriptors <= before.descriptors and tasks <= before.tasks:
            break
    return counts


async def _busy(deployment: Deployment) -> list[str]:
    """Return every count that is not zero."""
    client = deployment.client("admin")
    queue = json.loads((await client.ask("GET", "/queue")).body)
    running = json.loads((await client.ask("GET", "/running")).body)
    nodes = json.loads((await client.ask("GET", "/nodes")).body)
    client.close()
    counts = {f"queue: {name}": queue[name] for name in ("waiting", "running")}
    for model in running:
        counts[f"{model['model']}: sequences"] = model["sequences"]
        if (engine := model["engine"]) is not None:
            counts[f"{model['model']}: blocks"] = engine["blocks_total"] - engine["blocks_free"]
            counts[f"{model['model']}: slots"] = model["seats"] - engine["slots_free"]
        if model["model"] != "steady":
            counts[f"{model['model']}: loaded"] = 1
    counts |= {f"node {node['id']}: busy": node["busy"] for node in nodes}
    return [f"{name} {count}" for name, count in counts.items() if count]
