"""What does a step of the persistent batch cost on the host, beside the same in numpy and Python?

    python bench/batch.py [--rounds 5] [--json bench/results/batch.json] [--vllm SITE-PACKAGES]

At 8, 64, 256 and 1024 slots, all in use, 1, 10 and 50 % of which change their sequence at every step. A step
is: remove those that have ended, add as many, condense, give blocks to those that need one, prepare the
inputs, copy them to the device (here: to memory), commit the sampled tokens. A newcomer's prompt of
32 ... 480 tokens is in the prefix cache but for its last 1 ... 16; all others decode.

The peer follows seed 001 to the letter, in numpy where numpy can (`letter_batch.py`); with `--vllm`, vLLM's
own `InputBatch` does the same in the same seat. The kernel is driven in two ways: with lists, one call a
sequence, as a scheduler does it; and with arrays, one call for all. It also surveys what could run and looks
for the ends of sequences, which the peers leave to others. All do the same work on the same sequences, which
is proven, token for token, before anything is timed; then they take turns. A figure is the median over the
rounds of a round's mean step.

Before the clock starts on a step, all that the step is given is looked at, on both sides: in service a
scheduler has just looked a newcomer's prompt up in the prefix cache and been given its blocks, and the device
has just written what it sampled. (Else a step would wait for memory that nobody has touched since the bench
made the numbers of all steps; the more slots, the more of it.)

Outside the clock, on both sides: making the request. For the kernel that is a `SequenceState`, which takes
the prompt's tokens as int32 and has room for its first 256 tokens of output; for the peers their own request
with the prompt as a list, which they convert within the clock, when it is added. A request is made once, when
it arrives, not in a step; what it costs is reported beside the step: `request_us` each.
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
from kernels import machine
from letter_batch import LetterBatch, VllmBatch

SLOTS = (8, 64, 256, 1024)
CHURNS = (0.01, 0.1, 0.5)
BLOCK_SIZE = 16
MAX_MODEL_LEN = 4096
VOCABULARY = 32_000
CHUNK = 16
STEPS_CHECKED = 12


class Newcomer(NamedTuple):
    key: int
    slot: int
    prompt: list[int]
    computed: int
    block_ids: list[int]


class Turn(NamedTuple):
    """One step: who leaves, who comes, whose blocks are full, and what is sampled, by key."""

    leaving: list[tuple[int, int]]  # (key, slot)
    coming: list[Newcomer]
    appended: list[tuple[int, int, int]]  # (key, slot, block)
    scheduled: dict[str, int]
    sampled: dict[int, int]


class Seen(NamedTuple):
    """What a peer prepared for one sequence."""

    input_ids: list[int]
    positions: list[int]
    slot_mapping: list[int]
    length: int


class Peer(Protocol):
    def __init__(self, slots: int) -> None: ...

    def make(self, turns: Sequence[Turn]) -> None:
        """What is ready before a step: requests, and the numbers as this peer is given them."""

    def look(self, index: int) -> None:
        """Read all that a step is given."""

    def step(self, index: int) -> None: ...

    def seen(self) -> dict[int, Seen]:
        """Of the step just done, by key."""

    def tokens(self) -> dict[int, list[int]]: ...


def turns_for(slots: int, churn: float, steps: int, seed: int) -> list[Turn]:
    """The first turn fills every slot."""
    chance = random.Random(seed)
    blocks, keys = 0, 0
    lengths: dict[int, int] = {}  # of those in the batch, by slot: tokens
    owners: dict[int, int] = {}
    turns = []
    credit = 0.0
    for index in range(steps + 1):
        credit += slots * churn
        count = slots if index == 0 else int(credit)
        credit -= int(credit)
        slots_left = range(slots) if index == 0 else sorted(chance.sample(range(slots), count))
        leaving = [(owners[slot], slot) for slot in slots_left] if index else []
        coming, scheduled = [], {}
        for slot in slots_left:
            prompt = [chance.randrange(VOCABULARY) for _ in range(chance.randint(32, 480))]
            computed = len(prompt) - chance.randint(1, CHUNK)
            need = -(-len(prompt) // BLOCK_SIZE)
            coming.append(Newcomer(keys, slot, prompt, computed, list(range(blocks, blocks + need))))
            owners[slot], lengths[slot] = keys, len(prompt)
            scheduled[str(keys)] = len(prompt) - computed
            blocks += need
            keys += 1
        come = {newcomer.slot for newcomer in coming}
        appended = []
        for slot, key in owners.items():
            if slot not in come:
                scheduled[str(key)] = 1
                if (lengths[slot] - 1) % BLOCK_SIZE == 0:
                    appended.append((key, slot, blocks))
                    blocks += 1
            lengths[slot] += 1
        sampled = {key: chance.randrange(VOCABULARY) for key in owners.values()}
        turns.append(Turn(leaving, coming, appended, scheduled, sampled))
    return turns


# The kernel ----------------------------------------------------------------------------------------


class KernelByLists:
    """fairlead, lists"""

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
        self.device = memoryview(array("i", bytes(4 * slots * CHUNK * 64)))
        self.states: dict[int, SequenceState] = {}
        self.last: Step
        self.sampled: list[Any] = []  # by step, in the order of its samples

    def make(self, turns: Sequence[Turn]) -> None:
        self.request_ns = 0
        self.steps = [self.made(turn) for turn in turns]

    def made(self, turn: Turn) -> Any:
        return (
            [slot for _, slot in turn.leaving],
            [
                (
                    newcomer.slot,
                    self.new_state(newcomer),
                    (newcomer.block_ids,),
                    len(newcomer.prompt) - newcomer.computed,
                )
                for newcomer in turn.coming
            ],
            [(slot, ([block],)) for _, slot, block in turn.appended],
            self.sampled_by_slot(turn),
        )

    def new_state(self, newcomer: Newcomer) -> SequenceState:
        given = self.prompt_of(newcomer)
        begin_ns = time.thread_time_ns()
        state = SequenceState(
            newcomer.key,
            given,
            max_tokens=2000,
            temperature=0.7,
            top_p=0.9,
            top_k=0,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            repetition_penalty=1.0,
            ignore_eos=True,
        )
        state.rewind(newcomer.computed)
        self.request_ns += time.thread_time_ns() - begin_ns
        self.states[newcomer.key] = state
        return state

    def prompt_of(self, newcomer: Newcomer) -> Any:
        return newcomer.prompt

    def sampled_by_slot(self, turn: Turn) -> Any:
        """What the device samples, if not yet in the order of the step's samples."""
        by_slot = np.zeros(self.slots, dtype=np.int32)
        slots = self.owners = {**getattr(self, "owners", {})}
        for newcomer in turn.coming:
            slots[newcomer.slot] = newcomer.key
        for slot, key in slots.items():
            by_slot[slot] = turn.sampled[key]
        return by_slot

    def look(self, index: int) -> None:
        leaving, coming, appended, _ = self.steps[index]
        look_at(leaving, self.sampled[index], *(blocks for _, (blocks,) in appended))
        for _, state, (block_ids,), _ in coming:
            look_at(state.token_ids(), block_ids)

    def step(self, index: int) -> None:
        leaving, coming, appended, by_slot = self.steps[index]
        batch = self.batch
        for slot in leaving:
            batch.remove_request(slot)
        for slot, state, block_ids, _ in coming:
            batch.add_request(slot, state, block_ids)
        batch.condense()
        batch.survey(self.slots)
        for slot, block_ids in appended:
            batch.append_block_ids(slot, block_ids)
        counts = batch.num_scheduled
        for slot, _, _, count in coming:
            counts[slot] = count
        self.finish(index, by_slot)

    def finish(self, index: int, by_slot: Any) -> None:
        step = self.batch.prepare_inputs()
        assert step is not None
        arena = step.arena
        self.device[: len(arena)] = arena
        if index == len(self.sampled):
            self.sampled.append(by_slot[step.sample_slots])
        self.batch.commit_tokens(step, self.sampled[index])
        self.last = step

    def seen(self) -> dict[int, Seen]:
        step, found = self.last, {}
        for row, slot in enumerate(step.slots):
            span = slice(step.query_starts[row], step.query_starts[row + 1])
            found[self.batch.state(slot).key] = Seen(
                list(step.input_ids[span]),
                list(step.positions[span]),
                list(step.slot_mapping[0][span]),
                step.sequence_lengths[row],
            )
        return found

    def tokens(self) -> dict[int, list[int]]:
        states = [self.batch.state(slot) for slot in self.batch.order()]
        return {state.key: state.token_ids().tolist() for state in states}


