"""Measure a step of the persistent batch on the host, compared with the same step in numpy and Python.

    python bench/batch.py [--rounds 5] [--json bench/results/batch.json] [--vllm SITE-PACKAGES]

8, 64, 256 and 1024 slots are all in use. At every step 1, 10 or 50 % of them change their sequence. A step
removes finished sequences, adds as many new ones, condenses, allocates blocks, prepares the inputs, copies
them to the device (here: to memory) and commits the sampled tokens. A new prompt has 32 to 480 tokens, of
which all but the last 1 to 16 are in the prefix cache. All other sequences decode.

The reference (`numpy_batch.py`) has the columns of vLLM's batch and moves rows as vLLM does, in numpy. With
`--vllm`, vLLM's own `InputBatch` is measured as well. The kernel is called as the scheduler does: once for
each sequence that changes. Its step includes the update of the sampling parameters' columns, which the peers
keep in the batch. The kernel also surveys what could run and detects the ends of sequences; the peers do not.
Before the measurement, all peers process the same sequences, and their tokens are compared. Then they take
turns. A figure is the median over the rounds of a round's mean step.

Before each step, both sides read all of the step's arguments. In service these are in the processor's cache:
the scheduler has just looked up the new prompts, and the device has just written the samples. Without this,
a step would wait for memory last touched when the benchmark created its data.

Creating a request is not part of a step on either side, because it happens once, on arrival. For the kernel
it creates a `SequenceState`, which stores the prompt as int32 with room for 256 output tokens, and encodes
the sampling parameters. For the peers
it creates their own request with the prompt as a list, which they convert in the step that adds it. The time
per request is reported separately as `request_us`.
"""

import argparse
import gc
import importlib
import json
import random
import statistics
import sys
import time
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from fairlead._cext.inputbatch import InputBatch, SequenceState, Step
from fairlead.engine.sampling.parameters import TABLE, BatchUpdate, SamplingColumns
from fairlead.job import Sampling
from kernels import machine
from numpy_batch import NumpyBatch, VllmBatch

SLOTS = (8, 64, 256, 1024)
CHURNS = (0.01, 0.1, 0.5)
BLOCK_SIZE = 16
MAX_MODEL_LEN = 4096
VOCABULARY = 32_000
CHUNK = 16
STEPS_CHECKED = 12


class NewSequence(NamedTuple):
    key: int
    slot: int
    prompt: list[int]
    computed: int
    block_ids: list[int]


class BatchChange(NamedTuple):
    """One step: sequences to remove and to add, blocks to append, and the sampled token of each key."""

    leaving: list[tuple[int, int]]  # (key, slot)
    joining: list[NewSequence]
    appended: list[tuple[int, int, int]]  # (key, slot, block)
    scheduled: dict[str, int]
    sampled: dict[int, int]


class Inputs(NamedTuple):
    """The inputs that a peer prepared for one sequence."""

    input_ids: list[int]
    positions: list[int]
    slot_mapping: list[int]
    length: int


class Peer(Protocol):
    label: str  # a key of the result

    def __init__(self, slots: int) -> None: ...

    def load(self, changes: Sequence[BatchChange]) -> None:
        """Create the requests and the arguments of all steps."""

    def preload(self, index: int) -> None:
        """Read all arguments of a step, so that they are in the processor's cache."""

    def step(self, index: int) -> None: ...

    def inputs(self) -> dict[int, Inputs]:
        """Return the inputs of the last step, by key."""

    def tokens(self) -> dict[int, list[int]]: ...


