"""The device memory that receives every step, always at the same addresses, so that CUDA graphs can read it.

A step is one copy of its arena, from pinned memory; `unpack` copies its parts to buffers of their own and
applies its changes of the block tables. Never waits for the device. Steps must be copied and unpacked in
their order, each once, because the tables here accumulate the changes of all steps.
"""

import numpy as np
import torch
from torch import Tensor

from fairlead.engine import device_kernels as kernels
from fairlead.engine.inputs import BlockTables, Inputs, PreparedStep
from fairlead.engine.paged_attention import Rows

_TILE = 256
_WRITERS = 16


class DeviceInputs:
    """Device buffers for steps of up to `tokens` tokens in `rows` rows, with arenas of up to `words` int32.

    `slots` and `columns` are the size of the block tables of each of `groups` KV cache groups.
    """

    def __init__(
        self,
        *,
        words: int,
        tokens: int,
        rows: int,
        slots: int,
        columns: int,
        groups: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        def zeros(*size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        self.vocab_size = vocab_size
        self._arena = zeros(words)
        self._latest = torch.zeros(max(rows, slots), dtype=torch.int64, device=device)
        self._token_ids = zeros(tokens)
        self._positions = zeros(tokens)
        self._cache_slots = zeros(groups, tokens)
        self._starts = zeros(rows + 1)
        self._lengths = zeros(rows)
        self._table_rows = zeros(rows)
        self._tables = zeros(groups, slots, columns)

    def holds(self, step: PreparedStep, batch: BlockTables) -> bool:
        """Return whether this step of this batch fits."""
        groups, slots, columns = self._tables.shape
        table_rows, table_columns = np.asarray(batch.block_table(0)).shape
        return (
            len(step.slot_mapping) == groups
            and table_rows <= slots
            and table_columns <= columns
            and len(np.asarray(step.arena)) <= len(self._arena)
            and step.tokens <= len(self._token_ids)
            and step.rows <= len(self._lengths)
        )

    def stage(self, step: PreparedStep, batch: BlockTables, latest: Tensor | None) -> Inputs:
        """Start the copy of a step. `latest` [S], int64: what the previous step chose, if there was one.

        The result's device tensors are valid once the step has been unpacked.
        """
        words = torch.from_numpy(np.asarray(step.arena))
        self._arena[: len(words)].copy_(words, non_blocking=True)
        if latest is not None and len(latest):
            self._latest[: len(latest)].copy_(latest)
        return Inputs(
            token_ids=self._token_ids[: step.tokens],
            positions=self._positions[: step.tokens],
            slot_mapping=tuple(slots[: step.tokens] for slots in self._cache_slots),
            query_starts=np.asarray(step.query_starts),
            sequence_lengths=np.asarray(step.sequence_lengths),
            slots=np.asarray(step.slots),
            sample_tokens=np.asarray(step.sample_tokens),
            tables=tuple(np.asarray(batch.block_table(group)) for group in range(len(self._tables))),
            decodes=step.decodes,
        )

    def unpack(self, tokens: int, rows: int, decodes: int) -> Rows:
        """Unpack the copied step into `tokens` tokens in `rows` rows, which may be more than it has.

        The launch depends on these numbers only, so that a graph can record it.
        """
        groups, slots, columns = self._tables.shape
        programs = _WRITERS + -(-max(tokens, rows + 1) // _TILE)
        kernels.unpack[(programs,)](
            self._arena,
            self._latest,
            self._token_ids,
            self._positions,
            self._cache_slots,
            self._cache_slots.stride(0),
            self._starts,
            self._lengths,
            self._table_rows,
            self._tables,
            slots,
            columns,
            tokens,
            rows,
            self.vocab_size,
            GROUPS=groups,
            TILE=_TILE,
            WRITERS=_WRITERS,
            num_warps=4,
            enable_fp_fusion=True,
        )
        return Rows(
            token_ids=self._token_ids[:tokens],
            positions=self._positions[:tokens],
            cache_slots=tuple(slots[:tokens] for slots in self._cache_slots),
            starts=self._starts[: rows + 1],
            lengths=self._lengths[:rows],
            table_rows=self._table_rows[:rows],
            tables=tuple(self._tables),
            decodes=decodes,
        )
