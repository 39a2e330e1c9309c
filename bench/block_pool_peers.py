"""The block pool and implementations in Python, as `block_pool.py` measures them.

The linked pool is built like vLLM's. A block is an object. The free blocks, including kept ones, form a
doubly linked list, which is evicted from the front. A dict maps hash and group to a block, or to several
blocks with the same content. A lookup is one call per block, which checks every group. Hashes are keyed and
have 128 bits, like the kernel's. The lean pool has no objects, links, groups or calls: a list of free ids, a
dict and a deque of requests. It uses Python's fastest hash, which has 64 bits and no key.
"""

import hashlib
import itertools
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from fairlead._cext.blockpool import BlockHashes, BlockPool

BLOCK_SIZE = 16
PROMPT_BLOCKS = 128
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

    def live(self, key: int, tokens: "array[int]", count: int) -> None:  # noqa: ARG002  (this pool has no requests)
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

    def live(self, key: int, tokens: "array[int]", count: int) -> None:  # noqa: ARG002  (this pool has no requests)
        blocks = self.take(count)
        contents, references = self.contents, self.references
        for block, content in zip(blocks, self.hashes(tokens), strict=True):
            contents[block] = content
            self.index[content] = block
            references[block] = 0
        self.kept.append(blocks)


PEERS: tuple[type[Peer], ...] = (Kernel, LinkedPool, LeanPool)