def make_changes(slots: int, churn: float, steps: int, seed: int) -> list[BatchChange]:
    """Return the steps. The first one fills every slot."""
    rng = random.Random(seed)
    blocks, keys = 0, 0
    lengths: dict[int, int] = {}  # tokens of each sequence in the batch, by slot
    owners: dict[int, int] = {}
    changes = []
    credit = 0.0
    for index in range(steps + 1):
        credit += slots * churn
        count = slots if index == 0 else int(credit)
        credit -= int(credit)
        slots_left = range(slots) if index == 0 else sorted(rng.sample(range(slots), count))
        leaving = [(owners[slot], slot) for slot in slots_left] if index else []
        joining, scheduled = [], {}
        for slot in slots_left:
            prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randint(32, 480))]
            computed = len(prompt) - rng.randint(1, CHUNK)
            need = -(-len(prompt) // BLOCK_SIZE)
            joining.append(NewSequence(keys, slot, prompt, computed, list(range(blocks, blocks + need))))
            owners[slot], lengths[slot] = keys, len(prompt)
            scheduled[str(keys)] = len(prompt) - computed
            blocks += need
            keys += 1
        joined = {added.slot for added in joining}
        appended = []
        for slot, key in owners.items():
            if slot not in joined:
                scheduled[str(key)] = 1
                if (lengths[slot] - 1) % BLOCK_SIZE == 0:
                    appended.append((key, slot, blocks))
                    blocks += 1
            lengths[slot] += 1
        sampled = {key: rng.randrange(VOCABULARY) for key in owners.values()}
        changes.append(BatchChange(leaving, joining, appended, scheduled, sampled))
    return changes


# The kernel ----------------------------------------------------------------------------------------


class Kernel:
    """The kernel, and the columns of the sampling parameters."""

    label = "fairlead"

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.batch = InputBatch(
            slots=slots,
            max_batched_tokens=slots * CHUNK,
            max_model_len=MAX_MODEL_LEN,
            block_size=BLOCK_SIZE,
            vocab_size=VOCABULARY,
            eos_token_ids=[VOCABULARY - 1],
        )
        self.columns, self.version = SamplingColumns(slots), 0
        self.device = memoryview(array("i", bytes(4 * slots * CHUNK * 64)))
        self.states: dict[int, SequenceState] = {}
        self.last: Step
        self.sampled: list[Any] = []  # by step, in the order of its samples

    def load(self, changes: Sequence[BatchChange]) -> None:
        self.request_ns = 0
        self.steps = [self.converted(change) for change in changes]

    def converted(self, change: BatchChange) -> Any:
        return (
            [slot for _, slot in change.leaving],
            [
                (
                    added.slot,
                    self.new_state(added),
                    (added.block_ids,),
                    len(added.prompt) - added.computed,
                )
                for added in change.joining
            ],
            [(slot, ([block],)) for _, slot, block in change.appended],
            self.sampled_by_slot(change),
        )

    def new_state(self, added: NewSequence) -> SequenceState:
        begin_ns = time.thread_time_ns()
        state = SequenceState(
            added.key,
            added.prompt,
            max_tokens=2000,
            ignore_eos=True,
            sampling=TABLE.encode(Sampling(max_tokens=2000, temperature=0.7, top_p=0.9, seed=1)),
        )
        state.rewind(added.computed)
        self.request_ns += time.thread_time_ns() - begin_ns
        self.states[added.key] = state
        return state

    def sampled_by_slot(self, change: BatchChange) -> Any:
        """Return the sampled tokens, indexed by slot."""
        by_slot = np.zeros(self.slots, dtype=np.int32)
        slots = self.owners = {**getattr(self, "owners", {})}
        for added in change.joining:
            slots[added.slot] = added.key
        for slot, key in slots.items():
            by_slot[slot] = change.sampled[key]
        return by_slot

    def preload(self, index: int) -> None:
        leaving, joining, appended, _ = self.steps[index]
        touch(leaving, self.sampled[index], *(blocks for _, (blocks,) in appended))
        for _, state, (block_ids,), _ in joining:
            touch(state.token_ids(), block_ids)

    def step(self, index: int) -> None:
        leaving, joining, appended, by_slot = self.steps[index]
        batch = self.batch
        for slot in leaving:
            batch.remove_request(slot)
        for slot, state, block_ids, _ in joining:
            batch.add_request(slot, state, block_ids)
        batch.condense()
        batch.survey(self.slots)
        for slot, block_ids in appended:
            batch.append_block_ids(slot, block_ids)
        counts = batch.num_scheduled
        for slot, _, _, count in joining:
            counts[slot] = count
        step = batch.prepare_inputs()
        assert step is not None
        changes = batch.changes(self.version)
        self.version = changes.version
        self.columns.update_state(
            BatchUpdate(changes.removed, [(slot, batch.state(slot)) for slot in changes.added])
        )
        arena = step.arena
        self.device[: len(arena)] = arena
        if index == len(self.sampled):
            self.sampled.append(by_slot[step.sample_slots])
        batch.commit_tokens(step, self.sampled[index])
        self.last = step

    def inputs(self) -> dict[int, Inputs]:
        step, found = self.last, {}
        for row, slot in enumerate(step.slots):
            span = slice(step.query_starts[row], step.query_starts[row + 1])
            found[self.batch.state(slot).key] = Inputs(
                list(step.input_ids[span]),
                list(step.positions[span]),
                list(step.slot_mapping[0][span]),
                step.sequence_lengths[row],
            )
        return found

    def tokens(self) -> dict[int, list[int]]:
        states = [self.batch.state(slot) for slot in self.batch.order()]
        return {state.key: state.token_ids().tolist() for state in states}


def touch(*given: Iterable[int]) -> None:
    """Read all values, which loads them into the processor's cache."""
    for numbers in given:
        assert sum(numbers) >= 0


# The peers -----------------------------------------------------------------------------------------


class Reference:
    """The reference in numpy."""

    label = "numpy to the letter of seed 001"
    new_batch: type[NumpyBatch] = NumpyBatch

    def __init__(self, slots: int) -> None:
        self.batch = self.new_batch(
            slots=slots,
            max_batched_tokens=slots * CHUNK,
            max_model_len=MAX_MODEL_LEN,
            block_size=BLOCK_SIZE,
            vocab_size=VOCABULARY,
        )
        self.sampled: list[Any] = []  # by step, in the order of its samples

    def load(self, changes: Sequence[BatchChange]) -> None:
        self.request_ns = 0
        self.steps = [self.converted(change) for change in changes]

    def converted(self, change: BatchChange) -> Any:
        joining = []
        for added in change.joining:
            begin_ns = time.thread_time_ns()
            joining.append(self.batch.new_request(added.key, added.prompt, added.computed, added.block_ids))
            self.request_ns += time.thread_time_ns() - begin_ns
        by_key = np.zeros(max(change.sampled) + 1, dtype=np.int32)
        by_key[list(change.sampled)] = list(change.sampled.values())
        return (
            [str(key) for key, _ in change.leaving],
            joining,
            [(str(key), ([block],)) for key, _, block in change.appended],
            change.scheduled,
            by_key,
        )

    def preload(self, index: int) -> None:
        _, joining, appended, scheduled, _ = self.steps[index]
        touch(scheduled.values(), self.sampled[index], *(blocks for _, (blocks,) in appended))
        for request in joining:
            touch(request.prompt_token_ids, *request.block_ids)

    def step(self, index: int) -> None:
        leaving, joining, appended, scheduled, by_key = self.steps[index]
        batch = self.batch
        for req_id in leaving:
            batch.remove_request(req_id)
        for request in joining:
            batch.add_request(request)
        batch.condense()
        for req_id, block_ids in appended:
            batch.append_blocks(req_id, block_ids)
        batch.prepare(scheduled)
        if index == len(self.sampled):
            self.sampled.append(by_key[[int(batch.req_ids[row]) for row in batch.samples]])
        batch.commit(self.sampled[index])

    def inputs(self) -> dict[int, Inputs]:
        batch, found = self.batch, {}
        for row, req_id in enumerate(batch.req_ids):
            span = slice(batch.query_starts[row], batch.query_starts[row + 1])
            found[int(req_id)] = Inputs(
                batch.input_ids[span].tolist(),
                batch.positions[span].tolist(),
                batch.slot_mapping[span].tolist(),
                int(batch.lengths[row]),
            )
        return found

    def tokens(self) -> dict[int, list[int]]:
        batch = self.batch
        return {
            int(req_id): batch.token_ids[row, : batch.num_tokens[row]].tolist()
            for row, req_id in enumerate(batch.req_ids)
        }


class Vllm(Reference):
    """vLLM's batch."""

    label = "vLLM's InputBatch (V1)"
    new_batch = VllmBatch


# Measuring -----------------------------------------------------------------------------------------


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
