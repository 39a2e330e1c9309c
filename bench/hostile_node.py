"""Measure what a misbehaving node costs the server that relays to it.

The node runs in its own process and sends the bytes of an attack as fast as possible to `--at-once` jobs. A
second process relays these jobs through a `RemoteNode` into the gateway's `Deltas`, without a reader. Each
attack uses a new process, for which are reported:

- peak_mb: its peak resident memory minus that before the attack, in MiB;
- cpu_s: its CPU time; wall_s: the time until all jobs had ended or `--limit` had passed;
- stall_ms: the longest CPU time between two runs of another task, which bounds how long the tokens of other
  jobs are delayed; CPU time does not depend on other processes;
- open_files: descriptors that were not closed; outcome: how the jobs ended.

    python bench/hostile_node.py [--at-once 20] [--limit 15] [--only NAME ...] [--out FILE]
"""

import argparse
import gc
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fairlead.base.job import Job

MIB = 1024 * 1024
WHOLE_BYTES = 478 * MIB
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
JSON_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
BEGUN = b'data: {"choices":[{"index":0,"delta":{"content":"hi"}}]}\n\n'
DONE = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'

# What the node sends ---------------------------------------------------------------------------------


def chunk(data: bytes) -> bytes:
    """Return data as one chunk of a body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def block(event: bytes) -> bytes:
    """Return a chunk of about 64 KiB of the same event."""
    return chunk(event * (65536 // len(event)))


def whole(head: bytes) -> Iterator[bytes]:
    """Yield a JSON document of `WHOLE_BYTES`."""
    yield JSON_HEAD + head + b"\r\n" + b'{"choices":[{"message":{"content":"'
    yield from repeat(b"x" * MIB, WHOLE_BYTES // MIB)
    yield b'"}}]}'


def stream(event: bytes, before: bytes = b"") -> Iterator[bytes]:
    """Yield a stream: `before`, then the same event without end."""
    return chain([STREAM_HEAD + (chunk(before) if before else b"")], repeat(block(event)))


ATTACKS: dict[str, Callable[[], Iterator[bytes]]] = {
    "whole answer of 478 MB": lambda: whole(b"Connection: close\r\n"),
    "whole answer of 478 MB, announced": lambda: whole(b"Content-Length: %d\r\n" % (WHOLE_BYTES + 42)),
    "whole answer in chunks of one byte": lambda: chain(
        [JSON_HEAD + b"Transfer-Encoding: chunked\r\n\r\n"], repeat(b"1\r\n \r\n" * 10_000)
    ),
    "whole answer of tiny values": lambda: chain(
        [JSON_HEAD + b'Connection: close\r\n\r\n{"x":[1'], repeat(b",1" * 500_000, 16), [b"]}"]
    ),
    "refusal without end": lambda: chain(
        [b"HTTP/1.1 400 Bad\r\nContent-Type: application/json\r\n\r\n{"], repeat(b" " * MIB)
    ),
    "headers without end": lambda: chain([b"HTTP/1.1 200 OK\r\n"], repeat(b"X: y\r\n" * 10_000)),
    "event without end": lambda: stream(b"x", b"data: "),
    "comments": lambda: stream(b":\n\n"),
    "empty events": lambda: stream(b"\n\n"),
    "events without a token": lambda: stream(b'data: {"choices":[]}\n\n'),
    "events without a token, after one": lambda: stream(b'data: {"choices":[]}\n\n', BEGUN),
    "comments after a token": lambda: stream(b":\n\n", BEGUN),
    "unreadable events": lambda: stream(b"data: {\n\n", BEGUN),
    "events of one letter": lambda: stream(b'data: {"choices":[{"text":"a"}]}\n\n'),
    "chunk extensions": lambda: chain([STREAM_HEAD], repeat(b"1;" + b"e" * 60_000 + b"\r\n:\r\n")),
    "chunks of one byte": lambda: chain([STREAM_HEAD], repeat(b"1\r\n:\r\n" * 10_000)),
    "after the end": lambda: stream(b"x", DONE),
}
STREAMED = [name for name in ATTACKS if "answer" not in name and "refusal" not in name]


def serve(listener: socket.socket, attack: str) -> None:
    """Answer each connection's request with the attack."""
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_answer, args=(connection, attack), daemon=True).start()


