"""Measure the operations of the block pool and the slot map, compared with implementations in Python.

    python bench/block_pool.py [--rounds 7] [--json bench/results/block_pool.json]

It reports the nanoseconds per block for: allocating 32 blocks at a time; freeing them; finding a prefix of
128 blocks with known hashes; hashing and finding such a prefix; and the life of a request under memory
pressure (allocate four blocks, hash and index them, keep them, which evicts four others). Each is measured
with 100, 1,000, 10,000 and 100,000 kept requests of four blocks. The pool has room for the largest number,
except for lives, where it is full. For the slot map: nanoseconds to bind and free a slot.

The linked pool is built like vLLM's. A block is an object. The free blocks, including kept ones, form a
doubly linked list, which is evicted from the front. A dict maps hash and group to a block, or to several
blocks with the same content. A lookup is one call per block, which checks every group. Hashes are keyed and
have 128 bits, like the kernel's. The lean pool has no objects, links, groups or calls: a list of free ids, a
dict and a deque of requests. It uses Python's fastest hash, which has 64 bits and no key.

Every round measures all peers in turn. It reports the medians of the rounds and their ratios, compared with
`GOALS`. Lookups of random requests and lives separate the cost of the data structure from the cost of memory:
100,000 kept requests occupy tens of megabytes, so every peer has a cache miss for each of their blocks.
"""

import argparse
import gc
import hashlib
import itertools
import json
import random
import statistics
import time
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from fairlead._cext.blockpool import BlockHashes, BlockPool
from fairlead._cext.slotmap import SlotMap
from kernels import machine

BLOCK_SIZE = 16
KEPT = (100, 1_000, 10_000, 100_000)
BLOCKS_A_REQUEST = 4
SLACK = 4_096  # blocks that stay free in every pool
AT_ONCE = 32
PROMPT_BLOCKS = 128
PROMPTS = 16
SLOTS = 1_024
HASH_KEY = bytes(range(16))


class Peer(Protocol):
    label: str  # a key of the result

    def __init__(self, blocks: int) -> None: ...

    def hashes(self, tokens: "array[int]") -> Any:
        """Return the hash chain of all full blocks."""

    def take(self, count: int) -> Any: ...

    def release(self, blocks: Any) -> None: ...

    def find(self, hashes: Any) -> Any: ...

    def found_count(self, found: Any) -> int:
        """Return how many blocks `find` found."""

    def live(self, key: int, tokens: "array[int]", count: int) -> None:
        """Allocate `count` blocks, fill them all, and end the request."""


class Kernel:
    """The kernel."""

    label = "fairlead's BlockPool"

    def __init__(self, blocks: int) -> None:
        self.pool = BlockPool(blocks, BLOCK_SIZE, hash_key=HASH_KEY)
        self.take = self.pool.get_new_blocks
        self.release = self.pool.free_blocks

    def hashes(self, tokens: "array[int]") -> BlockHashes:
        chain = BlockHashes(HASH_KEY, BLOCK_SIZE)
        chain.extend(tokens)
        return chain

    def find(self, hashes: BlockHashes) -> list[int]:
        return self.pool.match_prefix(hashes, PROMPT_BLOCKS)

    def found_count(self, found: list[int]) -> int:
        return len(found)

    def live(self, key: int, tokens: "array[int]", count: int) -> None:
        blocks = self.pool.get_new_blocks(count)
        self.pool.cache_full_blocks(blocks, tokens, 0, count, BlockHashes(HASH_KEY, BLOCK_SIZE))
        self.pool.retire(key, blocks)


class Block:
    __slots__ = ("following", "key", "number", "preceding", "references")

    def __init__(self, number: int) -> None:
        self.number = number
        self.references = 0
        self.key: bytes | None = None
        self.preceding: Any = None
        self.following: Any = None


class FreeBlocks:
    """A doubly linked list of blocks between two sentinels."""

    def __init__(self, blocks: Iterable[Block]) -> None:
        self.count = 0
        self.head = Block(-1)
        self.tail = Block(-2)
        self.head.following, self.tail.preceding = self.tail, self.head
        self.extend(blocks)

    def extend(self, blocks: Iterable[Block]) -> None:
        last = self.tail.preceding
        for block in blocks:
            block.preceding = last
            last.following = block
            last = block
            self.count += 1
        last.following = self.tail
        self.tail.preceding = last

    def extend_front(self, blocks: Sequence[Block]) -> None:
        first = self.head.following
        for block in reversed(blocks):
            block.following = first
            first.preceding = block
            first = block
        self.count += len(blocks)
        self.head.following = first
        first.preceding = self.head

    def take(self, count: int) -> list[Block]:
        taken = []
        block = self.head.following
        for _ in range(count):
            taken.append(block)
            following = block.following
            block.preceding = block.following = None
            block = following
        self.head.following = block
        block.preceding = self.head
        self.count -= count
        return taken