class KernelByArrays(KernelByLists):
    """fairlead, arrays"""

    def made(self, turn: Turn) -> Any:
        return (
            int32s([slot for _, slot in turn.leaving]),
            int32s([newcomer.slot for newcomer in turn.coming]),
            [self.new_state(newcomer) for newcomer in turn.coming],
            [(int32s(newcomer.block_ids),) for newcomer in turn.coming],
            int32s([len(newcomer.prompt) - newcomer.computed for newcomer in turn.coming]),
            int32s([slot for _, slot, _ in turn.appended]),
            (int32s([block for *_, block in turn.appended]),),
            self.sampled_by_slot(turn),
        )

    def prompt_of(self, newcomer: Newcomer) -> Any:
        return int32s(newcomer.prompt)

    def look(self, index: int) -> None:
        leaving, new_slots, states, block_ids, counts, short, (blocks,), _ = self.steps[index]
        look_at(leaving, new_slots, counts, short, blocks, self.sampled[index])
        for state, (ids,) in zip(states, block_ids, strict=True):
            look_at(state.token_ids(), ids)

    def step(self, index: int) -> None:
        leaving, new_slots, states, block_ids, counts, short, blocks, by_slot = self.steps[index]
        batch = self.batch
        batch.remove_requests(leaving)
        batch.add_requests(new_slots, states, block_ids)
        batch.condense()
        batch.survey(self.slots)
        batch.append_one_each(short, blocks)
        batch.schedule(new_slots, counts)
        self.finish(index, by_slot)


