"""Measure what one tenant's storm of hostile schemas does to others.

    python bench/schema_storm.py [--minutes 5] [--schemas 10000] [--model FOLDER]
        [--json bench/results/schema_storm.json]

A server with the demonstration model, or with that of a folder (see `random_model.py`), has three tenants.
One reads four streams all the time, one sends a new small schema after the other, and one attacks with
generated schemas of seven kinds, 33 each second. Its clients leave after a second, whether they have an
answer or not, so that the rate of the attack does not depend on how fast the server refuses. The first two
are measured alone, and then beside the attack. The attacker's clients run only while a processor is idle
(SCHED_IDLE), because real ones have another machine. While the two are measured alone, the same clients
attack a socket that refuses at once, so that what they themselves take of this machine is not counted as
the server's.
"""

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import trio

from fairlead.base.config import demonstration_model
from hostile_client.server import READY
from machine import machine

MODEL = "fairlead-demo"
KEYS = {name: f"sk-{name}" for name in ("reader", "victim", "attacker")}
PATIENCE_S = 1.0  # of the attacker's clients
STREAMS = 4
ALONE_S = 60.0
CACHE_MB = 192
"""The model's KV cache: the tenants fill it before the attack begins, so that it does not grow meanwhile."""

Schema = dict[str, Any]


# Hostile schemas -----------------------------------------------------------------------------------


def multiples(draw: random.Random) -> Schema:
    """Numbers whose least common multiple is large, or just below what is refused at once."""
    parts = [{"type": "integer", "multipleOf": draw.randint(2, 20_000)} for _ in range(draw.randint(1, 4))]
    return {draw.choice(["allOf", "anyOf"]): parts}


def nesting(draw: random.Random) -> Schema:
    """Objects in objects, with many optional properties at each level."""
    schema: Schema = {"type": "string", "pattern": f"^[a-z]{{1,{draw.randint(1, 200)}}}$"}
    for level in range(draw.randint(5, 60)):
        properties = {f"p{level}_{index}": {"type": "integer"} for index in range(draw.randint(1, 20))}
        schema = {"type": "object", "properties": {**properties, f"next{draw.randint(0, 9)}": schema}}
    return schema


def alternations(draw: random.Random) -> Schema:
    """Products of alternatives."""
    branches = [
        {"type": "object", "properties": {f"k{index}": {"type": "integer"}}}
        for index in range(draw.randint(2, 8))
    ]
    return {"allOf": [{"anyOf": branches}] * draw.randint(2, 6)}


def repetitions(draw: random.Random) -> Schema:
    """Patterns that need exponentially many states, and repetitions of repetitions."""
    count = draw.randint(5, 60)
    pattern = draw.choice(
        [
            f"^(a|b)*a(a|b){{{count}}}$",
            f"^((a{{{count}}}b?){{{count}}}){{2}}$",
            f"^(.*x.{{{count}}}|.*y.{{{count + 1}}})$",
            f"^(\\w+\\s?){{{count}}}$",
        ]
    )
    return {"type": "string", "pattern": pattern, "maxLength": draw.randint(1, 4000)}


def enumerations(draw: random.Random) -> Schema:
    """Thousands of values."""
    return {"enum": [f"{draw.random():.12f} {index}" for index in range(draw.randint(1000, 12_000))]}


def references(draw: random.Random) -> Schema:
    """Definitions that refer to each other, each with several choices."""
    count = draw.randint(10, 300)
    definitions = {
        f"d{index}": {
            "anyOf": [
                {"$ref": f"#/$defs/d{draw.randrange(count)}"},
                {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{draw.randrange(count)}"}}},
                {"type": "null"},
            ]
        }
        for index in range(count)
    }
    return {"$defs": definitions, "$ref": "#/$defs/d0"}


def properties(draw: random.Random) -> Schema:
    """Hundreds of optional properties, the cost of which is quadratic."""
    return {
        "type": "object",
        "properties": {
            f"k{index}": {"type": "string", "minLength": draw.randint(0, 5)}
            for index in range(draw.randint(300, 3000))
        },
    }


KINDS: list[Callable[[random.Random], Schema]] = [
    multiples,
    nesting,
    alternations,
    repetitions,
    enumerations,
    references,
    properties,
]


def hostile(seed: int) -> Schema:
    """Return the hostile schema of this number."""
    draw = random.Random(seed)
    return draw.choice(KINDS)(draw)


# The server ----------------------------------------------------------------------------------------


@dataclass
class Server:
    """A running server."""

    url: str
    pid: int
    log: Path

    def processes(self) -> dict[int, str]:
        """Return its processes and what they run."""
        found, pending = {}, [self.pid]
        while pending:
            pid = pending.pop()
            try:
                found[pid] = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
                for task in Path(f"/proc/{pid}/task").iterdir():
                    pending += map(int, (task / "children").read_text().split())
            except OSError:
                continue
        return found

    def memory_mb(self) -> float:
        """Return the memory of all its processes. What they share counts once (PSS)."""
        total = 0
        for pid in self.processes():
            try:
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            except OSError:
                continue
            total += next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)
        return total / 1024

    def model_pid(self) -> int:
        """Return the process of the model."""
        return next(
            pid for pid, command in self.processes().items() if "fairlead.engine.worker.main" in command
        )