class LinkedPool:
    """A pool of linked block objects, as in vLLM."""

    label = "linked block objects in Python"

    groups = (0,)

    def __init__(self, blocks: int) -> None:
        self.free = FreeBlocks([Block(number) for number in range(blocks)])
        self.index: dict[bytes, Block | dict[int, Block]] = {}

    def hashes(self, tokens: "array[int]") -> list[bytes]:
        parent = b""
        chain = []
        content = memoryview(tokens).cast("B")
        step = BLOCK_SIZE * tokens.itemsize
        for begin in range(0, len(content) - step + 1, step):
            digest = hashlib.blake2b(parent, key=HASH_KEY, digest_size=16)
            digest.update(content[begin : begin + step])
            parent = digest.digest()
            chain.append(parent)
        return chain

    def take(self, count: int) -> list[Block]:
        if count > self.free.count:
            raise ValueError("not enough blocks")
        blocks = self.free.take(count)
        for block in blocks:
            self.unindex(block)
            block.references += 1
        return blocks

    def unindex(self, block: Block) -> bool:
        key = block.key
        if key is None:
            return False
        block.key = None
        held = self.index[key]
        if held is block:
            del self.index[key]
        elif isinstance(held, dict):
            del held[block.number]
            if not held:
                del self.index[key]
        return True

    def release(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            block.references -= 1
        unneeded = [block for block in blocks if block.references == 0]
        self.free.extend_front([block for block in unneeded if block.key is None])
        self.free.extend([block for block in unneeded if block.key is not None])

    def key(self, content: bytes, group: int) -> bytes:
        return content + group.to_bytes(4, "big")

    def one_of(self, key: bytes) -> Block | None:
        held = self.index.get(key)
        if isinstance(held, dict):
            return next(iter(held.values()))
        return held

    def cached(self, content: bytes, groups: Sequence[int]) -> list[Block] | None:
        blocks = []
        for group in groups:
            block = self.one_of(self.key(content, group))
            if block is None:
                return None
            blocks.append(block)
        return blocks

    def find(self, hashes: Sequence[bytes]) -> tuple[list[Block], ...]:
        found: tuple[list[Block], ...] = tuple([] for _ in self.groups)
        for content in itertools.islice(hashes, PROMPT_BLOCKS):
            blocks = self.cached(content, self.groups)
            if blocks is None:
                break
            for own, block in zip(found, blocks, strict=True):
                own.append(block)
        return found

    def found_count(self, found: tuple[list[Block], ...]) -> int:
        return len(found[0])

    def live(self, key: int, tokens: "array[int]", count: int) -> None:  # noqa: ARG002  (this pool does not know requests)
        blocks = self.take(count)
        for block, content in zip(blocks, self.hashes(tokens), strict=True):
            block.key = self.key(content, self.groups[0])
            held = self.index.get(block.key)
            if held is None:
                self.index[block.key] = block
            elif isinstance(held, dict):
                held[block.number] = block
            else:
                self.index[block.key] = {held.number: held, block.number: block}
        self.release(blocks)


class LeanPool:
    """A pool of lists and a dict, with as few calls as possible."""

    label = "lists and a dict in Python"

    def __init__(self, blocks: int) -> None:
        self.free = list(range(blocks))
        self.references = [0] * blocks
        self.contents: list[Any] = [None] * blocks
        self.index: dict[Any, int] = {}
        self.kept: deque[list[int]] = deque()

    def hashes(self, tokens: "array[int]") -> list[int]:
        parent = 0
        chain = []
        for begin in range(0, len(tokens) - BLOCK_SIZE + 1, BLOCK_SIZE):
            parent = hash((parent, tuple(tokens[begin : begin + BLOCK_SIZE])))
            chain.append(parent)
        return chain

    def take(self, count: int) -> list[int]:
        free, references = self.free, self.references
        while len(free) < count:
            self.evict()
        taken = free[-count:]
        del free[-count:]
        for block in taken:
            references[block] = 1
        return taken

    def evict(self) -> None:
        oldest = self.kept.popleft()
        for block in oldest:
            del self.index[self.contents[block]]
        self.free += oldest

    def release(self, blocks: Sequence[int]) -> None:
        references, free = self.references, self.free
        for block in blocks:
            references[block] -= 1
            if not references[block]:
                free.append(block)

    def find(self, hashes: Sequence[Any]) -> list[int]:
        found = []
        index = self.index
        for content in hashes:
            if content not in index:
                break
            found.append(index[content])
        return found

    def found_count(self, found: list[int]) -> int:
        return len(found)

    def live(self, key: int, tokens: "array[int]", count: int) -> None:  # noqa: ARG002  (this pool does not know requests)
        blocks = self.take(count)
        contents, references = self.contents, self.references
        for block, content in zip(blocks, self.hashes(tokens), strict=True):
            contents[block] = content
            self.index[content] = block
            references[block] = 0
        self.kept.append(blocks)


class Slots:
    """The kernel."""

    label = "fairlead's SlotMap"

    def __init__(self, capacity: int) -> None:
        slots = SlotMap(capacity)
        self.alloc, self.free = slots.alloc, slots.free
        self.alloc_many, self.free_many = slots.alloc_many, slots.free_many


class SlotsInPython:
    """A slot map with a list of free slots."""

    label = "a list of free slots in Python"

    def __init__(self, capacity: int) -> None:
        self.unused = list(reversed(range(capacity)))
        self.generations = [1] * capacity
        self.keys: list[int | None] = [None] * capacity

    def alloc(self, key: int) -> int:
        if not self.unused:
            raise ValueError("full")
        slot = self.unused.pop()
        self.keys[slot] = key
        return self.generations[slot] << 32 | slot

    def free(self, handle: int) -> None:
        slot = handle & 0xFFFFFFFF
        if self.generations[slot] != handle >> 32 or self.keys[slot] is None:
            raise LookupError("stale")
        self.keys[slot] = None
        self.generations[slot] += 1
        self.unused.append(slot)

    def alloc_many(self, keys: Sequence[int]) -> list[int]:
        return [self.alloc(key) for key in keys]

    def free_many(self, handles: Sequence[int]) -> None:
        for handle in handles:
            self.free(handle)


PEERS: tuple[type[Peer], ...] = (Kernel, LinkedPool, LeanPool)
SLOT_PEERS: tuple[type[Any], ...] = (Slots, SlotsInPython)


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