def look_at(*given: Iterable[int]) -> None:
    """Have it in the cache, as whoever has just made it has."""
    for numbers in given:
        assert sum(numbers) >= 0


def int32s(values: list[int]) -> "array[int]":
    return array("i", values)


# The others ----------------------------------------------------------------------------------------


class Letter:
    """numpy to the letter of seed 001"""

    new_batch: type[LetterBatch] = LetterBatch

    def __init__(self, slots: int) -> None:
        self.batch = self.new_batch(
            slots=slots,
            max_batched_tokens=slots * CHUNK,
            max_model_len=MAX_MODEL_LEN,
            block_size=BLOCK_SIZE,
            vocab_size=VOCABULARY,
        )
        self.sampled: list[Any] = []  # by step, in the order of its samples

    def make(self, turns: Sequence[Turn]) -> None:
        self.request_ns = 0
        self.steps = [self.made(turn) for turn in turns]

    def made(self, turn: Turn) -> Any:
        coming = []
        for newcomer in turn.coming:
            begin_ns = time.thread_time_ns()
            coming.append(
                self.batch.new_request(newcomer.key, newcomer.prompt, newcomer.computed, newcomer.block_ids)
            )
            self.request_ns += time.thread_time_ns() - begin_ns
        by_key = np.zeros(max(turn.sampled) + 1, dtype=np.int32)
        by_key[list(turn.sampled)] = list(turn.sampled.values())
        return (
            [str(key) for key, _ in turn.leaving],
            coming,
            [(str(key), ([block],)) for key, _, block in turn.appended],
            turn.scheduled,
            by_key,
        )

    def look(self, index: int) -> None:
        _, coming, appended, scheduled, _ = self.steps[index]
        look_at(scheduled.values(), self.sampled[index], *(blocks for _, (blocks,) in appended))
        for request in coming:
            look_at(request.prompt_token_ids, *request.block_ids)

    def step(self, index: int) -> None:
        leaving, coming, appended, scheduled, by_key = self.steps[index]
        batch = self.batch
        for req_id in leaving:
            batch.remove_request(req_id)
        for request in coming:
            batch.add_request(request)
        batch.condense()
        for req_id, block_ids in appended:
            batch.append_blocks(req_id, block_ids)
        batch.prepare(scheduled)
        if index == len(self.sampled):
            self.sampled.append(by_key[[int(batch.req_ids[row]) for row in batch.samples]])
        batch.commit(self.sampled[index])

    def seen(self) -> dict[int, Seen]:
        batch, found = self.batch, {}
        for row, req_id in enumerate(batch.req_ids):
            span = slice(batch.query_starts[row], batch.query_starts[row + 1])
            found[int(req_id)] = Seen(
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


class Vllm(Letter):
    """vLLM's InputBatch (V1)"""

    new_batch = VllmBatch


# Measuring -----------------------------------------------------------------------------------------


def check(peers: Sequence[type[Any]], slots: int, churn: float) -> None:
    """That all peers prepare and keep the same."""
    turns = turns_for(slots, churn, STEPS_CHECKED, seed=1)
    running = [new_peer(slots) for new_peer in peers]
    for peer in running:
        peer.make(turns)
    for index in range(len(turns)):
        for peer in running:
            peer.step(index)
        first, *others = running
        assert len(first.seen()) == slots
        for other in others:
            assert first.seen() == other.seen(), type(other).__doc__
            assert first.tokens() == other.tokens(), type(other).__doc__


def measure(peers: Sequence[type[Any]], slots: int, churn: float, rounds: int) -> dict[str, dict[str, Any]]:
    steps = max(8, min(200, round(20_000 / (slots * (0.05 + churn)))))
    samples: dict[str, list[float]] = {}
    requests: dict[str, list[float]] = {}
    for round_number in range(rounds):
        turns = turns_for(slots, churn, steps, seed=round_number)
        made = sum(len(turn.coming) for turn in turns)
        shift = round_number % len(peers)
        for new_peer in [*peers[shift:], *peers[:shift]]:
            peer = rehearsed(new_peer, slots, turns)
            peer.step(0)  # fills the slots
            gc.collect()
            gc.disable()
            elapsed_ns = timed(peer, steps)
            gc.enable()
            name = new_peer.__doc__ or ""
            samples.setdefault(name, []).append(elapsed_ns / steps / 1000)
            requests.setdefault(name, []).append(peer.request_ns / made / 1000)
    return {
        name: {
            "step_us": round(statistics.median(values), 2),
            "worst_us": round(max(values), 2),
            "request_us": round(statistics.median(requests[name]), 2),
        }
        for name, values in samples.items()
    }


def rehearsed(new_peer: type[Any], slots: int, turns: Sequence[Turn]) -> Any:
    """One that knows what will be sampled, as the device tells it: in the order of its own rows."""
    rehearsal, peer = new_peer(slots), new_peer(slots)
    rehearsal.make(turns)
    for index in range(len(turns)):
        rehearsal.step(index)
    peer.make(turns)
    peer.sampled = rehearsal.sampled
    return peer


def timed(peer: Any, steps: int) -> float:
    # Of this thread's own time, so that a neighbour on the core is not counted; and without the clock's own.
    elapsed_ns = 0
    for index in range(1, steps + 1):
        peer.look(index)
        begin_ns = time.thread_time_ns()
        peer.step(index)
        elapsed_ns += time.thread_time_ns() - begin_ns
    clock_ns = statistics.median(-time.thread_time_ns() + time.thread_time_ns() for _ in range(101))
    return elapsed_ns - steps * clock_ns


def import_vllm(path: Path) -> list[type[Any]]:
    """vLLM's batch, if it is there and runs; the reason why not is printed."""
    sys.path.append(str(path))
    try:
        VllmBatch.modules = importlib.import_module("vllm.v1.worker.gpu_input_batch")
        VllmBatch.version = importlib.import_module("vllm").__version__
        check([Letter, Vllm], 8, 0.1)
    except Exception as error:  # noqa: BLE001  (whatever is wrong with it, the others are still measured)
        print(f"vLLM is left out: {type(error).__name__}: {error}")
        return []
    return [Vllm]


GOALS = (
    # (claim, slower, faster, least slots, ratio)
    ("lists: 8 times as fast at every churn from 64 slots up", Letter, KernelByLists, 64, 8.0),
    ("arrays: 25 times as fast at every churn from 256 slots up", Letter, KernelByArrays, 256, 25.0),
)


def goals(results: dict[tuple[int, float], dict[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    rows = []
    for claim, slower, faster, least, goal in GOALS:
        ratios = {
            (slots, churn): by_peer[slower.__doc__ or ""]["step_us"]
            / by_peer[faster.__doc__ or ""]["step_us"]
            for (slots, churn), by_peer in results.items()
            if slots >= least
        }
        if ratios:
            worst = min(ratios.values())
            rows.append({"claim": claim, "goal": goal, "measured": round(worst, 2), "held": worst >= goal})
    for peer in (KernelByLists, KernelByArrays):
        name = peer.__doc__ or ""
        if (64, 0.01) in results and (1024, 0.01) in results:
            growth = results[1024, 0.01][name]["step_us"] / results[64, 0.01][name]["step_us"]
            claim = f"{name}: 1024 slots cost less than 5 times as much as 64 at 1 % churn"
            rows.append({"claim": claim, "goal": 5.0, "measured": round(growth, 2), "held": growth < 5.0})
    return rows


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
                    name: round(by_peer[Letter.__doc__ or ""]["step_us"] / figures["step_us"], 2)
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
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--slots", type=int, nargs="+", default=SLOTS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to keep the result")
    parser.add_argument(
        "--vllm", type=Path, metavar="PATH", help="where the package vllm can be imported from"
    )
    options = parser.parse_args()
    peers: list[type[Any]] = [KernelByLists, KernelByArrays, Letter]
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
