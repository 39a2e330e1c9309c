"""Parts of `bodies.py`: a server with a measured event loop, its clients, and a node."""

import json
import multiprocessing
import os
import re
import shutil
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.resources import files
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, Self

import trio

from fairlead.base.config import ApiKey, Config, KvCacheConfig, ModelConfig, NodeConfig
from fairlead.server.app import run
from router_parts import WHOLE

CONTEXT = 131_072
KEYS = ("sk-hostile", "sk-canary")
SAMPLE_INTERVAL_S = 0.001
# Figures of the event loop. The longest time between two runs of a task that sleeps for a millisecond, in
# wall-clock time and in CPU time of the process, which includes waits for the GIL but no other processes; and
# the longest step of a task, in CPU time.
MEASURES = ("loop_gap_ms", "loop_gap_cpu_ms", "loop_step_cpu_ms")
HEALTH_EVERY_S = 0.005

NOTHING = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
# Like common templates, it renders tools and arguments as JSON and accepts all roles.
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}\n"
    "{% endfor %}"
)

_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)


# The server --------------------------------------------------------------------------------------------


class Watch(trio.abc.Instrument):
    """Measures an event loop. `longest` contains the maximum of each of `MEASURES`, in seconds."""

    def __init__(self, longest: Any) -> None:
        self._longest = longest
        self._begun_s = 0.0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:  # noqa: ARG002  # the signature is Trio's
        self._begun_s = time.thread_time()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:  # noqa: ARG002
        self._keep(2, time.thread_time() - self._begun_s)

    async def run(self) -> None:
        """Sleep for a millisecond at a time, and measure how long that takes."""
        clocks = (time.perf_counter, time.process_time)
        before = [clock() for clock in clocks]
        while True:
            await trio.sleep(SAMPLE_INTERVAL_S)
            for index, clock in enumerate(clocks):
                now = clock()
                self._keep(index, now - before[index])
                before[index] = now

    def _keep(self, index: int, time_s: float) -> None:
        self._longest[index] = max(self._longest[index], time_s)


class Ready:
    """An announcer that sends the address through a pipe and starts the measurement of the event loop."""

    def __init__(self, ready: Connection, longest: Any) -> None:
        self._ready = ready
        self._longest = longest

    def loading(self, model: str, fraction: float | None, stage: str) -> None:
        """See `Announcer`."""

    def ready(self, url: str, models: Sequence[str]) -> None:  # noqa: ARG002  # the signature is the protocol's
        """See `Announcer`."""
        watch = Watch(self._longest)
        trio.lowlevel.spawn_system_task(watch.run)
        trio.lowlevel.add_instrument(watch)
        self._ready.send(url)

    def failed(self, model: str, reason: str) -> None:
        """See `Announcer`."""
        self._ready.send(f"{model}: {reason}")

    def stopping(self) -> None:
        """See `Announcer`."""


def serve(ready: Connection, longest: Any, model: str, node: str) -> None:
    """Serve the model and the node as `fairlead serve` does, without a log."""
    sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115  # to the end of the process
    cache = KvCacheConfig(max_memory_mb=512)
    config = Config(
        models=(ModelConfig(Path(model), "near", device="cpu", threads=1, preload=True, kv_cache=cache),),
        nodes=(NodeConfig(id="bench", url=node, seats=64, models=("far",)),),
        api_keys=tuple(ApiKey(key, user=key) for key in KEYS),
        port=0,
    )
    run(config, Ready(ready, longest))


