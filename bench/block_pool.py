"""Measure the operations of the block pool and the slot map, compared with implementations in Python.

    python bench/block_pool.py [--rounds 7] [--json bench/results/block_pool.json]

It reports the nanoseconds per block for: allocating 32 blocks at a time; freeing them; finding a prefix of
128 blocks with known hashes; hashing and finding such a prefix; and the life of a request under memory
pressure (allocate four blocks, hash and index them, keep them, which evicts four others). Each is measured
with 100, 1,000, 10,000 and 100,000 kept requests of four blocks. The pool has room for the largest number,
except for lives, where it is full. For the slot map: nanoseconds to bind and free a slot.

The peers are in `block_pool_peers.py` and `slot_map_peers.py`. Every round measures all of them in turn. The
result has the medians of the rounds and their ratios, compared with `GOALS`. Lookups of random requests and
lives separate the cost of the data structure from the cost of memory: 100,000 kept requests occupy tens of
megabytes, so every peer has a cache miss for each of their blocks.
"""

import argparse
import gc
import json
import random
import statistics
import time
from array import array
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from block_pool_peers import BLOCK_SIZE, PEERS, PROMPT_BLOCKS, Kernel, LinkedPool, Peer
from machine import machine
from slot_map_peers import SLOT_PEERS

KEPT = (100, 1_000, 10_000, 100_000)
BLOCKS_A_REQUEST = 4
SLACK = 4_096  # blocks that stay free in every pool
AT_ONCE = 32
PROMPTS = 16
SLOTS = 1_024


class Goal(NamedTuple):
    """The goal that `slower` takes at least `at_least` times as long as `faster`.

    Both are (peer, operation, requests kept).
    """

    claim: str
    slower: tuple[type[Any], str, int]
    faster: tuple[type[Any], str, int]
    at_least: float


GOALS = (
    *(
        Goal(
            f"take 32 blocks: 15 times as fast as linked objects ({kept:,} kept)",
            slower=(LinkedPool, "take", kept),
            faster=(Kernel, "take", kept),
            at_least=15.0,
        )
        for kept in KEPT
    ),
    *(
        Goal(
            f"find a prefix: 20 times as fast as linked objects ({kept:,} kept)",
            slower=(LinkedPool, "find", kept),
            faster=(Kernel, "find", kept),
            at_least=20.0,
        )
        for kept in KEPT
    ),
    *(
        Goal(
            f"{what}: 1000 times the requests kept take at most {1 / at_least:g} times the time",
            slower=(Kernel, what, KEPT[0]),
            faster=(Kernel, what, KEPT[-1]),
            at_least=at_least,
        )
        for what, at_least in (("take", 0.8), ("give back", 0.8), ("find", 0.8), ("life", 0.4))
    ),
)

Times = dict[tuple[type[Any], str, int], list[float]]


def measure(rounds: int) -> Times:
    """Return nanoseconds per block or slot, one figure a round, by (peer, operation, requests kept)."""
    times: Times = defaultdict(list)
    gc.disable()  # collecting the garbage of earlier pools must not count
    for round_number in range(rounds):
        for kept in KEPT:
            for new_peer in PEERS:
                measured = measure_pool(new_peer, kept, seed=round_number)
                for what, nanoseconds in measured.items():
                    times[new_peer, what, kept].append(nanoseconds)
                gc.collect()
        for new_slots in SLOT_PEERS:
            for what, nanoseconds in measure_slots(new_slots).items():
                times[new_slots, what, 0].append(nanoseconds)
    gc.enable()
    return times


def measure_pool(new_peer: type[Peer], kept: int, *, seed: int) -> dict[str, float]:
    prompt_blocks = PROMPTS * PROMPT_BLOCKS
    peer = new_peer(KEPT[-1] * BLOCKS_A_REQUEST + prompt_blocks + SLACK)
    for key in range(kept):
        peer.live(key, request_tokens(key), BLOCKS_A_REQUEST)
    prompts = [tokens_of(-1 - number, PROMPT_BLOCKS) for number in range(PROMPTS)]
    for number, tokens in enumerate(prompts):
        peer.live(-1 - number, tokens, PROMPT_BLOCKS)
    result = measure_taking(peer)
    known = [peer.hashes(tokens) for tokens in prompts]
    rng = random.Random(seed)
    chosen = [peer.hashes(request_tokens(rng.randrange(kept))) for _ in range(1_000)]

    def find_known() -> None:
        for _ in range(10):
            for hashes in known:
                peer.find(hashes)

    def hash_and_find() -> None:
        for tokens in prompts:
            peer.find(peer.hashes(tokens))

    def find_chosen() -> None:
        for hashes in chosen:
            peer.find(hashes)

    # The first call fills the processor's caches. `find_chosen` measures lookups with cold caches.
    assert all(peer.found_count(peer.find(hashes)) == PROMPT_BLOCKS for hashes in known)
    find_known()
    result["find"] = elapsed_ns(find_known) / (10 * prompt_blocks)
    result["hash and find"] = elapsed_ns(hash_and_find) / prompt_blocks
    result["find short ones at random"] = elapsed_ns(find_chosen) / (len(chosen) * BLOCKS_A_REQUEST)
    assert all(peer.found_count(peer.find(hashes)) == BLOCKS_A_REQUEST for hashes in chosen)
    result["life"] = measure_life(new_peer, kept)
    return result


