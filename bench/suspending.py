"""Measure what suspension costs while every tenant has more requests than seats.

    python bench/suspending.py [--tenants 2,20] [--fairness roundRobin,tokens] [--seconds 20] [--rounds 2]
        [--model FOLDER] [--json bench/results/suspending.json]

Each tenant keeps eight requests waiting or running, or two if there are twenty tenants, with answers of 16 to
256 tokens of one server with eight seats. The tokens per second of all are measured with `suspension: true`
and `false`, in turns, each on a new server. The result has their ratio, and how many answers were paused at
the end of each run.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import trio

from fairlead.base.config import demonstration_model
from fairlead.server.load.client import LoadConnection, RequestFailedError
from machine import machine
from peers import server

MODEL = "bench"
SEATS = 8
CLIENTS = 16  # at least; and at least two a tenant
WARM_S = 3.0
LENGTHS = (16, 32, 64, 128, 256)
READY_S = 600.0
Figures = dict[str, Any]


@contextmanager
def ours(model: Path, fairness: str, tenants: int, *, suspends: bool) -> Iterator[str]:
    """Run a server with a key for each tenant."""
    settings = {
        "models": {MODEL: {"path": str(model), "preload": True, "slots": SEATS}},
        "apiKeys": [{"key": f"T{number}"} for number in range(tenants)],
        "queue": {"timeout": "10m", "fairness": fairness, "suspension": suspends},
        "store": "none",
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "fairlead.yaml"
        file.write_text(json.dumps(settings))
        command = f"{sys.executable} -m fairlead serve --port {{port}} --config {file}"
        with server(command, model, ready_s=READY_S) as url:
            yield url


async def saturate(url: str, tenants: int, seconds: float) -> tuple[float, int]:
    """Return the tokens per second of all tenants together, and how many answers are paused at the end."""
    received = 0

    def count(data: bytes) -> None:
        nonlocal received
        received += data.count(b"data: ")

    async def client(key: str, draw: random.Random) -> None:
        connection = LoadConnection(url, api_key=key)
        while True:
            body = {
                "model": MODEL,
                "prompt": f"Number {draw.random()}: the",
                "max_tokens": draw.choice(LENGTHS),
                "stream": True,
                "ignore_eos": True,
                "temperature": 1.0,
            }
            try:
                await connection.request("POST", "/v1/completions", body, on_data=count)
            except RequestFailedError as error:
                print(error, file=sys.stderr)
                await trio.sleep(1)

    async with trio.open_nursery() as nursery:
        for number in range(max(CLIENTS, 2 * tenants)):
            nursery.start_soon(client, f"T{number % tenants}", random.Random(number))
        await trio.sleep(WARM_S)
        before, began = received, trio.current_time()
        await trio.sleep(seconds)
        rate = (received - before) / (trio.current_time() - began)
        suspended = await trio.to_thread.run_sync(paused, url)
        nursery.cancel_scope.cancel()
    return round(rate, 1), suspended


def paused(url: str) -> int:
    """Return how many answers are paused now."""
    models = httpx.get(f"{url}/running", headers={"Authorization": "Bearer T0"}).json()
    return sum(model["engine"]["suspended"] for model in models)


def compare(options: argparse.Namespace, fairness: str, tenants: int) -> Figures:
    """Measure both settings in turns."""
    rates: dict[bool, list[float]] = {True: [], False: []}
    suspended = []
    for _ in range(options.rounds):
        for suspends in (True, False):
            with ours(options.model, fairness, tenants, suspends=suspends) as url:
                rate, count = trio.run(saturate, url, tenants, options.seconds)
                rates[suspends].append(rate)
                if suspends:
                    suspended.append(count)
    row = {
        "fairness": fairness,
        "tenants": tenants,
        "tokens_per_s": rates[True],
        "tokens_per_s_without": rates[False],
        "ratio": round(statistics.median(rates[True]) / statistics.median(rates[False]), 3),
        "paused_at_the_end": suspended,
    }
    print(json.dumps(row), flush=True)
    return row


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--tenants", type=lambda text: [int(each) for each in text.split(",")], default=[2, 20]
    )
    parser.add_argument("--fairness", type=lambda text: text.split(","), default=["roundRobin", "tokens"])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--model", type=Path, default=demonstration_model(), help="folder of the model")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    result = {
        "benchmark": "suspending",
        "machine": machine(),
        "model": options.model.name,
        "seconds": options.seconds,
        "seats": SEATS,
        "rows": [
            compare(options, fairness, tenants)
            for fairness in options.fairness
            for tenants in options.tenants
        ],
    }
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