@contextmanager
def serving(folder_of_model: Path, fronts: int) -> Iterator[Server]:
    """Run a server with a key for each tenant."""
    cache = {"maxMemoryMb": CACHE_MB}
    model = {"path": str(folder_of_model), "preload": True, "slots": 16, "kvCache": cache}
    config = {
        "models": {MODEL: model},
        "apiKeys": [{"key": key, "user": name} for name, key in KEYS.items()],
        "fronts": fronts,
    }
    with tempfile.TemporaryDirectory() as folder:
        file, log = Path(folder) / "fairlead.yaml", Path(folder) / "log"
        file.write_text(json.dumps(config))
        command = [sys.executable, "-m", "fairlead", "serve", "--port", "0", "--config", str(file)]
        with log.open("wb") as written:
            process = subprocess.Popen(command, stdout=written, stderr=subprocess.STDOUT)
        try:
            while not (found := READY.search(log.read_text(errors="replace"))):
                if process.poll() is not None:
                    sys.exit(log.read_text(errors="replace"))
                time.sleep(0.05)
            yield Server(f"http://{found[1]}:{found[2]}", process.pid, log)
        finally:
            process.terminate()
            process.wait()


def client(url: str, name: str) -> httpx.AsyncClient:
    """Return a client with the key of a tenant."""
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(
        limits=limits,
        base_url=url,
        headers={"Authorization": f"Bearer {KEYS[name]}"},
        timeout=120,
        trust_env=False,
    )


