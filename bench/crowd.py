"""Measure what one tenant's crowd of clients does to another tenant at the same address, as behind a proxy.

Two attacks of key A, each on a server of its own:

- 1,000 new connections at once. Meanwhile clients with key B send requests, each on a new connection.
- 300 clients that request one kept response of about a megabyte and then read nothing. The server's memory
  is compared with that before.

    python bench/crowd.py [--connections 1000] [--readers 300] [--json bench/results/crowd.json]
"""

import argparse
import json
import os
import platform
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import trio

from hostile import MODEL, percentile, serving
from hostile_client.server import Server
from hostile_client.target import send

PAUSE_S = 0.02
ALONE_S = 3.0
BURST_S = 60.0
DESCRIPTION_BYTES = 1_000_000
RECEIVE_BUFFER = 4096
SETTLE_S = 3.0
KEYS = {"apiKeys": [{"key": "A"}, {"key": "B"}]}


def request(method: str, path: str, *, key: str = "", body: object = None) -> bytes:
    """Return the bytes of a request."""
    content = b"" if body is None else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n"
    if key:
        head += f"Authorization: Bearer {key}\r\n"
    return head.encode() + b"\r\n" + content


def crowd(host: str, port: int, connections: int) -> None:
    """Open all connections at once, send a request on each, and wait for all answers."""
    data = request("GET", "/v1/models", key="A")
    opened = []
    for _ in range(connections):
        sock = socket.socket()
        sock.setblocking(False)
        sock.connect_ex((host, port))
        with suppress(BlockingIOError):
            sock.send(data)
        opened.append(sock)
    for sock in opened:
        sock.settimeout(BURST_S)
        sock.recv(1)


async def visit(server: Server, key: str, took_s: list[float]) -> None:
    """Send requests with a key on new connections until cancelled."""
    while True:
        began = time.perf_counter()
        await send(server.address, "GET", request("GET", "/v1/models", key=key))
        took_s.append(time.perf_counter() - began)
        await trio.sleep(PAUSE_S)


async def measure_connections(server: Server, connections: int) -> dict[str, Any]:
    """Return the times of key B without and beside the crowd."""
    alone: list[float] = []
    beside: list[float] = []
    with trio.move_on_after(ALONE_S):
        await visit(server, "B", alone)
    command = [sys.executable, __file__, "--crowd", f"{server.address[0]}:{server.address[1]}"]
    began = time.perf_counter()
    with trio.move_on_after(BURST_S):
        async with trio.open_nursery() as nursery:
            for _ in range(8):  # at any moment one of them has just begun
                nursery.start_soon(visit, server, "B", beside)
            await trio.run_process([*command, "--connections", str(connections)])
            nursery.cancel_scope.cancel()
    return {
        "connections": connections,
        "burst_s": round(time.perf_counter() - began, 2),
        "alone": summary(alone),
        "beside": summary(beside),
    }


def summary(took_s: list[float]) -> dict[str, Any]:
    """Return the figures of several requests."""
    return {
        "requests": len(took_s),
        "p50_ms": round(percentile(took_s, 50) * 1000, 1),
        "p99_ms": round(percentile(took_s, 99) * 1000, 1),
        "worst_ms": round(max(took_s) * 1000, 1),
    }


async def measure_readers(server: Server, readers: int) -> dict[str, Any]:
    """Return the server's memory before and after the readers have come."""
    tool = {"type": "function", "name": "f", "description": "x" * DESCRIPTION_BYTES, "parameters": {}}
    body = {"model": MODEL, "input": "hello", "max_output_tokens": 4, "tools": [tool], "tool_choice": "none"}
    reply = await send(server.address, "POST", request("POST", "/v1/responses", key="A", body=body))
    if reply.status != 200:
        sys.exit(f"no response was kept: {reply.status} {reply.body[:300]!r}")
    path = f"/v1/responses/{json.loads(reply.body)['id']}"
    before = server.memory_mb()
    opened = []
    for _ in range(readers):
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
        sock.connect(server.address)
        sock.sendall(request("GET", path, key="A"))
        opened.append(sock)
    await trio.sleep(SETTLE_S)
    after = server.memory_mb()
    for sock in opened:
        sock.close()
    return {
        "readers": readers,
        "response_bytes": len(reply.body),
        "memory_mb": [round(before, 1), round(after, 1)],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--connections", type=int, default=1000, help="number of new connections at once")
    parser.add_argument("--readers", type=int, default=300, help="number of clients that do not read")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    parser.add_argument("--crowd", metavar="HOST:PORT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.crowd:
        os.nice(10)  # a real crowd uses the processors of other machines
        host, _, port = options.crowd.rpartition(":")
        crowd(host, int(port), options.connections)
        return 0
    with serving(**KEYS) as server:
        result: dict[str, Any] = {"connections": trio.run(measure_connections, server, options.connections)}
    with serving(**KEYS) as server:
        result["readers"] = trio.run(measure_readers, server, options.readers)
    result["machine"] = f"{platform.machine()}, {os.cpu_count()} cores"
    print(json.dumps(result, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
