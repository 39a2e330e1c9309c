"""A model's steps on several ranks: rank 0 sends each step to the others, and all run it at the same time.

Rank 0 has the engine and its batch; the other ranks have only their part of the network and of the KV cache,
and copies of the block tables, which the steps change. A step is one message: its arena, as it goes to a
device. Independent of processes and sockets.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn, assert_never

import msgspec
import numpy as np
import torch
from torch import Tensor

from fairlead._cext.inputbatch import Offsets
from fairlead.engine.backend import Forward, StagedForward, staging
from fairlead.engine.inputs import BlockTables, Inputs, PreparedStep
from fairlead.engine.models.parallel import Ranks


class RunStep(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """Run a step. `arena` is int32, `scored_tokens` is int64 (`Inputs.scored_tokens`).

    If the step has tokens that the previous one was to choose, rank 0 broadcasts first what it has chosen,
    `latest` tokens; else `latest` is 0.
    """

    arena: bytes
    scored_tokens: bytes
    latest: int


class ReleaseBlocks(msgspec.Struct, frozen=True, array_like=True, tag="release"):
    """Return the memory of these blocks of a KV cache group to the system (`Forward.release`)."""

    group: int
    blocks: list[int]


FromRankZero = RunStep | ReleaseBlocks


@dataclass(frozen=True)
class Membership:
    """The place of this process among the ranks of a model.

    `join` is called once, when this rank's weights are loaded; it returns when those of all are, and `ranks`
    can exchange tensors on the device. Of rank 0: `send` sends a message to all others, and `give_up` ends
    all processes after an error within a step, in which the others would wait for this one.
    """

    ranks: Ranks
    join: Callable[[torch.device], None]
    send: Callable[[FromRankZero], None]
    give_up: Callable[[Exception], NoReturn]


class LeadingForward:
    """`forward.StagedForward` of rank 0: runs `forward`, which is its own part, on all ranks."""

    def __init__(self, forward: Forward, membership: Membership) -> None:
        self.device = forward.device
        self.vocab_size = forward.vocab_size
        self.samples_several = forward.samples_several
        self.columns: dict[str, int] = {}  # the message of a step has none
        self.kernel = f"{forward.kernel} × {membership.ranks.size}"
        self._forward = forward
        self._stage = staging(forward)
        self._membership = membership
        self._step: PreparedStep | None = None
        self._latest: Tensor | None = None

    def prepare(
        self,
        *,
        slots: int,
        max_batch: int,
        max_batched_tokens: int,
        max_model_len: int,
        most_drafts: int = 0,
        report: Callable[[float], None],
    ) -> None:
        """See `StagedForward`. All ranks prepare at the same time."""
        if isinstance(self._forward, StagedForward):
            self._forward.prepare(
                slots=slots,
                max_batch=max_batch,
                max_batched_tokens=max_batched_tokens,
                max_model_len=max_model_len,
                most_drafts=most_drafts,
                report=report,
            )

    def stage(self, step: PreparedStep, batch: BlockTables, latest: Tensor | None) -> Inputs:
        """See `StagedForward`. The step is sent when it is run."""
        is_late = bool((np.asarray(step.input_ids) < 0).any())
        self._step, self._latest = step, latest if is_late else None
        return self._stage(step, batch, latest)

    def __call__(self, inputs: Inputs) -> Tensor:
        """Write the step's keys and values to the cache; return the logits of `logit_tokens`, [S + P, V]."""
        assert self._step is not None
        latest = self._latest
        self._membership.send(
            RunStep(
                np.asarray(self._step.arena).tobytes(),
                inputs.scored_tokens.astype(np.int64).tobytes(),
                0 if latest is None else len(latest),
            )
        )
        try:
            if latest is not None:
                self._membership.ranks.broadcast(latest)
            logits: Tensor = self._forward(inputs)
            return logits
        except Exception as error:  # noqa: BLE001  whatever a device may raise
            self._membership.give_up(error)

    def release(self, group: int, blocks: Sequence[int]) -> None:
        """Return the memory of these blocks of a KV cache group to the system, if possible; ascending ids."""
        self._membership.send(ReleaseBlocks(group, list(blocks)))
        self._forward.release(group, blocks)


class Follower:
    """Runs rank 0's steps on another rank, with that rank's `forward` and a copy of the block tables."""

    def __init__(self, forward: Forward, ranks: Ranks, tables: "ReceivedTables") -> None:
        self._forward = forward
        self._stage = staging(forward)
        self._ranks = ranks
        self._tables = tables

    @torch.inference_mode()
    def execute(self, message: FromRankZero) -> None:
        """Execute a message of rank 0. Messages must be executed in their order."""
        match message:
            case RunStep(arena, scored_tokens, latest):
                step = ReceivedStep(_writable(arena, np.int32))
                self._tables.apply(step)
                self._forward(self._inputs(step, latest, _writable(scored_tokens, np.int64)))
            case ReleaseBlocks(group, blocks):
                self._forward.release(group, blocks)
            case _:
                assert_never(message)

    def _inputs(self, step: "ReceivedStep", latest: int, scored_tokens: np.ndarray) -> Inputs:
        chosen = None
        if latest:
            chosen = self._ranks.broadcast(
                torch.empty(latest, dtype=torch.int64, device=self._forward.device)
            )
        inputs = self._stage(step, self._tables, chosen)
        return msgspec.structs.replace(inputs, scored_tokens=scored_tokens)


class ReceivedStep:
    """`PreparedStep` over the words of an arena, int32; see `cext/inputbatch.pyx` for its header."""

    def __init__(self, arena: np.ndarray) -> None:
        self.arena = arena
        header = arena[:16].tolist()
        self.tokens, self.rows, self.decodes, self.samples, _, self._writes, self._groups = header[:7]
        self.offsets = Offsets(*header[7:])
        at = self.offsets
        self.input_ids = arena[at.input_ids :][: self.tokens]
        self.slot_mapping = list(
            arena[at.slot_mapping :][: self._groups * self.tokens].reshape(self._groups, -1)
        )
        self.query_starts = arena[at.query_starts :][: self.rows + 1]
        self.sequence_lengths = arena[at.sequence_lengths :][: self.rows]
        self.slots = arena[at.slots :][: self.rows]
        self.sample_tokens = arena[at.sample_tokens :][: self.samples]

    def block_writes(self) -> list[tuple[int, int, int, np.ndarray]]:
        """Return the changes of the block tables: group, slot, column, and the block ids from there on."""
        changes, at = [], self.offsets.block_writes
        for _ in range(self._writes):
            group, slot, column, count = self.arena[at : at + 4].tolist()
            changes.append((group, slot, column, self.arena[at + 4 : at + 4 + count]))
            at += 4 + count
        return changes


class ReceivedTables:
    """`BlockTables` that follow those of rank 0's batch, with the changes of each step."""

    def __init__(self, groups: int, slots: int, columns: int) -> None:
        self.slots = slots
        self._tables = np.zeros((groups, slots, columns), np.int32)

    def apply(self, step: ReceivedStep) -> None:
        """Apply a step's changes."""
        for group, slot, column, blocks in step.block_writes():
            self._tables[group, slot, column : column + len(blocks)] = blocks

    def block_table(self, group: int) -> np.ndarray:
        """Return a KV cache group's table, [slots, columns]."""
        table: np.ndarray = self._tables[group]
        return table


def _writable(data: bytes, dtype: type[np.generic]) -> np.ndarray:
    return np.frombuffer(bytearray(data), dtype)
