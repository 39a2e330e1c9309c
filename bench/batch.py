"""Measure a step of the persistent batch on the host, compared with the same step in numpy and Python.

    python bench/batch.py [--rounds 5] [--json bench/results/batch.json] [--vllm SITE-PACKAGES]

8, 64, 256 and 1024 slots are all in use. At every step 1, 10 or 50 % of them change their sequence. A step
removes finished sequences, adds as many new ones, condenses, allocates blocks, prepares the inputs, copies
them to the device (here: to memory) and commits the sampled tokens. A new prompt has 32 to 480 tokens, of
which all but the last 1 to 16 are in the prefix cache. All other sequences decode.

The peers are in `batch_peers.py`. The reference (`numpy_batch.py`) has the columns of vLLM's batch and moves
rows as vLLM does, in numpy. With `--vllm`, vLLM's own `InputBatch` is measured as well. The kernel is called
as the scheduler does: once for each sequence that changes. Its step includes the update of the sampling
parameters' columns, which the peers keep in the batch. The kernel also surveys what could run and detects the
ends of sequences; the peers do not. Before the measurement, all peers process the same sequences, and their
tokens are compared. Then they take turns. A figure is the median over the rounds of a round's mean step.

Before each step, both sides read all of the step's arguments. In service these are in the processor's cache:
the scheduler has just looked up the new prompts, and the device has just written the samples. Without this,
a step would wait for memory last touched when the benchmark created its data.

Creating a request is not part of a step on either side, because it happens once, on arrival. For the kernel
it creates a `SequenceState`, which stores the prompt as int32 with room for 256 output tokens, and encodes
the sampling parameters. For the peers it creates their own request with the prompt as a list, which they
convert in the step that adds it. The time per request is reported separately as `request_us`.
"""

import argparse
import gc
import importlib
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from batch_peers import BatchChange, Kernel, Reference, Vllm, make_changes
from machine import machine
from numpy_batch import VllmBatch

SLOTS = (8, 64, 256, 1024)
CHURNS = (0.01, 0.1, 0.5)
STEPS_CHECKED = 12


def check(peers: Sequence[type[Any]], slots: int, churn: float) -> None:
    """Assert that all peers prepare the same inputs and keep the same tokens."""
    changes = make_changes(slots, churn, STEPS_CHECKED, seed=1)
    running = [new_peer(slots) for new_peer in peers]
    for peer in running:
        peer.load(changes)
    for index in range(len(changes)):
        for peer in running:
            peer.step(index)
        first, *others = running
        assert len(first.inputs()) == slots
        for other in others:
            assert other.inputs() == first.inputs(), other.label
            assert other.tokens() == first.tokens(), other.label


def measure(peers: Sequence[type[Any]], slots: int, churn: float, rounds: int) -> dict[str, dict[str, Any]]:
    steps = max(8, min(200, round(20_000 / (slots * (0.05 + churn)))))
    samples: dict[str, list[float]] = {}
    requests: dict[str, list[float]] = {}
    for round_number in range(rounds):
        changes = make_changes(slots, churn, steps, seed=round_number)
        request_count = sum(len(change.joining) for change in changes)
        shift = round_number % len(peers)
        for new_peer in [*peers[shift:], *peers[:shift]]:
            peer = peer_with_samples(new_peer, slots, changes)
            peer.step(0)  # fills the slots
            gc.collect()
            gc.disable()
            elapsed_ns = timed(peer, steps)
            gc.enable()
            name = new_peer.label
            samples.setdefault(name, []).append(elapsed_ns / steps / 1000)
            requests.setdefault(name, []).append(peer.request_ns / request_count / 1000)
    return {
        name: {
            "step_us": round(statistics.median(values), 2),
            "worst_us": round(max(values), 2),
            "request_us": round(statistics.median(requests[name]), 2),
        }
        for name, values in samples.items()
    }


