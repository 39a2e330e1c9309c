"""Measure a batch beside interactive load: what the load notices, and how much of the idle seats it uses.

    python bench/batches.py [--lines 10000] [--alone 60] [--json bench/results/batches.json]

The server is real except for the model's steps, which all take the same time, as those of a GPU that waits
for its memory (`batches_server.py`). So the figures are of the queue and of the lines' own overhead, not of a
model that slows down with more sequences. Streams arrive at random, at a constant mean rate.

1. The streams alone, for `--alone` seconds.
2. A batch beside them. When half of its lines are answered, the server gets SIGKILL.
3. A new server with the same folder, and the rest of the batch beside streams. Clients pause meanwhile.
4. The streams alone again, for half of the time of 1, with which it counts: the machine may have changed.

Goals: the p99 of the streams' first token and of their whole answers is at most 1.1 times that without the
batch; lines hold at least 95 % of the seats that no stream holds, while lines wait; each line has one result.
Exit status 1: a goal is missed.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import urllib.request
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import trio

from fairlead.server.load.client import LoadConnection, TimedAnswer, time_request
from machine import loop_ns, machine

SLOTS, STEP_MS = 32, 25
LINE_TOKENS, STREAM_TOKENS = 16, 32
STREAMS_PER_S = 10.0
MODEL = "simulated"
ENDPOINT = "/v1/chat/completions"
TIMEOUT_S = 60.0
START_S = 60.0
SETTLE_S = 3.0  # after a start of the server or the batch, which counts in no figure
POLL_S = 0.5
P99_RATIO, IDLE_SHARE = 1.1, 0.95
Figures = dict[str, Any]


class Seats(NamedTuple):
    """What the server's seats were used for; see `batches_server.py`."""

    batch_s: float = 0.0
    free_s: float = 0.0
    taken_s: float = 0.0
    stopped: float = 0.0

    def since(self, before: "Seats") -> "Seats":
        """Return the use since an earlier report."""
        return Seats(*(now - then for now, then in zip(self, before, strict=True)))

    def and_(self, other: "Seats") -> "Seats":
        """Return the sum of two spans."""
        return Seats(*(one + two for one, two in zip(self, other, strict=True)))


