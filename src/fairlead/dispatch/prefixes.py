"""Which node may have the beginning of a prompt in its cache. Pure: nodes are not asked, we remember.

A node that has just had a prompt with the same beginning need not compute that again. What it really keeps is
its own affair, and what we remember may be gone there: it is worth a preference, never a wait.
"""

from collections import OrderedDict
from collections.abc import Sequence

from fairlead.job import Job

# The beginnings that are told apart, in tokens: a few words, an instruction, a document.
LENGTHS = (64, 256, 1024)
BYTES_A_TOKEN = 4
# Beginnings that are remembered of a node; of most prompts there are three.
KEPT = 3 * 1024

Prefixes = tuple[int, ...]


def prefixes_of(job: Job) -> Prefixes:
    """Return hashes of the beginnings of a job's first prompt, the shortest first.

    One that is not known here is looked at as its client wrote it, four bytes for a token. Costs no more for
    a long prompt than for one of the greatest length.
    """
    if job.prompts:
        return _hashes(job.prompts[0], 1)
    return () if job.relay is None else _hashes(job.relay.body, BYTES_A_TOKEN)


class Remembered:
    """What one node was given lately. `tenant` sets those apart who must not profit from one another."""

    __slots__ = ("_seen",)

    def __init__(self) -> None:
        self._seen: OrderedDict[tuple[int, str], None] = OrderedDict()

    def add(self, prefixes: Prefixes, tenant: str = "") -> None:
        """It is given a prompt. What was not given for longest is forgotten."""
        for prefix in prefixes:
            self._seen[prefix, tenant] = None
            self._seen.move_to_end((prefix, tenant))
        while len(self._seen) > KEPT:
            self._seen.popitem(last=False)

    def share(self, prefixes: Prefixes, tenant: str = "") -> float:
        """Return how much of what was looked at of a prompt the node may have, 0 to 1."""
        for index in reversed(range(len(prefixes))):
            if (prefixes[index], tenant) in self._seen:
                return LENGTHS[index] / LENGTHS[len(prefixes) - 1]
        return 0.0


def _hashes(prompt: Sequence[int], unit: int) -> Prefixes:
    """Each goes on from the one before, so that every element is looked at once."""
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
