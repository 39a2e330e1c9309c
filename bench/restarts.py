"""Kill and stop the processes of a server with several fronts under load, and measure how long new jobs wait.

    python bench/restarts.py [--minutes 5] [--seed 0] [--json bench/results/restarts.json]

A supervisor runs two fronts, the dispatcher and two engines with the demonstration model, `steady` and
`struck`. Every 1 to 3 s a front, the dispatcher or the engine of `struck` gets SIGKILL, or SIGSTOP and
perhaps SIGCONT later. With libfaketime (Debian's package `faketime`) the clock of all processes is set back
by an hour at random, and forward again. Clients keep streams of both models running; others ask for one
token of `steady` at a constant rate, over a new connection each. A job waits from its first attempt to its
first token: a client whose connection is lost tries again at once. Exit status 1: a goal is missed.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h11
import trio

from fairlead.base.config import demonstration_model

FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1")
FRONTS = 2
START_S = 120.0
STOP_S = 60.0
PROBES_PER_S = 10
PROBE_TIMEOUT_S = 60.0
STREAMS = 4  # of each model
STREAM_TOKENS = 300
STREAM_PAUSE_S = 1.0
MOST_TRIES = 50
RETRY_S = 0.05
WAIT_GOAL_S, REFUSED_GOAL = 3.0, 0.01


class Server:
    """The server under test. `clock` is the file with the offset of its clock; None without libfaketime."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "log"
        self.port = 0
        self.clock = folder / "clock" if FAKETIME.exists() else None
        self._config = folder / "config.yaml"
        self._process: subprocess.Popen[bytes] | None = None
        self.steady_pid = 0
        engine: dict[str, Any] = {"path": str(demonstration_model()), "threads": 1, "slots": 8}
        models = {"steady": engine | {"preload": True}, "struck": engine | {"watchdog": "2s"}}
        settings = {"port": 0, "fronts": FRONTS, "logLevel": "info", "logJson": True, "models": models}
        self._config.write_text(json.dumps(settings))

    async def start(self) -> None:
        """Start it; return when it is ready."""
        environment = dict(os.environ)
        if self.clock is not None:
            self.set_clock(0)
            environment |= {
                "LD_PRELOAD": str(FAKETIME),
                "FAKETIME_TIMESTAMP_FILE": str(self.clock),
                "FAKETIME_CACHE_DURATION": "1",
                "FAKETIME_DONT_FAKE_MONOTONIC": "1",
                "DONT_FAKE_MONOTONIC": "1",
            }
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(  # noqa: ASYNC220  waited for without Trio
                [sys.executable, "-m", "fairlead", "serve", "--config", str(self._config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
            )
        with trio.fail_after(START_S):
            while not self.port:
                await trio.sleep(0.1)
                self._find_port()
        (self.steady_pid,) = self.pids("worker")  # the other one is loaded by its first job

    def stop(self) -> int | None:
        """Stop it; return its exit status, None if it had to be killed."""
        assert self._process is not None
        self._process.terminate()
        try:
            return self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return None

    def pids(self, role: str) -> list[int]:
        """Return the ids of the processes of a role: `front`, `dispatcher` or `worker`, of `struck` only.

        Without the processes that wait to take the place of a front or a dispatcher.
        """
        assert self._process is not None
        found = []
        for status in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                if int(status.read_text().rpartition(")")[2].split()[1]) != self._process.pid:
                    continue
                words = (status.parent / "cmdline").read_bytes().decode().split("\0")
                name = "worker" if "fairlead.engine.worker.main" in words else "".join(words[-3:-2])
                if name.startswith(role):  # the name of one that has just ended is empty
                    found.append(int(status.parent.name))
        found = sorted(pid for pid in found if pid != self.steady_pid)
        return found[: {"front": FRONTS, "dispatcher": 1}.get(role)]

    def set_clock(self, offset_s: int) -> None:
        """Set the clock of all its processes, relative to the machine's."""
        if self.clock is not None:
            draft = self.clock.with_suffix(".draft")
            draft.write_text(f"{offset_s:+d}s\n")
            draft.replace(self.clock)

    def _find_port(self) -> None:
        assert self._process is not None
        if self._process.poll() is not None:
            raise RuntimeError(f"the server ended:\n{self.log.read_text()[-3000:]}")
        for line in self.log.read_text().splitlines():
            if "http://127.0.0.1:" in line and "ready" in line.lower():
                self.port = int(line.rpartition("http://127.0.0.1:")[2].split('"')[0].split("/")[0])


@dataclass
class Report:
    """What the clients have seen. `waits_s`: to the first token, of each job, by its kind."""

    waits_s: dict[str, list[float]] = field(default_factory=dict)
    tries: Counter[str] = field(default_factory=Counter)
    endings: Counter[str] = field(default_factory=Counter)
    strikes: Counter[str] = field(default_factory=Counter)
    longest: list[tuple[float, str, float]] = field(default_factory=list)
    events: list[tuple[float, str]] = field(default_factory=list)


class Clients:
    """The load: streams of both models, and probes."""

    def __init__(self, server: Server, report: Report) -> None:
        self._server = server
        self._report = report
        self.is_over = False
        self._began_s = time.monotonic()

    async def run(self) -> None:
        """Run until `is_over`, and until all have ended."""
        async with trio.open_nursery() as nursery:
            for model in ("steady", "struck"):
                for _ in range(STREAMS):
                    nursery.start_soon(self._stream, model)
            while not self.is_over:
                nursery.start_soon(self._job, "probe", "steady", 1)
                await trio.sleep(1 / PROBES_PER_S)

    async def _stream(self, model: str) -> None:
        while not self.is_over:
            await self._job(f"stream of {model}", model, STREAM_TOKENS)
            await trio.sleep(STREAM_PAUSE_S)

    async def _job(self, kind: str, model: str, tokens: int) -> None:
        """Ask until there is a first token, and read the rest."""
        began_s = time.monotonic()
        seen: list[float] = []
        for _ in range(MOST_TRIES):
            with trio.move_on_after(PROBE_TIMEOUT_S) as limit:
                ending = await self._try(model, tokens, seen)
            if limit.cancelled_caught:
                ending = "no end"
            self._report.tries[ending] += 1
            if seen or ending not in ("refused", "cut"):
                break
            await trio.sleep(RETRY_S)
        self._report.endings[f"{kind}: {ending}"] += 1
        wait_s = (seen[0] if seen else time.monotonic()) - began_s
        self._report.waits_s.setdefault(kind, []).append(wait_s)
        if wait_s > WAIT_GOAL_S and model == "steady":
            self._report.longest.append((round(began_s - self._began_s, 2), kind, round(wait_s, 2)))

    async def _try(self, model: str, tokens: int, seen: list[float]) -> str:
        """Make one attempt over a new connection; return how it ended. `seen` gets the time of a token."""
        body = {"model": model, "prompt": "Once", "max_tokens": tokens, "ignore_eos": True, "stream": True}
        payload = json.dumps(body | {"temperature": 0}).encode()
        try:
            stream = await trio.open_tcp_stream("127.0.0.1", self._server.port)
        except OSError:
            return "refused"
        async with stream:
            http = h11.Connection(h11.CLIENT)
            headers = [("Host", "localhost"), ("Content-Length", str(len(payload)))]
            headers += [("Content-Type", "application/json"), ("Connection", "close")]
            data = http.send(h11.Request(method="POST", target="/v1/completions", headers=headers)) or b""
            answer, status = b"", 0
            try:
                await stream.send_all(data + payload)
                http.send(h11.Data(data=payload))
                http.send(h11.EndOfMessage())
                async for event in _events(http, stream):
                    if isinstance(event, h11.Response):
                        status = event.status_code
                    elif isinstance(event, h11.Data):
                        answer += bytes(event.data)
                        if not seen and status == 200 and b'"text"' in answer:
                            seen.append(time.monotonic())
            except (OSError, trio.BrokenResourceError, h11.RemoteProtocolError):
                return "cut"
        if status == 200:
            return "whole" if b"data: [DONE]" in answer else "an error in the stream"
        with suppress(ValueError, KeyError, TypeError):
            return f"{status} {json.loads(answer)['error']['code']}"
        return str(status)


async def _events(http: h11.Connection, stream: trio.SocketStream) -> AsyncIterator[Any]:
    """Yield the events of a response. Raises `h11.RemoteProtocolError` if it is not complete."""
    while not isinstance(event := http.next_event(), h11.EndOfMessage):
        if event is h11.NEED_DATA:
            http.receive_data(bytes(await stream.receive_some(65536)))
        else:
            yield event


async def strike(server: Server, report: Report, seed: int, slowness: float, began_s: float) -> None:
    """Kill and stop processes, and set clocks, until cancelled. The engine of `steady` is left alone.

    On a machine with other work, where processes start more slowly, `slowness` times as much time passes
    between two strikes.
    """
    rng = random.Random(seed)
    async with trio.open_nursery() as nursery:
        while True:
            await trio.sleep(slowness * rng.uniform(1, 3))
            role, how = rng.choice(("front", "dispatcher", "worker")), rng.choice(("kill", "stop"))
            found = server.pids(role)
            stop_s = rng.choice((0.3, 2.0, None))
            if server.clock is not None and rng.random() < 0.5:
                offset_s = rng.choice((-3600, 0))
                server.set_clock(offset_s)
                report.events.append((round(time.monotonic() - began_s, 2), f"clock {offset_s:+d} s"))
            if not found:
                report.strikes[f"{role}: none was there"] += 1
                continue
            pid = rng.choice(found)
            report.strikes[f"{role}: {how}"] += 1
            report.events.append((round(time.monotonic() - began_s, 2), f"{how} {role} {pid}"))
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if how == "kill" else signal.SIGSTOP)
            if how == "stop" and stop_s is not None:
                nursery.start_soon(_continue, pid, stop_s)


async def _continue(pid: int, after_s: float) -> None:
    await trio.sleep(after_s)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def percentile(values: list[float], share: float) -> float:
    """Return a percentile; 0 without values."""
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 3) if ordered else 0.0


