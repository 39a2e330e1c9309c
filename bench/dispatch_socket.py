"""The dispatcher as a process of its own: cycles per second over a Unix socket, and the latency of a grant.

A cycle is submit → grant → begin → end. Throughput: raw messages, with a fixed number of jobs under way, so
that the dispatcher's process is what limits it. Latency: fronts' own client at a given rate, random arrivals.

    python bench/dispatch_socket.py --rounds 5 --json bench/results/dispatch_socket.json

Other work on the machine only adds to the figures, so of several rounds the best one counts, for each figure
by itself; `rounds` has the others. `loop_ns`, the time of a turn of a short loop, tells how fast the
processor was.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

import trio

from fairlead.base.config import QueueConfig
from fairlead.base.frame_link import FrameLink
from fairlead.base.runtime import interpreter
from fairlead.base.runtime.gc_tuning import freeze
from fairlead.distributed.frontends import wire
from fairlead.distributed.frontends.client import DispatchClient
from fairlead.distributed.frontends.server import FrontServer
from fairlead.distributed.ipc.address import LinkAddress, connect, listen
from fairlead.distributed.ipc.handshake import shake_hands
from fairlead.nodes.limits import NodeLimits
from fairlead.router.dispatch.dispatcher import Dispatcher
from fairlead.router.dispatch.job_spec import JobSpec
from machine import loop_ns, machine

MODEL = "m"
QUEUE = QueueConfig(capacity=100_000, timeout_s=600.0)


def job(number: int) -> JobSpec:
    """Return a job of one of 20 tenants."""
    return JobSpec(
        request_id=f"request-{number}",
        tenant=f"tenant-{number % 20}",
        model=MODEL,
        stream=True,
        prompt_tokens=300,
        longest_prompt=300,
        max_tokens=200,
    )


async def serve(path: str, nodes: int, seats: int) -> None:
    """Run a dispatcher until cancelled."""
    dispatcher = Dispatcher(QUEUE, epoch=1)
    for number in range(nodes):
        dispatcher.scheduler.node_up(f"node-{number}", frozenset({MODEL}), NodeLimits(seats, 10_000))
    server = FrontServer(dispatcher, epoch=1, questions={"cpu_s": lambda _front: time.process_time()})

    async def accept(stream: trio.abc.Stream) -> None:
        await server.serve(stream, await shake_hands(stream, name="dispatcher", key=None, is_client=False))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(dispatcher.run)
        nursery.start_soon(server.run)
        listeners = await listen(LinkAddress(path=path))
        freeze()  # as the role does
        print("ready", flush=True)
        await trio.serve_listeners(accept, listeners)


async def open_link(path: str, name: str = "bench") -> trio.abc.Stream:
    """Return an authenticated connection."""
    stream = await connect(LinkAddress(path=path))
    await shake_hands(stream, name=name, key=None, is_client=True)
    return stream


async def throughput(path: str, under_way: int, seconds: float) -> dict[str, float]:
    """Return cycles a second, and the dispatcher's CPU time for each."""
    # A name of its own: the dispatcher keeps the jobs of a front that is away for some seconds.
    link = FrameLink(await open_link(path, f"bench-{under_way}"), wire.to_front_decoder)
    ended = number = 0
    cpu: list[float] = []
    has_all = trio.Event()

    def submit() -> None:
        nonlocal number
        number += 1
        link.send(wire.SubmitJob(number, job(number)))

    def handle(message: wire.ToFront) -> None:
        nonlocal ended
        match message:
            case wire.SeatGranted(granted):
                link.send(wire.BeginJob(granted))
                link.send(wire.EndJob(granted, 100))
                ended += 1
                submit()
            case wire.Answered(_, value):
                cpu.append(value)
                if len(cpu) == 2:
                    has_all.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(link.run, handle)
        for _ in range(under_way):
            submit()
        await trio.sleep(1)
        link.send(wire.Ask(0, "cpu_s"))
        before, began = ended, time.perf_counter()
        while time.perf_counter() - began < seconds:
            await trio.sleep(0.5)
            link.send(wire.Progress({}))
        cycles, elapsed_s = ended - before, time.perf_counter() - began
        link.send(wire.Ask(0, "cpu_s"))
        assert not link.is_closed, "one of both processes did not run for three seconds"
        await has_all.wait()
        link.close()
    return {
        "cycles_per_s": round(cycles / elapsed_s),
        "dispatcher_cpu_us_per_cycle": round(1e6 * (cpu[1] - cpu[0]) / cycles, 1),
    }


async def latency(path: str, rate: float, seconds: float) -> dict[str, float]:
    """Return percentiles of the time from a job's arrival in a front to its seat, in milliseconds."""
    client = DispatchClient([partial(open_link, path, f"front-{rate:g}")], QUEUE)
    waits_ms: list[float] = []
    chance = random.Random(0)

    async def one(number: int) -> None:
        began = time.perf_counter()
        async with client.seat(job(number)) as seat:
            waits_ms.append(1000 * (time.perf_counter() - began))
            seat.begin(int)
            await trio.sleep(0.005)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.run)
        await trio.sleep(1)
        cpu_s, own_s = await client.ask("cpu_s"), time.process_time()
        async with trio.open_nursery() as jobs:
            began = at = trio.current_time()
            number = 0
            while at < began + seconds:
                at += chance.expovariate(rate)
                await trio.sleep_until(at)
                number += 1
                jobs.start_soon(one, number)
        cpu_s, own_s = await client.ask("cpu_s") - cpu_s, time.process_time() - own_s
        nursery.cancel_scope.cancel()
    cuts = statistics.quantiles(waits_ms, n=1000)
    return {
        "jobs_per_s": round(number / seconds),
        "p50_ms": round(cuts[499], 3),
        "p99_ms": round(cuts[989], 3),
        "max_ms": round(max(waits_ms), 3),
        "dispatcher_cpu_us_per_job": round(1e6 * cpu_s / number, 1),
        "front_cpu_us_per_job": round(1e6 * own_s / number, 1),
    }


def main() -> None:
    """Measure, and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--serve", help="internal: run the dispatcher on this socket")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    interpreter.prepare()  # as the server does
    if options.serve:
        trio.run(serve, options.serve, options.nodes, 4096 // options.nodes)
        return
    runs: list[dict[str, dict[str, float]]] = []
    for _ in range(options.rounds):
        runs.append({})
        for nodes in (1, 16):
            runs[-1] |= one_round(nodes, options.seconds)
        print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
    results = {
        case: {
            figure: (max if figure == "cycles_per_s" else min)(run[case][figure] for run in runs)
            for figure in runs[0][case]
        }
        for case in runs[0]
    }
    facts = {"machine": machine(), "loop_ns": round(loop_ns())}
    text = json.dumps(facts | {"results": results, "rounds": runs}, indent=1)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")


def one_round(nodes: int, seconds: float) -> dict[str, dict[str, float]]:
    """Start a dispatcher, and return its figures by case."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "dispatcher.sock")
        command = [sys.executable, __file__, "--serve", path, "--nodes", str(nodes)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            child.stdout.readline()
            drain = threading.Thread(target=child.stdout.read)
            drain.start()
            try:
                for under_way in (64, 1024):
                    case = f"{nodes} nodes, {under_way} under way"
                    found[case] = trio.run(throughput, path, under_way, seconds)
                for rate in (500, 2000):
                    found[f"{nodes} nodes, {rate} a second"] = trio.run(latency, path, rate, seconds)
            finally:
                child.terminate()
                drain.join()
    return found


if __name__ == "__main__":
    main()
