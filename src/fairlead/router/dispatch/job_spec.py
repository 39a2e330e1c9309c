"""The description of a job that the scheduler gets."""

from typing import Annotated

import msgspec
from msgspec import Meta

# Bounds for messages of other processes: the queue takes no other numbers.
ClassIndex = Annotated[int, Meta(ge=0, le=7)]
Tokens = Annotated[int, Meta(ge=0, le=2**40)]
Bytes = Annotated[int, Meta(ge=0, le=2**40)]
Sequences = Annotated[int, Meta(ge=1, le=2**20)]
Weight = Annotated[float, Meta(gt=0)]
TokensOfOne = Annotated[int, Meta(ge=0, le=2**31)]

REQUEST_TOKENS = 1000
"""The tokens that a request counts as which has none, such as one for sound or an image."""

MOST_SEATS = 1024
"""The most seats that one job takes. It bounds the number of kinds of jobs (`JobKind`)."""


def line_of(tenant: str, team: str) -> str:
    """Return the name of a tenant's line in the queue: the tenant's, or in a team a name that no tenant has.

    With an empty tenant it is the name of the team's own turns.
    """
    return f"\0{team}\0{tenant}" if team else tenant


class JobSpec(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A job as the scheduler sees it: ids and numbers, which may be sent to another process.

    request_id: the client's id for it.
    tenant: whose turn it takes.
    model: the canonical name of its model.
    owner: identifies the API key that may cancel it.
    priority: an index into `queue.classes`; 0 is served first.
    no_queue: refuse it rather than queue it.
    wait_limit_s: how long it may wait, if that is less than `queue.timeout`.
    stream: its wait ends with its first delta, that of any other job with its seat.
    prompt_tokens: counts each prompt once.
    longest_prompt: the length of the longest prompt.
    prompt_cache_tokens: those that a node holds at a time.
    sequences: the choices of the answer.
    max_tokens: the most tokens of each.
    is_embedding: whether the answer is a vector for each prompt.
    portions: in how many portions a node gets the texts to embed that takes them one by one.
    prefixes: hashes of the prompt's beginning (`prefix_hashes`).
    body_bytes: the size of its request as the client wrote it; None if it cannot be relayed.
    must_be_relayed: only nodes that take such requests can run it.
    needs_own_node: remote servers cannot run it.
    has_no_tokens: it is charged for `REQUEST_TOKENS` instead.
    when_idle: it gets only seats that no other job waits for (`IdleJobs`).
    team: the team whose turn it takes, of which its tenant has a part; empty: none.
    team_weight: what its team gets of the service, against a team with weight 1.
    """

    request_id: str
    tenant: str
    model: str
    owner: str = ""
    priority: ClassIndex = 1
    no_queue: bool = False
    wait_limit_s: float | None = None
    stream: bool = False
    prompt_tokens: Tokens = 0
    longest_prompt: Tokens = 0
    prompt_cache_tokens: Tokens = 0
    sequences: Sequences = 1
    max_tokens: TokensOfOne = 0
    is_embedding: bool = False
    portions: Sequences = 1
    prefixes: tuple[int, ...] = ()
    body_bytes: Bytes | None = None
    must_be_relayed: bool = False
    needs_own_node: bool = False
    has_no_tokens: bool = False
    when_idle: bool = False
    team: str = ""
    team_weight: Weight = 1.0

    @property
    def line(self) -> str:
        """The name of its tenant's line in the queue (`line_of`)."""
        return line_of(self.tenant, self.team)

    @property
    def seats(self) -> int:
        """How many seats it takes at once where sequences do not start one by one: one for each.

        A list of texts to embed or score takes one seat: how many of them are computed at a time is up to the
        node.
        """
        return 1 if self.is_embedding else min(self.sequences, MOST_SEATS)

    @property
    def turns(self) -> int:
        """In how many parts it runs where they start one by one, each in a seat and a turn of its own."""
        return self.portions if self.is_embedding else self.sequences

    @property
    def needs_local_node(self) -> bool:
        """Whether no remote server can run it."""
        return self.body_bytes is None or self.needs_own_node