async def measure(minutes: float, seed: int, slowness: float, folder: Path) -> dict[str, Any]:
    """Run the server, the load and the strikes; return the result."""
    server, report = Server(folder), Report()
    load_before = os.getloadavg()[0]
    status: int | None = None
    try:
        await server.start()
        clients = Clients(server, report)
        began_s = time.monotonic()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(clients.run)
            async with trio.open_nursery() as striking:
                striking.start_soon(strike, server, report, seed, slowness, began_s)
                await trio.sleep(60 * minutes)
                striking.cancel_scope.cancel()
            clients.is_over = True
            nursery.cancel_scope.deadline = trio.current_time() + PROBE_TIMEOUT_S
    finally:
        status = server.stop()
    waits = {
        kind: {
            "jobs": len(found),
            "p50": percentile(found, 0.5),
            "p99": percentile(found, 0.99),
            "max": percentile(found, 1.0),
            "over_3_s": sum(wait > WAIT_GOAL_S for wait in found),
        }
        for kind, found in sorted(report.waits_s.items())
    }
    connections = report.tries.total()
    refused = report.tries["refused"]
    kept = [*report.waits_s.get("probe", []), *report.waits_s.get("stream of steady", [])]
    problems = []
    if percentile(kept, 0.99) > WAIT_GOAL_S:
        problems.append(f"a new job waits {percentile(kept, 0.99)} s (p99), more than {WAIT_GOAL_S:g} s")
    if refused > REFUSED_GOAL * connections:
        problems.append(f"{refused} of {connections} connections were refused")
    if status != 0:
        problems.append(f"the server ended with the exit status {status}")
    return {
        "minutes": minutes,
        "seed": seed,
        "slowness": slowness,
        "waits_s": waits,
        "wait_of_steady_p99_s": percentile(kept, 0.99),
        "connections": connections,
        "refused": refused,
        "attempts": dict(sorted(report.tries.items())),
        "endings": dict(sorted(report.endings.items())),
        "strikes": dict(sorted(report.strikes.items())),
        "clock_was_changed": server.clock is not None,
        "cores": os.cpu_count(),
        "load_average": [round(load_before, 1), round(os.getloadavg()[0], 1)],
        "problems": problems,
        "longest": sorted(report.longest, key=lambda found: -found[2])[:20],
        "events": report.events,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=5.0, help="duration of the load")
    parser.add_argument("--seed", type=int, default=0, help="seed of the strikes")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    parser.add_argument("--log", type=Path, help="keep the server's log in this file")
    parser.add_argument("--slowness", type=float, default=1.0, help="factor of the time between strikes")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="restarts-") as folder:
        try:
            result = trio.run(measure, options.minutes, options.seed, options.slowness, Path(folder))
        finally:
            if options.log:
                options.log.write_bytes((Path(folder) / "log").read_bytes())
    if options.json:
        kept = {name: value for name, value in result.items() if name != "events"}
        options.json.write_text(json.dumps(kept, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return int(bool(result["problems"]))


if __name__ == "__main__":
    sys.exit(main())
