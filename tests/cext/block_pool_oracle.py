"""A block pool in plain Python, written to be obviously correct. Slow on purpose."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from fairlead._cext.blockpool import BlockPoolStatistics, OutOfBlocks

HOLDS_A_BLOCK = 256


class BlockHashesOracle:
    """The interface of `BlockHashes` with another hash function: only equality of hashes matters."""

    def __init__(self, hash_key, block_size, salt=b""):
        check(len(hash_key) == 16 and 1 <= block_size <= 2**16)
        self.hash_key, self.block_size = hash_key, block_size
        self.root = self.digest(b"salt" + salt)
        self.chain = []

    def extend(self, token_ids):
        tokens = memoryview(token_ids)
        if tokens.format != "i" or tokens.ndim != 1:
            raise TypeError
        blocks = len(tokens) // self.block_size
        check(blocks >= len(self.chain))
        for i in range(len(self.chain), blocks):
            own = tokens[i * self.block_size : (i + 1) * self.block_size].tobytes()
            self.chain.append(self.digest((self.chain[-1] if self.chain else self.root) + own))
        return blocks

    def digest(self, message):
        return hashlib.blake2b(message, key=self.hash_key, digest_size=16).digest()

    def __len__(self):
        return len(self.chain)

    def __getitem__(self, index):
        return self.chain[index]


@dataclass
class Block:
    references: int = 0
    hash: bytes | None = None
    kept: int = 0  # how many times kept requests hold it
    owner: "Request | None" = None  # the latest kept request that holds it
    tip_of: "Request | None" = None  # the kept request of which it is the last block
    slid_as: "Request | None" = None  # the one that keeps only it, because it slid out of a window


@dataclass(eq=False)
class Request:
    key: int
    held: list = field(default_factory=list)
    slid: bool = False  # it is one block that slid out of a window, without a key of a caller


class BlockPoolOracle:
    """The interface of `BlockPool`."""

    new_hashes = BlockHashesOracle

    def __init__(
        self, blocks, block_size, *, hash_key, max_entries=None, threshold=0.8, first_in_first_out=False
    ):
        check(1 <= blocks <= 2**28 and 1 <= block_size <= 2**16 and len(hash_key) == 16)
        check(0 < threshold <= 1 and (max_entries is None or max_entries >= 1))
        self.total, self.block_size, self.hash_key = blocks, block_size, hash_key
        self.max_entries, self.threshold = max_entries, threshold
        self.first_in_first_out = first_in_first_out
        self.blocks = [Block() for _ in range(blocks)]
        self.free_list = list(reversed(range(blocks)))  # the last one is allocated first
        self.index = {}  # hash -> the block that holds it
        self.requests = {}  # key -> Request, in order of eviction
        self.queries = self.hits = self.evicted_requests = 0

    @property
    def free(self):
        return len(self.free_list)

    @property
    def referenced(self):
        return sum(block.references > 0 for block in self.blocks)

    @property
    def evictable(self):
        return self.total - self.free - self.referenced

    @property
    def available(self):
        return self.total - self.referenced

    @property
    def shared(self):
        return sum(max(0, block.references - 1) for block in self.blocks)

    def blocks_for(self, tokens):
        check(tokens >= 0)
        return -(-tokens // self.block_size)

    # Running sequences

    def get_new_blocks(self, count):
        check(count >= 0)
        if count > self.available:
            raise OutOfBlocks
        while count > self.free:
            self.evict_oldest()
        taken = [self.free_list.pop() for _ in range(count)]
        for block_id in taken:
            self.blocks[block_id].references = 1
        return taken

    def touch(self, block_ids):
        block_ids = self.checked(block_ids)
        check(all(self.in_use(block_id) for block_id in block_ids))
        for block_id in block_ids:
            self.blocks[block_id].references += 1
        for block_id in block_ids:
            if self.blocks[block_id].slid_as:
                self.use(self.blocks[block_id].slid_as)
        owners = [self.blocks[block_id].owner for block_id in block_ids]
        for owner in [owner for owner in owners if owner][-1:]:
            self.use(owner)

    def use(self, request):
        if not self.first_in_first_out:
            self.requests[request.key] = self.requests.pop(request.key)

    def free_blocks(self, block_ids):
        block_ids = self.checked(block_ids)
        self.drop_references(block_ids)
        self.settle(block_ids)

    def drop_references(self, block_ids):
        for block_id in block_ids:
            check(block_ids.count(block_id) <= self.blocks[block_id].references)
        for block_id in block_ids:
            self.blocks[block_id].references -= 1

    def settle(self, block_ids):
        """Free the blocks that are no longer in use, so that the first of them is allocated next."""
        for block_id in reversed(block_ids):
            if not self.in_use(block_id) and block_id not in self.free_list:
                self.forget(block_id)
                self.free_list.append(block_id)

    def forget(self, block_id):
        block = self.blocks[block_id]
        if self.index.get(block.hash) == block_id:
            del self.index[block.hash]
        block.hash = None

    def in_use(self, block_id):
        return self.blocks[block_id].references > 0 or self.blocks[block_id].kept > 0

    def retire_blocks(self, block_ids):
        block_ids = self.checked(block_ids)
        self.drop_references(block_ids)
        for block_id in block_ids:
            if self.blocks[block_id].hash:
                self.keep_block(self.holder(block_id))
        self.settle(block_ids)
        self.bound_holds()

    def keep_block(self, block_id):
        block = self.blocks[block_id]
        if block.slid_as:
            self.use(block.slid_as)
            return
        block.slid_as = Request(("slid", block_id), [block_id], slid=True)
        block.kept += 1
        self.requests[block.slid_as.key] = block.slid_as

    def forget_blocks(self, hashes, first, last):
        self.check_hashes(hashes)
        check(first >= 0 and last >= 0)
        for i in range(first, min(last, len(hashes))):
            if hashes[i] in self.index and self.blocks[self.index[hashes[i]]].slid_as:
                self.release(self.blocks[self.index[hashes[i]]].slid_as)

    # Contents

    def cache_full_blocks(self, block_ids, token_ids, first, last, hashes):
        self.check_hashes(hashes)
        check(0 <= first <= last <= len(block_ids))
        full = [
            (i, block_id)
            for i, block_id in enumerate(listed(block_ids)[first:last], first)
            if self.checked([block_id])
        ]
        check(all(self.blocks[block_id].references > 0 for _, block_id in full))
        if len(hashes) < last:
            check(len(memoryview(token_ids)) >= last * self.block_size)
            hashes.extend(token_ids)
        check(all(self.blocks[block_id].hash in (None, hashes[i]) for i, block_id in full))
        for i, block_id in full:
            self.blocks[block_id].hash = hashes[i]
            self.index.setdefault(hashes[i], block_id)

    def match_prefix(self, hashes, limit, *, window=None):
        self.check_hashes(hashes)
        check(limit >= 0 and (window is None or window >= 0))
        longest = min(limit, len(hashes))
        self.queries += longest * self.block_size
        found = [self.index.get(hashes[i], -1) for i in range(longest)]
        for length in range(longest, -1, -1):
            seen_from = 0 if window is None else max(length - window, 0)
            if -1 not in found[seen_from:length]:
                self.hits += length * self.block_size
                return [-1] * seen_from + found[seen_from:length]
        raise AssertionError("the empty prefix always matches")

    def check_hashes(self, hashes):
        check(hashes.hash_key == self.hash_key and hashes.block_size == self.block_size)

    # Finished requests

    def retire(self, key, block_ids):
        if not isinstance(key, int):
            raise TypeError
        block_ids = self.checked(block_ids)
        self.drop_references(block_ids)
        held = [self.holder(block_id) for block_id in block_ids if self.blocks[block_id].hash]
        if held and not self.is_covered(Request(key, held)):
            self.keep(Request(key, held))
        self.settle(block_ids)
        self.bound_holds()

    def bound_holds(self):
        while sum(len(request.held) for request in self.requests.values()) > HOLDS_A_BLOCK * self.total:
            self.evict_oldest()

    def is_covered(self, request):
        other = self.blocks[request.held[-1]].tip_of
        if not other or other.key == request.key or len(other.held) <= len(request.held):
            return False
        if request.key in self.requests:
            self.release(self.requests[request.key])
        self.use(other)
        return True

    def holder(self, block_id):
        """Return the one block kept for its content: this one or, if it is a duplicate, the indexed one."""
        return self.index.setdefault(self.blocks[block_id].hash, block_id)

    def keep(self, request):
        for block_id in request.held:
            self.blocks[block_id].kept += 1
            self.blocks[block_id].owner = request
            if self.blocks[block_id].slid_as:
                self.release(self.blocks[block_id].slid_as)
        if request.key in self.requests:
            self.release(self.requests[request.key])
        for i, block_id in enumerate(request.held):
            other = self.blocks[block_id].tip_of
            if other and (i + 1 >= len(other.held) or i + 1 == len(request.held)):
                self.release(other)  # superseded by the new request
        self.blocks[request.held[-1]].tip_of = request
        self.requests[request.key] = request

    def release(self, request):
        del self.requests[request.key]
        for block_id in request.held:
            block = self.blocks[block_id]
            block.kept -= 1
            block.owner = None if block.owner is request else block.owner
            block.tip_of = None if block.tip_of is request else block.tip_of
            block.slid_as = None if block.slid_as is request else block.slid_as
        self.settle(request.held)

    def evict_oldest(self):
        oldest = next(iter(self.requests.values()))
        self.release(oldest)
        self.evicted_requests += not oldest.slid
        return oldest

    def free_ids(self):
        return sorted(self.free_list)

    def evict(self, key):
        if key not in self.requests:
            return False
        self.release(self.requests[key])
        self.evicted_requests += 1
        return True

    def trim(self):
        evicted = []
        while self.evictable and self.is_over():
            evicted.append(self.evict_oldest())
        return [request.key for request in evicted if not request.slid]

    def is_over(self):
        used = self.total - self.free
        return used > self.threshold * self.total or (
            self.max_entries is not None and used * self.block_size > self.threshold * self.max_entries
        )

    # Queries

    def statistics(self):
        return BlockPoolStatistics(
            total=self.total,
            free=self.free,
            evictable=self.evictable,
            referenced=self.referenced,
            cached_requests=sum(not request.slid for request in self.requests.values()),
            cached_tokens=sum(block.kept > 0 for block in self.blocks) * self.block_size,
            queries=self.queries,
            hits=self.hits,
            evicted_requests=self.evicted_requests,
        )

    def reference_count(self, block):
        check(0 <= block < self.total)
        return self.blocks[block].references

    def checked(self, block_ids):
        """Check the ids and return them without the −1 of blocks that slid out of a window."""
        own = [block_id for block_id in listed(block_ids) if block_id != -1]
        if not all(isinstance(block_id, int) for block_id in own):
            raise TypeError
        check(all(0 <= block_id < self.total for block_id in own))
        return own


def listed(block_ids):
    return list(block_ids) if isinstance(block_ids, Sequence) else memoryview(block_ids).tolist()


def check(condition):
    if not condition:
        raise ValueError