class Server:
    """The server of the benchmark. `seats` is its latest report; `url` where it listens."""

    def __init__(self, folder: Path) -> None:
        self.seats = Seats()
        self.url = ""
        script = Path(__file__).with_name("batches_server.py")
        self._command = [sys.executable, str(script), str(folder), str(SLOTS), str(STEP_MS)]
        self._process: trio.Process | None = None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run until killed or cancelled."""
        self._process = process = await trio.lowlevel.open_process(self._command, stdout=subprocess.PIPE)
        assert process.stdout is not None
        buffer = b""
        try:
            async for data in process.stdout:
                *lines, buffer = (buffer + data).split(b"\n")
                for line in lines:
                    if line.startswith(b"seats "):
                        self.seats = Seats(*map(float, line.split()[1:]))
                    else:
                        self.url = f"http://127.0.0.1:{int(line)}"
                        task_status.started()
        finally:
            process.kill()
            with trio.CancelScope(shield=True):
                await process.wait()

    def kill(self) -> None:
        """Send SIGKILL."""
        assert self._process is not None
        self._process.kill()


class Streams:
    """The interactive load. `answers` are those that began since `clear`."""

    def __init__(self, server: Server, seed: int = 0) -> None:
        self.answers: list[TimedAnswer] = []
        self._server = server
        self._random = random.Random(seed)
        self._idle: list[LoadConnection] = []

    async def run(self) -> None:
        """Send requests at random times until cancelled."""
        number = 0
        async with trio.open_nursery() as nursery:
            while True:
                await trio.sleep(self._random.expovariate(STREAMS_PER_S))
                number += 1
                nursery.start_soon(self._one, number)

    async def _one(self, number: int) -> None:
        connection = self._idle.pop() if self._idle else LoadConnection(self._server.url)
        body = _body(f"Hello {number}", STREAM_TOKENS) | {"stream": True}
        answers = self.answers  # of the part in which the request began
        answers.append(await time_request(connection, ENDPOINT, body, timeout_s=TIMEOUT_S))
        self._idle.append(connection)


def _body(text: str, tokens: int) -> Figures:
    messages = [{"role": "user", "content": text}]
    return {"model": MODEL, "messages": messages, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}


def lines(count: int) -> bytes:
    """Return the input file."""
    requests = (
        {
            "custom_id": f"id-{index}",
            "method": "POST",
            "url": ENDPOINT,
            "body": _body(f"Line {index}", LINE_TOKENS),
        }
        for index in range(count)
    )
    return b"".join(json.dumps(request).encode() + b"\n" for request in requests)


async def send(url: str, body: bytes | None = None, kind: str = "application/json") -> bytes:
    """Send a request of the client that has the batch."""

    def call() -> bytes:
        request = urllib.request.Request(url, body, {"Content-Type": kind} if body is not None else {})
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            received: bytes = answer.read()
            return received

    return await trio.to_thread.run_sync(call)


async def create(server: Server, count: int) -> str:
    """Create a batch; return its id."""
    form = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\n'
    form += b'Content-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'
    form += lines(count) + b"\r\n--b--\r\n"
    file = json.loads(await send(f"{server.url}/v1/files", form, "multipart/form-data; boundary=b"))
    body = {"input_file_id": file["id"], "endpoint": ENDPOINT, "completion_window": "24h"}
    return str(json.loads(await send(f"{server.url}/v1/batches", json.dumps(body).encode()))["id"])


async def until(server: Server, batch_id: str, completed: int) -> Figures:
    """Wait until so many lines have results, or the batch has ended; return the batch."""
    while True:
        batch: Figures = json.loads(await send(f"{server.url}/v1/batches/{batch_id}"))
        if batch["request_counts"]["completed"] >= completed or batch.get("completed_at"):
            return batch
        await trio.sleep(POLL_S)


async def alone(server: Server, seconds: float, seed: int) -> list[TimedAnswer]:
    """Return the answers of streams without a batch."""
    streams = Streams(server, seed)
    with trio.move_on_after(SETTLE_S + seconds):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(streams.run)
            await trio.sleep(SETTLE_S)
            streams.answers = []
    return streams.answers


async def beside(
    server: Server, batch_id: str, completed: int, seed: int
) -> tuple[list[TimedAnswer], Seats, float]:
    """Return the answers of streams until so many lines have results, the use of seats, and the time."""
    streams = Streams(server, seed)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(streams.run)
        await trio.sleep(SETTLE_S)
        streams.answers = []
        before, began = server.seats, trio.current_time()
        await until(server, batch_id, completed)
        used, took_s = server.seats.since(before), trio.current_time() - began
        answers = streams.answers
        nursery.cancel_scope.cancel()
    return answers, used, took_s


def figures(answers: list[TimedAnswer]) -> Figures:
    """Return what the streams' clients have seen."""
    whole = [answer for answer in answers if answer.error is None and answer.pieces_s]
    firsts = sorted(answer.pieces_s[0] - answer.started_s for answer in whole)
    wholes = sorted(answer.ended_s - answer.started_s for answer in whole)
    result: Figures = {"answers": len(answers)}
    for name, times in (("first_token", firsts), ("answer", wholes)):
        for share, label in ((0.5, "p50"), (0.99, "p99"), (1.0, "most")):
            at = times[min(int(share * len(times)), len(times) - 1)] if times else 0.0
            result[f"{name}_{label}_ms"] = round(1000 * at, 2)
    result["failures"] = dict(Counter(answer.error for answer in answers if answer.error is not None))
    return result


