"""Which nodes may have the beginning of a prompt in their prefix cache. Pure: nodes are not asked.

A node that has just run a prompt with the same beginning need not compute that again. It may have evicted it
since, so what is remembered here is worth a preference, never a wait.
"""

from collections import OrderedDict
from collections.abc import Sequence

from fairlead.job import Job

# The prefixes that are hashed, in tokens: a few words, an instruction, a document.
LENGTHS = (64, 256, 1024)
BYTES_A_TOKEN = 4
# Prefixes that are remembered per node; most prompts have three.
KEPT = 3 * 1024

Prefixes = tuple[int, ...]


def prefixes_of(job: Job) -> Prefixes:
    """Return hashes of the prefixes of a job's first prompt, the shortest first.

    Without token ids, the request body is hashed, four bytes for a token. A long prompt costs no more than
    one of the greatest length.
    """
    if job.prompts:
        return _hashes(job.prompts[0], 1)
    return () if job.relay is None else _hashes(job.relay.body, BYTES_A_TOKEN)


class Remembered:
    """The prefixes that one node was given lately. `tenant` separates tenants that must not share a cache."""

    __slots__ = ("_seen",)

    def __init__(self) -> None:
        self._seen: OrderedDict[tuple[int, str], None] = OrderedDict()

    def add(self, prefixes: Prefixes, tenant: str = "") -> None:
        """Remember a prompt's prefixes. The least recently given ones are forgotten."""
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


def _hashes(prompt: Sequence[int], unit: int) -> Prefixes:
    """Return chained hashes: each continues the one before, so that every element is hashed once."""
    found: list[int] = []
    begin, earlier = 0, 0
    for length in LENGTHS:
        end = length * unit
        if len(prompt) < end:
            break
        piece = prompt[begin:end]
        earlier = hash((earlier, piece if isinstance(piece, bytes) else tuple(piece)))
        found.append(earlier)
        begin = end
    return tuple(found)