def measure_taking(peer: Peer) -> dict[str, float]:
    count = SLACK // AT_ONCE // 2
    taken: list[Any] = []

    def take() -> None:
        take_some = peer.take
        taken.extend([take_some(AT_ONCE) for _ in range(count)])

    def release() -> None:
        release_some = peer.release
        for blocks in taken:
            release_some(blocks)

    totals = [0, 0]
    for is_warm in (False, True, True, True):
        taken.clear()
        take_ns, release_ns = elapsed_ns(take), elapsed_ns(release)
        if is_warm:
            totals = [totals[0] + take_ns, totals[1] + release_ns]
    blocks = 3 * count * AT_ONCE
    return {"take": totals[0] / blocks, "give back": totals[1] / blocks}


def measure_life(new_peer: type[Peer], kept: int) -> float:
    """Measure lives in a pool full of kept requests, where each new request evicts the oldest."""
    peer = new_peer(kept * BLOCKS_A_REQUEST)
    for key in range(kept):
        peer.live(key, request_tokens(key), BLOCKS_A_REQUEST)
    new_requests = [(kept + number, request_tokens(kept + number)) for number in range(1_000)]

    def live() -> None:
        for key, tokens in new_requests:
            peer.live(key, tokens, BLOCKS_A_REQUEST)

    return elapsed_ns(live) / (len(new_requests) * BLOCKS_A_REQUEST)


def measure_slots(new_slots: type[Any]) -> dict[str, float]:
    slots = new_slots(SLOTS)
    keys = list(range(64))

    def one_by_one() -> None:
        alloc, free = slots.alloc, slots.free
        for key in range(10_000):
            free(alloc(key))

    def many() -> None:
        for _ in range(100):
            slots.free_many(slots.alloc_many(keys))

    return {"slot": elapsed_ns(one_by_one) / 10_000, "slot of 64": elapsed_ns(many) / 6_400}


def request_tokens(key: int) -> "array[int]":
    return tokens_of(key, BLOCKS_A_REQUEST)


def tokens_of(key: int, blocks: int) -> "array[int]":
    return array("i", range(key, key + blocks * BLOCK_SIZE))


def elapsed_ns(work: Callable[[], None]) -> int:
    # The thread's CPU time excludes other processes on the core.
    begin_ns = time.thread_time_ns()
    work()
    return time.thread_time_ns() - begin_ns


# The report ----------------------------------------------------------------------------------------


def report(times: Times, rounds: int) -> dict[str, Any]:
    medians = {key: statistics.median(samples) for key, samples in times.items()}
    return {
        "benchmark": "block_pool",
        "machine": machine(),
        "rounds": rounds,
        "block_size": BLOCK_SIZE,
        "results": [
            {
                "peer": peer.label,
                "what": what,
                "kept": kept,
                "median_ns": round(medians[peer, what, kept], 1),
                "worst_ns": round(max(samples), 1),
            }
            for (peer, what, kept), samples in times.items()
        ],
        "goals": [
            {
                "claim": goal.claim,
                "goal_ratio": goal.at_least,
                "measured_ratio": round(ratio, 2),
                "held": ratio >= goal.at_least,
            }
            for goal in GOALS
            for ratio in [medians[goal.slower] / medians[goal.faster]]
        ],
    }


def print_tables(result: dict[str, Any]) -> None:
    rows = {(row["what"], row["peer"], row["kept"]): row["median_ns"] for row in result["results"]}
    print(f"{'ns a block':26} {'':40}" + "".join(f"{kept:>9,}" for kept in KEPT))
    for what, peer in dict.fromkeys((what, peer) for what, peer, kept in rows if kept):
        print(f"{what:26} {peer:40}" + "".join(f"{rows[what, peer, kept]:9,.1f}" for kept in KEPT))
    print()
    for (what, peer, kept), median_ns in rows.items():
        if not kept:
            print(f"{what:26} {peer:40}{median_ns:9,.1f}")
    print()
    for row in result["goals"]:
        verdict = "held" if row["held"] else "FAILED"
        print(f"{verdict:7} {row['measured_ratio']:9,.2f} (goal {row['goal_ratio']:,}) {row['claim']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="rounds of which the median counts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result to this file")
    options = parser.parse_args()
    result = report(measure(options.rounds), options.rounds)
    print_tables(result)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