async def check(server: Server, batch: Figures, count: int) -> Figures:
    """Return how often lines are in the results."""
    content = await send(f"{server.url}/v1/files/{batch['output_file_id']}/content")
    found = Counter(json.loads(line)["custom_id"] for line in content.splitlines())
    expected = {f"id-{index}" for index in range(count)}
    return {
        "once": sum(found[name] == 1 for name in expected),
        "missing": len(expected - found.keys()),
        "twice": sum(number > 1 for number in found.values()),
        "errors": batch["request_counts"]["failed"],
    }


async def measure(folder: Path, count: int, alone_s: float) -> Figures:
    """Run all parts; return the result."""
    server = Server(folder)
    async with trio.open_nursery() as nursery:
        await nursery.start(server.run)
        quiet = await alone(server, alone_s, 1)
        batch_id = await create(server, count)
        answers, used, took_s = await beside(server, batch_id, count // 2, 2)
        server.kill()
        at_kill = trio.current_time()
        server = Server(folder)
        with trio.fail_after(START_S):
            await nursery.start(server.run)
        restart_s = trio.current_time() - at_kill
        # The last lines leave seats without work: they count in no figure but that of their results.
        more, used_later, took_later_s = await beside(server, batch_id, count - count // 20, 3)
        batch = await until(server, batch_id, count)
        quiet += await alone(server, alone_s / 2, 4)
        results = await check(server, batch, count)
        nursery.cancel_scope.cancel()
    seats = used.and_(used_later)
    seconds = took_s + took_later_s
    return {
        "streams_alone": (before := figures(quiet)),
        "streams_beside": (under := figures(answers + more)),
        "first_token_p99_ratio": round(under["first_token_p99_ms"] / before["first_token_p99_ms"], 3),
        "answer_p99_ratio": round(under["answer_p99_ms"] / before["answer_p99_ms"], 3),
        "idle_seats_used": round(seats.batch_s / (seats.batch_s + seats.free_s), 4),
        "seats_of_lines": round(seats.batch_s / seconds, 2),
        "engine_slots_taken": round(seats.taken_s / seconds / SLOTS, 4),
        "lines_stopped_for_streams": int(seats.stopped),
        "lines_per_s": round(0.95 * count / seconds, 1),
        "seconds_beside": round(seconds, 1),
        "restart_s": round(restart_s, 2),
        "results": results,
    }


def missed(result: Figures, count: int) -> list[str]:
    """Return the goals that were missed."""
    goals = {
        f"first token p99 at most {P99_RATIO} times": result["first_token_p99_ratio"] <= P99_RATIO,
        f"answer p99 at most {P99_RATIO} times": result["answer_p99_ratio"] <= P99_RATIO,
        f"idle seats used at least {IDLE_SHARE}": result["idle_seats_used"] >= IDLE_SHARE,
        "each line has one result": result["results"]
        == {"once": count, "missing": 0, "twice": 0, "errors": 0},
        "no stream fails": not result["streams_beside"]["failures"],
    }
    return [name for name, is_reached in goals.items() if not is_reached]


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--lines", type=int, default=10_000)
    parser.add_argument("--alone", type=float, default=60.0, metavar="SECONDS", help="time without a batch")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    facts = machine() | {"loop_ns": round(loop_ns(), 1)}
    with tempfile.TemporaryDirectory() as folder:
        result = trio.run(partial(measure, Path(folder), options.lines, options.alone))
    result = {
        "benchmark": "batches",
        "machine": facts | {"load_after": machine()["load"]},
        "seats": SLOTS,
        "step_ms": STEP_MS,
        "lines": options.lines,
        "line_tokens": LINE_TOKENS,
        "stream_tokens": STREAM_TOKENS,
        "streams_per_s": STREAMS_PER_S,
        "alone_s": options.alone,
        **result,
        "goals_missed": missed(result, options.lines),
    }
    print(json.dumps(result, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 1 if result["goals_missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