def _answer(connection: socket.socket, attack: str) -> None:
    with connection:
        connection.recv(65536)
        try:
            for piece in ATTACKS[attack]():
                connection.sendall(piece)
        except OSError:
            """The relaying process has closed the connection."""


# What is measured --------------------------------------------------------------------------------------


def resident_mb(name: str) -> float:
    """Return VmRSS or VmHWM of this process in MiB."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def open_files() -> int:
    """Return how many descriptors this process has."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def relayed_job(number: int, *, stream: bool) -> "Job":
    """Return a job with a client's request."""
    from fairlead.base.job import Job, Relay, Sampling
    from fairlead.dialects.openai.chat import ChatDialect

    body = json.dumps({"model": "m", "stream": stream}).encode()
    return Job(
        id="job",
        tenant="A",
        model="m",
        prompts=(),
        sampling=Sampling(max_tokens=100, temperature=0.0),
        stream=stream,
        request_id=str(number),
        relay=Relay(ChatDialect.path, body, stream),
    )


async def measure(url: str, attack: str, at_once: int, limit_s: float) -> dict[str, Any]:
    """Relay `at_once` jobs to the node; return the figures."""
    import trio

    from fairlead.base.errors import NodeFailed
    from fairlead.nodes.http.client import Upstream
    from fairlead.nodes.remote_node import RemoteNode
    from fairlead.nodes.streams.deltas import Deltas
    from relaying import ignore_report

    stream = attack in STREAMED
    upstream = Upstream(url, name="hostile", capacity=at_once)
    node = RemoteNode("hostile", upstream, ignore_report, names={"m": "m"}, seats=at_once)
    node.came_up()
    outcomes: Counter[str] = Counter()
    stall_s = 0.0

    async def run_job(number: int) -> None:
        job = relayed_job(number, stream=stream)
        deltas = Deltas(1, keeps=stream)
        try:
            async with node.generate(job, deltas):
                await deltas.ended()
            while await deltas.take():
                """Read until the end, or an error."""
            outcomes["answered"] += 1
        except NodeFailed as error:
            outcomes[error.message] += 1
        except Exception as error:  # noqa: BLE001  # to be reported
            outcomes[repr(error)] += 1

    async def canary() -> None:
        nonlocal stall_s
        while True:
            began_s = time.process_time()
            await trio.sleep(0.001)
            stall_s = max(stall_s, time.process_time() - began_s)

    gc.collect()
    files = open_files()
    before_mb, cpu_s, began = resident_mb("VmRSS"), time.process_time(), time.perf_counter()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(canary)
        with trio.move_on_after(limit_s) as limit:
            async with trio.open_nursery() as jobs:
                for number in range(at_once):
                    jobs.start_soon(run_job, number)
        nursery.cancel_scope.cancel()
    upstream.close()
    if limit.cancelled_caught:
        outcomes["still there at the limit"] = at_once - outcomes.total()
    return {
        "attack": attack,
        "peak_mb": round(resident_mb("VmHWM") - before_mb, 1),
        "cpu_s": round(time.process_time() - cpu_s, 2),
        "wall_s": round(time.perf_counter() - began, 2),
        "stall_ms": round(1000 * stall_s, 1),
        "open_files": open_files() - files,
        "outcome": dict(outcomes),
    }


def main() -> None:
    """Run each attack in its own process, or only the one named by `--attack`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--at-once", type=int, default=20, help="concurrent jobs")
    parser.add_argument("--limit", type=float, default=15.0, help="seconds for each attack")
    parser.add_argument("--only", nargs="*", help="names of attacks")
    parser.add_argument("--out", type=Path, help="write the result to this file")
    parser.add_argument("--attack", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.attack is not None:
        _run_one(options)
        return
    results = []
    for attack in options.only or ATTACKS:
        arguments = ["--attack", attack, "--at-once", str(options.at_once), "--limit", str(options.limit)]
        command = [sys.executable, __file__, *arguments]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
        result = json.loads(output.splitlines()[-1])  # after the lines of the log
        print(json.dumps(result))
        results.append(result)
    if options.out is not None:
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def _run_one(options: argparse.Namespace) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    node = os.fork()
    if not node:
        try:
            serve(listener, options.attack)
        finally:
            os._exit(0)
    listener.close()
    try:
        import trio

        print(json.dumps(trio.run(measure, url, options.attack, options.at_once, options.limit)))
    finally:
        os.kill(node, 9)
        os.waitpid(node, 0)


if __name__ == "__main__":
    main()
