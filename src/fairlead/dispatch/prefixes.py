"""Which nodes may have the beginning of a prompt in their prefix cache. Pure: sends no requests to nodes.

A node that has recently run a prompt with the same beginning need not compute it again, unless the node has
evicted it since. So a job prefers such a node, but never waits for it.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

# The prefixes that are hashed, in tokens: a few words, an instruction, a document.
LENGTHS = (64, 256, 1024)
BYTES_PER_TOKEN = 4
# Prefixes that are remembered per node; most prompts have three.
KEPT = 3 * 1024

Prefixes = tuple[int, ...]


def prefix_hashes(prompt: Sequence[int] | bytes) -> Prefixes:
    """Return hashes of the prefixes of a prompt, the shortest first; equal in all processes.

    `prompt` has token ids, or is a request body, of which four bytes count as a token. The hashes are
    chained: each continues the one before. A long prompt costs no more than one of the greatest length.
    """
    bytes_per_unit = BYTES_PER_TOKEN if isinstance(prompt, bytes) else 1
    hashes: list[int] = []
    begin, earlier = 0, 0
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
    """The prefixes of one node's latest prompts. `tenant` separates tenants that must not share a cache."""

    __slots__ = ("_seen",)

    def __init__(self) -> None:
        self._seen: OrderedDict[tuple[int, str], None] = OrderedDict()

    def add(self, prefixes: Prefixes, tenant: str = "") -> None:
        """Remember a prompt's prefixes. The least recently used ones are forgotten."""
        for prefix in prefixes:
            self._seen[prefix, tenant] = None
            self._seen.move_to_end((prefix, tenant))
        while len(self._seen) > KEPT:
            self._seen.popitem(last=False)

    def share(self, prefixes: Prefixes, tenant: str = "") -> float:
        """Return what part of the hashed prompt the node may have cached, 0 to 1."""
        for index in reversed(range(len(prefixes))):
            if (prefixes[index], tenant) in self._seen:
                return LENGTHS[index] / LENGTHS[len(prefixes) - 1]
        return 0.0


def _hash(piece: bytes, earlier: int) -> int:
    """Return the same hash in every process, which Python's own of bytes is not."""
    hashed = hashlib.blake2b(piece, digest_size=8, salt=earlier.to_bytes(8))
    return int.from_bytes(hashed.digest())