def peer_with_samples(new_peer: type[Any], slots: int, changes: Sequence[BatchChange]) -> Any:
    """Return a peer with the samples of all steps in the order of its rows, as a device reports them."""
    first_run, peer = new_peer(slots), new_peer(slots)
    first_run.load(changes)
    for index in range(len(changes)):
        first_run.step(index)
    peer.load(changes)
    peer.sampled = first_run.sampled
    return peer


def timed(peer: Any, steps: int) -> float:
    # The thread's CPU time excludes other processes on the core. The cost of reading the clock is subtracted.
    elapsed_ns = 0
    for index in range(1, steps + 1):
        peer.preload(index)
        begin_ns = time.thread_time_ns()
        peer.step(index)
        elapsed_ns += time.thread_time_ns() - begin_ns
    clock_ns = statistics.median(-time.thread_time_ns() + time.thread_time_ns() for _ in range(101))
    return elapsed_ns - steps * clock_ns


def import_vllm(path: Path) -> list[type[Any]]:
    """Return vLLM's peer. If it cannot be imported or gives other results, print why and return nothing."""
    sys.path.append(str(path))
    try:
        VllmBatch.modules = importlib.import_module("vllm.v1.worker.gpu_input_batch")
        VllmBatch.version = importlib.import_module("vllm").__version__
        check([Reference, Vllm], 8, 0.1)
    except Exception as error:  # noqa: BLE001  (the other peers are still measured)
        print(f"vLLM is not measured: {type(error).__name__}: {error}")
        return []
    return [Vllm]


GOAL = 8.0  # times as fast as the reference, at every churn from 64 slots up


def goals(results: dict[tuple[int, float], dict[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Compare the results with the figures in ARCHITECTURE.md."""
    ratios = [
        by_peer[Reference.label]["step_us"] / by_peer[Kernel.label]["step_us"]
        for (slots, _), by_peer in results.items()
        if slots >= 64
    ]
    if not ratios:
        return []
    claim = f"{GOAL:g} times as fast as the reference at every churn from 64 slots up"
    return [{"claim": claim, "goal": GOAL, "measured": round(min(ratios), 2), "held": min(ratios) >= GOAL}]


def report(results: dict[tuple[int, float], dict[str, dict[str, Any]]], rounds: int) -> dict[str, Any]:
    return {
        "benchmark": "batch",
        "machine": machine(),
        "rounds": rounds,
        "vllm": VllmBatch.version or None,
        "results": [
            {
                "slots": slots,
                "churn": churn,
                "peers": by_peer,
                "ratio_to_letter": {
                    name: round(by_peer[Reference.label]["step_us"] / figures["step_us"], 2)
                    for name, figures in by_peer.items()
                },
            }
            for (slots, churn), by_peer in results.items()
        ],
        "goals": goals(results),
    }


def print_tables(result: dict[str, Any]) -> None:
    for row in result["results"]:
        print(f"{row['slots']:5} slots, {row['churn']:4.0%}")
        for name, figures in row["peers"].items():
            ratio = row["ratio_to_letter"][name]
            step_us, request_us = figures["step_us"], figures["request_us"]
            print(f"    {name:34} {step_us:10,.1f} µs {ratio:7.1f} ×   a request {request_us:6.2f} µs")
    for row in result["goals"]:
        verdict = "held" if row["held"] else "FAILED"
        print(f"{verdict:7} {row['measured']:8,.2f} (goal {row['goal']}) {row['claim']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="rounds of which the median counts")
    parser.add_argument("--slots", type=int, nargs="+", default=SLOTS, help="sizes of the batch")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result to this file")
    parser.add_argument("--vllm", type=Path, metavar="PATH", help="folder to import the package vllm from")
    options = parser.parse_args()
    peers: list[type[Any]] = [Kernel, Reference]
    if options.vllm:
        peers += import_vllm(options.vllm)
    results = {}
    for slots in options.slots:
        for churn in CHURNS:
            check(peers, slots, churn)
            results[slots, churn] = measure(peers, slots, churn, options.rounds)
    result = report(results, options.rounds)
    print_tables(result)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
