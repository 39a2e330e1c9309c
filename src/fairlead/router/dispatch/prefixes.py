"""Which nodes may have the beginning of a prompt in their prefix cache. Pure: sends no requests to nodes.

A node that has recently run a prompt with the same beginning need not compute it again, unless the node has
evicted it since. So a job prefers such a node, but never waits for it.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

# The prefixes that are hashed, in tokens: a few words, an instruction, a document.
LENGTHS = (64, 256, 1024)
BYTES_PER_TOKEN = 4
# Prefixes that are remembered per node; most prompts have three.
KEPT = 3 * 1024

Prefixes = tuple[int, ...]


def prefix_hashes(prompt: Sequence[int] | bytes, owner: str = "") -> Prefixes:
    """Return hashes of the prefixes of a prompt, the shortest first; equal in all processes.

    `prompt` has token ids, or is a request body, of which four bytes count as a token. The hashes are
    chained: each continues the one before. A long prompt costs no more than one of the greatest length.
    Those of different owners differ, because owners share no cached prefixes.
    """
    bytes_per_unit = BYTES_PER_TOKEN if isinstance(prompt, bytes) else 1
    hashes: list[int] = []
    begin, earlier = 0, _hash(owner.encode(errors="surrogatepass"), 0) if owner else 0
    for length in LENGTHS:
        end = length * bytes_per_unit
        if len(prompt) < end:
            break
        piece = prompt[begin:end]
        earlier = _hash(piece, earlier) if isinstance(piece, bytes) else hash((earlier, tuple(piece)))
        hashes.append(earlier)
        begin = end
    return tuple(hashes)


class RecentPrefixes:
    """The prefixes of each node's latest prompts, and the nodes that have had a prefix.

    A `holder` is a node.
    """

    def __init__(self) -> None:
        self._seen: dict[Hashable, OrderedDict[int, None]] = {}
        self._holders: dict[int, tuple[Any, ...]] = {}

    def add(self, holder: Hashable, prefixes: Prefixes) -> None:
        """Remember a prompt's prefixes. The node's least recently used ones are forgotten."""
        if not prefixes:
            return
        seen = self._seen.setdefault(holder, OrderedDict())
        for prefix in prefixes:
            if prefix in seen:
                seen.move_to_end(prefix)
            else:
                seen[prefix] = None
                self._holders[prefix] = (*self._holders.get(prefix, ()), holder)
        while len(seen) > KEPT:
            self._forget(holder, seen.popitem(last=False)[0])

    def remove(self, holder: Hashable) -> None:
        """Forget a node."""
        for prefix in self._seen.pop(holder, ()):
            self._forget(holder, prefix)

    def holders(self, prefix: int) -> tuple[Any, ...]:
        """Return the nodes that may have the prefix in their cache."""
        return self._holders.get(prefix, ())

    def _forget(self, holder: Hashable, prefix: int) -> None:
        left = tuple(other for other in self._holders[prefix] if other != holder)
        if left:
            self._holders[prefix] = left
        else:
            del self._holders[prefix]


def shares(prefixes: Prefixes) -> Iterator[tuple[int, float]]:
    """Yield each prefix, the longest first, and what part of the hashed prompt it is."""
    for index in reversed(range(len(prefixes))):
        yield prefixes[index], LENGTHS[index] / LENGTHS[len(prefixes) - 1]


def _hash(piece: bytes, earlier: int) -> int:
    """Return the same hash in every process, which Python's own of bytes is not."""
    hashed = hashlib.blake2b(piece, digest_size=8, salt=earlier.to_bytes(8))
    return int.from_bytes(hashed.digest())
