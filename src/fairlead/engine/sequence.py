"""One stream of tokens in the engine, and the table of states it may pass through (spec 5, seed 002)."""

from enum import StrEnum

import msgspec

from fairlead.job import Sampling


class State(StrEnum):
    """PENDING waits for a slot and blocks; PROCESSING has both; the others are ends."""

    PENDING = "pending"
    PROCESSING = "processing"
    COMPLETED = "completed"
    TIMEOUT = "timeout"
    FAILED = "failed"
    CANCELLED = "cancelled"


TRANSITIONS: frozenset[tuple[State, State]] = frozenset(
    {
        (State.PENDING, State.PROCESSING),
        (State.PENDING, State.FAILED),
        (State.PENDING, State.TIMEOUT),
        (State.PENDING, State.CANCELLED),
        (State.PROCESSING, State.COMPLETED),
        (State.PROCESSING, State.TIMEOUT),
        (State.PROCESSING, State.FAILED),
        (State.PROCESSING, State.CANCELLED),
        (State.PROCESSING, State.PENDING),  # preempted: its request state stays, its blocks go
    }
)


class Sequence:
    """Token ids so far, how many of them are in the KV cache, and where.

    `token_ids` is prompt + output. `block_ids` has one list a KV cache group; position p of a group's
    cache lies in block `block_ids[group][p // block_size]`. `seed` is the client's or a random one.
    `generation` counts the owners of `slot`: what was kept for a row under another one is stale.
    """

    __slots__ = (
        "_state",
        "block_ids",
        "computed",
        "generation",
        "key",
        "prompt_length",
        "sampling",
        "seed",
        "slot",
        "token_ids",
    )

    def __init__(
        self, key: int, prompt: list[int], sampling: Sampling, *, seed: int, groups: int = 1
    ) -> None:
        self.key = key
        self.token_ids = prompt
        self.prompt_length = len(prompt)
        self.sampling = sampling
        self.seed = seed
        self.computed = 0
        self.slot: int | None = None
        self.generation = 0
        self.block_ids: tuple[list[int], ...] = tuple([] for _ in range(groups))
        self._state = State.PENDING

    @property
    def state(self) -> State:
        return self._state

    @property
    def output_length(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.prompt_length

    def become(self, state: State) -> None:
        """Move to `state`; a transition that the table does not have is a bug and raises."""
        if (self._state, state) not in TRANSITIONS:
            raise AssertionError(f"sequence {self.key} cannot go from {self._state} to {state}")
        self._state = state


class Chunk(msgspec.Struct, frozen=True):
    """One sequence's share of a step: run `count` tokens from position `start` (= computed so far) on.

    `samples`: the chunk reaches the sequence's last token, so the step picks the next one.
    """

    sequence: Sequence
    start: int
    count: int
    samples: bool


class Plan(msgspec.Struct, frozen=True):
    """One engine step's work, decodes (chunks of one that sample) before prefills. Never empty."""

    chunks: tuple[Chunk, ...]
