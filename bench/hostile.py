"""Send a flood of mutated requests to a server, and check that it stays correct and fast for other clients.

Starts a server and a process that attacks it. The attacker runs only while a processor is idle (SCHED_IDLE),
because a real attacker uses the processor of another machine. A canary requests the same 16 tokens again and
again, before, during and after the attack. The exit status is 1 if an answer is wrong, a text of the canary
differs, or the log contains a traceback.

Then one tenant attacks the others, as `hostile_client/neighbours.py` describes, each time on a new server.
The exit status is 1 also if a neighbour notices more than is acceptable.

    python bench/hostile.py [--requests 100000] [--connections 10000] [--json bench/results/hostile.json]
    python bench/hostile.py --only all [--storm-s 300]    # only the attacks of tenants, or these by name
    python bench/hostile.py --replay request:4711 --url http://127.0.0.1:8000
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import trio

from fairlead.base.config import demonstration_model
from fairlead.server.descriptors import raise_limit
from hostile_client.attack import Address, Attack, Findings
from hostile_client.neighbours import ATTACKS, run_attack
from hostile_client.server import Server, serving_with
from hostile_client.target import Canary, grammar_of

MODEL = "fairlead-demo"
SPARE = "spare"
ATTACKER = "127.0.0.2" if sys.platform == "linux" else None  # requests of different addresses take turns
DEMO = {"path": str(demonstration_model())}
SETTINGS = {
    "models": {MODEL: DEMO | {"preload": True}, SPARE: DEMO},
    "limits": {"bodyTimeout": "2s"},  # some requests announce a longer body than they send
}


def serving(**more: Any) -> AbstractContextManager[Server]:
    """Start a server with two models and `more` settings, and end it after the block."""
    return serving_with(SETTINGS | more)


async def attack(address: Address, options: argparse.Namespace) -> Findings:
    """Send the attack; runs in the attacker's process."""
    grammar = await grammar_of(address, models=(MODEL,), spare=SPARE)
    attack = Attack(address, grammar, at_once=options.at_once, source=ATTACKER)
    if options.replay:
        kind, _, seed = options.replay.partition(":")
        await attack.send_again(kind, int(seed))
    else:
        first = options.seed
        await attack.run(
            requests=range(first, first + options.requests),
            connections=range(first, first + options.connections),
        )
    return attack.findings


async def measure(server: Server, options: argparse.Namespace) -> dict[str, Any]:
    """Run the canary before, during and after the attack.

    The p99 of a thousand answers varies by a factor of two, so those before and after are combined.
    """
    alone, beside = Canary(server.address, MODEL), Canary(server.address, MODEL)
    with trio.move_on_after(options.alone_s):
        await alone.check_canary()
    memory_mb = server.memory_mb()
    began = time.monotonic()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(beside.check_canary)
        arguments = [f"--{name}={getattr(options, name.replace('-', '_'))}" for name in ATTACK_OPTIONS]
        url = f"http://{server.address[0]}:{server.address[1]}"
        command = [sys.executable, __file__, "--attack", "--url", url, *arguments]
        attacker = await trio.run_process(command, capture_stdout=True, check=True)
        nursery.cancel_scope.cancel()
    took_s = time.monotonic() - began
    with trio.move_on_after(options.alone_s):
        await alone.check_canary()
    found = json.loads(attacker.stdout)
    return {
        "requests": sum(found["answers"].values()),
        "connections": found["connections"],
        "at_once": options.at_once,
        "took_s": round(took_s, 1),
        "answers": found["answers"],
        "faults": found["faults"],
        "canary_alone": summary(alone),
        "canary_beside": summary(beside),
        "canary_texts": len(alone.texts | beside.texts),
        "canary_p99_ratio": round(percentile(beside.took_s, 99) / percentile(alone.took_s, 99), 2),
        "server_memory_mb": [round(memory_mb, 1), round(server.memory_mb(), 1)],
    }


ATTACK_OPTIONS = ("requests", "connections", "at-once", "seed")


def summary(canary: Canary) -> dict[str, Any]:
    """Return a canary's figures."""
    return {
        "answers": len(canary.took_s),
        "p50_ms": round(percentile(canary.took_s, 50) * 1000, 1),
        "p99_ms": round(percentile(canary.took_s, 99) * 1000, 1),
        "worst_ms": round(max(canary.took_s) * 1000, 1),
        "faults": canary.faults[:5],
    }


def percentile(values: list[float], percent: int) -> float:
    """Return a percentile of at least two values."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=100_000, help="number of requests")
    parser.add_argument(
        "--connections", type=int, default=10_000, help="number of connections with mutated bytes"
    )
    parser.add_argument("--at-once", type=int, default=8, help="concurrent clients of the attack")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first request and connection")
    parser.add_argument(
        "--alone-s", type=float, default=30.0, help="seconds of the canary before and after the attack"
    )
    parser.add_argument(
        "--only", nargs="+", choices=("all", *ATTACKS), help="only these attacks of one tenant on others"
    )
    parser.add_argument("--storm-s", type=float, default=30.0, help="seconds of the storm of schemas")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    parser.add_argument("--url", help="URL of a running server, for --replay")
    parser.add_argument("--replay", help="request:SEED or connection:SEED: send only this one")
    parser.add_argument("--attack", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()

    if options.attack or options.replay:
        host, _, port = options.url.removeprefix("http://").partition(":")
        if hasattr(os, "SCHED_IDLE"):  # Linux
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        else:
            os.nice(10)
        findings = trio.run(attack, (host, int(port)), options)
        print(json.dumps(findings.shown()))
        return 0
    raise_limit()
    result: dict[str, Any] = {"machine": f"{platform.machine()}, {os.cpu_count()} cores"}
    is_bad = False
    if not options.only:
        with serving() as server:
            result |= trio.run(measure, server, options)
        result["log"] = server.bugs[:20]
        canaries = result["canary_alone"]["faults"] + result["canary_beside"]["faults"]
        is_bad = bool(result["faults"] or server.bugs or canaries or result["canary_texts"] != 1)
    names = ATTACKS if not options.only or "all" in options.only else options.only
    result["attacks"] = {}
    for name in names:
        figures = result["attacks"][name] = trio.run(run_attack, name, options.storm_s)
        print(f"{name}: {'ok' if figures['ok'] else 'NOT ok'}", file=sys.stderr, flush=True)
        is_bad |= not figures["ok"]
    print(json.dumps(result, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return int(is_bad)


if __name__ == "__main__":
    sys.exit(main())