def answer_from_memory(ready: Connection) -> None:
    """Send the address through `ready`, then answer every complete request until killed."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    ready.send(f"http://127.0.0.1:{listener.getsockname()[1]}")
    while True:
        threading.Thread(target=_answer_all, args=(listener.accept()[0],), daemon=True).start()


def _answer_all(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    data = b""
    while True:
        while b"\r\n\r\n" not in data:
            if not (piece := sock.recv(1 << 20)):
                return
            data += piece
        head, _, data = data.partition(b"\r\n\r\n")
        length = _LENGTH.search(head)
        left = (int(length[1]) if length else 0) - len(data)
        data = b""
        while left > 0:
            left -= len(sock.recv(min(left, 1 << 20)))
        sock.sendall(NOTHING if head.startswith(b"GET") else WHOLE)


class Server(NamedTuple):
    """A running server: its port, its process, and the maxima of `Watch`."""

    port: int
    pid: int
    longest: Any

    def memory_mb(self, field: str = "VmRSS") -> float:
        """Return the resident memory, or with `VmHWM` its maximum since `reset_maxima`."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))

    def longest_ms(self) -> dict[str, float]:
        """Return the maxima since `reset_maxima`, in milliseconds."""
        return {name: 1000 * time_s for name, time_s in zip(MEASURES, self.longest, strict=True)}

    def reset_maxima(self) -> None:
        """Reset `longest` and `VmHWM`."""
        self.longest[:] = [0.0] * len(MEASURES)
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")


@contextmanager
def serving(model: Path, node: str) -> Iterator[Server]:
    """Run the server in its own process until the end of the block."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    longest = context.Array("d", len(MEASURES), lock=False)
    process = context.Process(target=serve, args=(theirs, longest, str(model), node))
    process.start()
    try:
        assert ours.poll(120), "the server does not start"
        url = ours.recv()
        assert process.pid is not None
        yield Server(int(url.rpartition(":")[2]), process.pid, longest)
    finally:
        process.terminate()
        process.join(60)
        process.kill()


def long_context_model(directory: Path) -> Path:
    """Create a copy of the demonstration model with a context of `CONTEXT` tokens; return its folder."""
    path = directory / "near"
    shutil.copytree(str(files("fairlead") / "server" / "demo" / "fairlead-demo"), path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


# The clients -------------------------------------------------------------------------------------------


class Answer(NamedTuple):
    """A response, and the time from the first byte sent to the last byte read."""

    status: int
    body: bytes
    time_s: float


def request(path: str, body: bytes, key: str) -> bytes:
    """Return a request with `Connection: close`."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def connect(port: int) -> socket.socket:
    """Return a connected socket."""
    sock = socket.create_connection(("127.0.0.1", port), timeout=300)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def post_body(port: int, path: str, body: bytes, key: str = KEYS[0]) -> Answer:
    """Send a request and read its answer."""
    begun = time.perf_counter()
    with connect(port) as sock:
        # The server may refuse it before it is sent completely.
        with suppress(BrokenPipeError, ConnectionResetError):
            sock.sendall(request(path, body, key))
        answer = bytearray()
        while piece := sock.recv(1 << 20):
            answer += piece
    head, _, rest = bytes(answer).partition(b"\r\n\r\n")
    return Answer(int(head.split(b" ", 2)[1]), rest, time.perf_counter() - begun)


class Canary:
    """A second user, which reads a stream and requests `/health` continuously."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._ended = threading.Event()
        self.token_gap_s = 0.0
        self.health_s = 0.0
        self._threads = [threading.Thread(target=run) for run in (self._stream, self._probe_health)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def reset_maxima(self) -> None:
        """Reset the maxima."""
        self.token_gap_s = self.health_s = 0.0

    def _stream(self) -> None:
        body = b'{"model":"near","prompt":"hello","max_tokens":400,"ignore_eos":true,"stream":true}'
        while not self._ended.is_set():
            with connect(self._port) as sock:
                sock.sendall(request("/v1/completions", body, KEYS[1]))
                sock.recv(1 << 16)
                before = time.perf_counter()
                while sock.recv(1 << 16):
                    now = time.perf_counter()
                    self.token_gap_s = max(self.token_gap_s, now - before)
                    before = now

    def _probe_health(self) -> None:
        with connect(self._port) as sock:
            while not self._ended.wait(HEALTH_EVERY_S):
                begun = time.perf_counter()
                sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert sock.recv(1 << 16)
                self.health_s = max(self.health_s, time.perf_counter() - begun)