def chat(schema: Schema | None, **fields: Any) -> dict[str, Any]:
    """Return a request."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}
    if schema is not None:
        form = {"name": "answer", "schema": schema}
        body["response_format"] = {"type": "json_schema", "json_schema": form}
    return body


# Tenants -------------------------------------------------------------------------------------------


@dataclass
class Measured:
    """What the two other tenants saw. Times in milliseconds."""

    schemas_ms: list[float] = field(default_factory=list)
    gaps_ms: list[float] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)

    def summary(self) -> dict[str, Any]:
        """Return the quantiles."""
        return {
            "schemas": len(self.schemas_ms),
            "schema_p50_ms": round(statistics.median(self.schemas_ms), 1),
            "schema_p99_ms": round(quantile(self.schemas_ms, 0.99), 1),
            "gaps": len(self.gaps_ms),
            "gap_p50_ms": round(statistics.median(self.gaps_ms), 2),
            "gap_p99_ms": round(quantile(self.gaps_ms, 0.99), 2),
            "faults": dict(self.faults),
        }


def quantile(values: list[float], part: float) -> float:
    """Return a quantile of the values."""
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


async def read_streams(url: str, measured: Measured) -> None:
    """Read one stream after the other, until cancelled."""
    async with client(url, "reader") as reader:
        while True:
            before = None
            async with reader.stream(
                "POST", "/v1/chat/completions", json=chat(None, stream=True, max_tokens=400, ignore_eos=True)
            ) as answer:
                if answer.status_code != 200:
                    measured.faults[f"stream {answer.status_code}"] += 1
                async for line in answer.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    if '"error"' in line:
                        measured.faults[line[:80]] += 1
                    now = time.perf_counter()
                    if before is not None:
                        measured.gaps_ms.append(1000 * (now - before))
                    before = now


async def send_schemas(url: str, measured: Measured, numbers: Iterator[int]) -> None:
    """Send a new small schema five times a second, until cancelled."""
    async with client(url, "victim") as victim:
        while True:
            schema = {
                "type": "object",
                "properties": {f"field{next(numbers)}": {"type": "integer"}},
                "additionalProperties": False,
            }
            began = time.perf_counter()
            answer = await victim.post("/v1/chat/completions", json=chat(schema, max_tokens=8))
            measured.schemas_ms.append(1000 * (time.perf_counter() - began))
            if answer.status_code != 200:
                measured.faults[f"schema {answer.status_code}: {answer.text[:60]}"] += 1
            await trio.sleep(0.2)


async def attack(url: str, first: int, count: int, seconds: float) -> dict[str, int]:
    """Send `count` hostile schemas evenly over `seconds`; return the answers by status."""
    answers: Counter[str] = Counter()

    async def send(attacker: httpx.AsyncClient, number: int) -> None:
        with trio.move_on_after(PATIENCE_S) as patience:
            try:
                answer = await attacker.post("/v1/chat/completions", json=chat(hostile(number), max_tokens=8))
                answers[str(answer.status_code)] += 1
            except httpx.HTTPError as error:
                answers[type(error).__name__] += 1
        if patience.cancelled_caught:
            answers["left"] += 1

    began = trio.current_time()
    async with client(url, "attacker") as attacker, trio.open_nursery() as nursery:
        for index in range(count):
            await trio.sleep_until(began + index * seconds / count)
            nursery.start_soon(send, attacker, first + index)
    return dict(answers)


async def refuse_all(task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED) -> None:
    """Read requests and answer 400, until cancelled."""

    async def answer(stream: trio.SocketStream) -> None:
        received = bytearray()
        with suppress(trio.BrokenResourceError):  # the client has left
            while piece := await stream.receive_some(65536):
                received += piece
                head, end, body = received.partition(b"\r\n\r\n")
                length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
                if end and length and len(body) >= int(length[1]):
                    await stream.send_all(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
                    received.clear()

    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    task_status.started(f"http://127.0.0.1:{listener.socket.getsockname()[1]}")
    await trio.serve_listeners(answer, [listener])


async def run_attack(options: argparse.Namespace, url: str | None) -> dict[str, int]:
    """Attack a server, or a socket that refuses at once if `url` is None; return the answers by status."""
    first, seconds = options.seed * 1_000_000, 60 * options.minutes
    if url is not None:
        return await attack(url, first, options.schemas, seconds)
    async with trio.open_nursery() as nursery:
        nobody = await nursery.start(refuse_all)
        answers = await attack(nobody, first, options.schemas, seconds)
        nursery.cancel_scope.cancel()
    return answers


async def measure(server: Server, options: argparse.Namespace) -> dict[str, Any]:
    """Measure the two tenants alone, then beside the attack."""
    numbers = iter(range(10**9))

    @contextmanager
    def tenants(nursery: trio.Nursery) -> Iterator[Measured]:
        measured = Measured()
        for _ in range(STREAMS):
            nursery.start_soon(read_streams, server.url, measured)
        nursery.start_soon(send_schemas, server.url, measured, numbers)
        yield measured
        nursery.cancel_scope.cancel()

    async def attacked(url: str, *, minutes: float, schemas: int) -> Any:
        command = [sys.executable, __file__, "--attack", url, "--minutes", str(minutes)]
        command += ["--schemas", str(schemas), "--seed", str(options.seed)]
        return json.loads((await trio.run_process(command, capture_stdout=True)).stdout)

    async with trio.open_nursery() as nursery:
        with tenants(nursery) as alone:
            count = round(options.schemas * ALONE_S / (60 * options.minutes))
            await attacked("nobody", minutes=ALONE_S / 60, schemas=count)
    before_mb, model_pid = server.memory_mb(), server.model_pid()
    memory_mb = []

    async def watch() -> None:
        while True:
            memory_mb.append(server.memory_mb())
            await trio.sleep(1)

    async with trio.open_nursery() as nursery:
        with tenants(nursery) as beside:
            nursery.start_soon(watch)
            began = time.monotonic()
            answers = await attacked(server.url, minutes=options.minutes, schemas=options.schemas)
            took_s = time.monotonic() - began
    await trio.sleep(3)
    first, second = alone.summary(), beside.summary()
    return {
        "attack": {"took_s": round(took_s, 1), "answers": answers},
        "alone": first,
        "beside": second,
        "schema_p50_ratio": round(second["schema_p50_ms"] / first["schema_p50_ms"], 2),
        "schema_p99_ratio": round(second["schema_p99_ms"] / first["schema_p99_ms"], 2),
        "gap_p99_ratio": round(second["gap_p99_ms"] / first["gap_p99_ms"], 2),
        "memory_mb": {
            "before": round(before_mb),
            "most": round(max(memory_mb)),
            "after": round(server.memory_mb()),
        },
        "model_was_killed": server.model_pid() != model_pid,
        "tracebacks": server.log.read_text(errors="replace").count("Traceback"),
    }


def main() -> None:
    """Run the attack, or measure it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--schemas", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", type=Path, default=demonstration_model(), help="folder of the model")
    parser.add_argument("--fronts", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--attack", metavar="URL", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.attack:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        url = None if options.attack == "nobody" else options.attack
        print(json.dumps(trio.run(run_attack, options, url)))
        return
    with serving(options.model, options.fronts) as server:
        result = trio.run(measure, server, options)
    result = {
        "machine": machine(),
        "model": options.model.name,
        "fronts": options.fronts,
        "seed": options.seed,
        **result,
    }
    text = json.dumps(result, indent=2) + "\n"
    print(text)
    if options.json:
        options.json.write_text(text)


if __name__ == "__main__":
    main()
