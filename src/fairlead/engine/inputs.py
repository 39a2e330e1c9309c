"""A prepared step as the device half reads it: views of its arena and of the batch's block tables.

Owns nothing: the views are valid until the step's arena is used again.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, Self

import msgspec
import numpy as np

from fairlead._cext.inputbatch import InputBatch, Offsets
from fairlead.engine.arrays import Array, Device, device_of, library, upload

if TYPE_CHECKING:
    from typing_extensions import Buffer

    Integers = Buffer | np.ndarray


class PreparedStep(Protocol):
    """What the device half reads of a step: one of `inputbatch`, or one that another process has sent."""

    @property
    def tokens(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def decodes(self) -> int: ...
    @property
    def offsets(self) -> Offsets: ...
    @property
    def arena(self) -> "Integers": ...
    @property
    def input_ids(self) -> "Integers": ...
    @property
    def slot_mapping(self) -> "Sequence[Integers]": ...
    @property
    def query_starts(self) -> "Integers": ...
    @property
    def sequence_lengths(self) -> "Integers": ...
    @property
    def slots(self) -> "Integers": ...
    @property
    def sample_tokens(self) -> "Integers": ...


class BlockTables(Protocol):
    """The block tables of a batch of at most `slots` sequences: of each KV cache group, [slots, columns]."""

    @property
    def slots(self) -> int: ...
    def block_table(self, group: int) -> "Integers": ...


class Inputs(msgspec.Struct, frozen=True, kw_only=True):
    """The rows of a step, decodes first: B rows with T tokens, S of which are sampled after. All int32.

    What is called `Array` is on the device, the rest on the host (on a CPU both are views of the arena).

    `token_ids` [T], all in the vocabulary; `positions` [T]; `slot_mapping` [T] by KV cache group: block ·
    block_size + offset. `query_starts` [B + 1]: row r's tokens are query_starts[r] … query_starts[r + 1] −
    1. `sequence_lengths` [B]: tokens in the cache after this step. `slots` [B]: row r's index into each
    group's block table, `tables[group]` [slots, blocks per slot]. The first `decodes` rows have one token
    each. `sample_tokens` [S], ascending: the tokens after which one is sampled, none, one or several of a
    row. `scored_tokens` [P], ascending: other tokens that need logits.

    An optional column: `embeddings` [E, C] are what the network gets in place of the embeddings of
    `embedded_tokens` [E], ascending.
    """

    token_ids: Array
    positions: Array
    slot_mapping: tuple[Array, ...]
    query_starts: np.ndarray
    sequence_lengths: np.ndarray
    slots: np.ndarray
    sample_tokens: np.ndarray
    tables: tuple[np.ndarray, ...]
    decodes: int
    scored_tokens: np.ndarray = np.empty(0, np.int64)
    embedded_tokens: np.ndarray = np.empty(0, np.int64)
    embeddings: Array | None = None

    @classmethod
    def read(cls, step: PreparedStep, batch: BlockTables, device: Device) -> Self:
        """Copy a step's arena to `device`, at once. `token_ids` may still contain references to samples."""
        arena = upload(np.asarray(step.arena), device)
        at, T = step.offsets, step.tokens  # noqa: N806
        groups = len(step.slot_mapping)
        return cls(
            token_ids=arena[at.input_ids : at.input_ids + T],
            positions=arena[at.positions : at.positions + T],
            slot_mapping=tuple(
                arena[at.slot_mapping + group * T : at.slot_mapping + (group + 1) * T]
                for group in range(groups)
            ),
            query_starts=np.asarray(step.query_starts),
            sequence_lengths=np.asarray(step.sequence_lengths),
            slots=np.asarray(step.slots),
            sample_tokens=np.asarray(step.sample_tokens),
            tables=tuple(np.asarray(batch.block_table(group)) for group in range(groups)),
            decodes=step.decodes,
        )

    @property
    def logit_tokens(self) -> np.ndarray:
        """Indices of the tokens with logits: sampled tokens, then scored tokens, [S + P]."""
        if not len(self.scored_tokens):
            return self.sample_tokens
        return np.concatenate([self.sample_tokens, self.scored_tokens])

    def of_rows(self, rows: np.ndarray) -> Self:
        """Return some rows of the step, ascending, as a step of their own."""
        starts = self.query_starts
        tokens = np.concatenate([np.arange(starts[row], starts[row + 1]) for row in rows])
        places = np.full(int(starts[-1]), -1)
        places[tokens] = np.arange(len(tokens))

        def among(indices: np.ndarray) -> np.ndarray:
            found: np.ndarray = places[indices]
            return found[found >= 0]

        device = device_of(self.token_ids)
        on_device = upload(tokens, device)
        embedded = np.flatnonzero(places[self.embedded_tokens] >= 0)
        embeddings = None
        if self.embeddings is not None and len(embedded):
            embeddings = self.embeddings[upload(embedded, device)]
        return msgspec.structs.replace(
            self,
            token_ids=self.token_ids[on_device],
            positions=self.positions[on_device],
            slot_mapping=tuple(mapping[on_device] for mapping in self.slot_mapping),
            query_starts=np.concatenate([[0], np.cumsum(np.diff(starts)[rows])]).astype(np.int32),
            sequence_lengths=self.sequence_lengths[rows],
            slots=self.slots[rows],
            sample_tokens=among(self.sample_tokens).astype(np.int32),
            decodes=int((rows < self.decodes).sum()),
            scored_tokens=among(self.scored_tokens),
            embedded_tokens=among(self.embedded_tokens),
            embeddings=embeddings,
        )

    def resolved(self, token_ids: np.ndarray, latest: Array | None, vocab_size: int) -> Self:
        """Replace unknown tokens by those that the previous step chose, `latest`, which stay on the device.

        `token_ids` are those of the step, on the host. An id outside the vocabulary runs as 0, because an
        index out of range would fail the whole step; its sequence fails when it samples
        (`out_of_vocabulary_rows`).
        """
        late = np.flatnonzero(token_ids < 0)
        if not len(late) and token_ids.max() < vocab_size:
            return self
        ids = self.token_ids
        xp, device = library(ids), device_of(ids)
        ids = xp.where((ids < 0) | (ids >= vocab_size), 0, ids)
        if len(late):
            assert latest is not None
            chosen = latest[upload(-1 - token_ids[late], device)]
            ids[upload(late, device)] = xp.asarray(chosen, dtype=ids.dtype)
        return msgspec.structs.replace(self, token_ids=ids)


def out_of_vocabulary_rows(batch: InputBatch, slots: np.ndarray, vocab_size: int) -> dict[int, str]:
    """Return an error, by index in `slots`, for each prompt with ids outside the vocabulary.

    A prompt is checked once, when its first output token is about to be sampled.
    """
    first = np.flatnonzero(np.asarray(batch.output_tokens)[slots] == 0)
    return {
        index: f"the prompt has token ids outside 0…{vocab_size - 1}"
        for index in first.tolist()
        if np.asarray(batch.state(int(slots[index])).tokens_view()).max() >= vocab_size
    }
