"""The description of a job that the scheduler gets."""

from typing import Annotated

import msgspec
from msgspec import Meta

# Bounds for messages of other processes: the queue takes no other numbers.
ClassIndex = Annotated[int, Meta(ge=0, le=7)]
Tokens = Annotated[int, Meta(ge=0, le=2**40)]
Bytes = Annotated[int, Meta(ge=0, le=2**40)]
Sequences = Annotated[int, Meta(ge=1, le=2**20)]
TokensOfOne = Annotated[int, Meta(ge=0, le=2**31)]

REQUEST_TOKENS = 1000
"""The tokens that a request counts as which has none, such as one for sound or an image."""

MOST_SEATS = 1024
"""The most seats that one job takes. It bounds the number of kinds of jobs (`JobKind`)."""


class JobSpec(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A job as the scheduler sees it: ids and numbers, which may be sent to another process.

    `owner` identifies the API key that may cancel the job. `priority` is an index into `queue.classes`, where
    0 is served first. `no_queue`: refuse it rather than queue it. `stream`: its wait ends with its first
    delta, that of any other job with its seat.

    `prompt_tokens` counts each prompt once, `longest_prompt` is the length of the longest one, and
    `prompt_cache_tokens` are those that a node holds at a time. The answer has `sequences` choices of up to
    `max_tokens` each, or none if the job `is_embedding`. `prefixes` are hashes of the prompt's beginning
    (`prefix_hashes`).

    `body_bytes` is the size of its request as the client wrote it; None if it cannot be relayed.
    `wait_limit_s`: how long it may wait, if that is less than `queue.timeout`.
    `must_be_relayed`: only nodes that take such requests can run it. `needs_own_node`: remote servers cannot.
    `has_no_tokens`: it is charged for `REQUEST_TOKENS` instead.
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
    prefixes: tuple[int, ...] = ()
    body_bytes: Bytes | None = None
    must_be_relayed: bool = False
    needs_own_node: bool = False
    has_no_tokens: bool = False

    @property
    def seats(self) -> int:
        """How many seats it takes on a node that has as many: one for each sequence.

        A list of texts to embed or score takes one seat. The engine gets its texts a few at a time, so others
        wait for those few only. If the list took all seats, others would wait for the whole list.
        """
        return 1 if self.is_embedding else min(self.sequences, MOST_SEATS)

    @property
    def needs_local_node(self) -> bool:
        """Whether no remote server can run it."""
        return self.body_bytes is None or self.needs_own_node
