"""A persistent batch in numpy with the columns of vLLM's, and vLLM's own batch behind the same interface.

Rows move: `condense` copies every column of a row, including its tokens, and each step copies the whole block
table to the device. Work that numpy can do for all rows in one call is done in one call.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Int32s = npt.NDArray[np.int32]


class Sampling(NamedTuple):
    temperature: float = 0.7
    top_p: float = 0.9
    top_k: int = 0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int | None = None


@dataclass
class CachedRequestState:
    req_id: str
    prompt_token_ids: list[int]
    sampling_params: Any
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int
    output_token_ids: list[int] = field(default_factory=list)
    mm_features: tuple[Any, ...] = ()
    generator: Any = None
    lora_request: Any = None

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + len(self.output_token_ids)


class BlockTable:
    """A block table on the host and on the device: int32 [slots, blocks of a row]."""

    def __init__(self, slots: int, columns: int) -> None:
        self.host = np.zeros((slots, columns), dtype=np.int32)
        self.device = np.zeros((slots, columns), dtype=np.int32)
        self.counts = np.zeros(slots, dtype=np.int32)

    def append_row(self, block_ids: list[int], row: int) -> None:
        if not block_ids:
            return
        start = self.counts[row]
        self.counts[row] += len(block_ids)
        self.host[row, start : start + len(block_ids)] = block_ids

    def add_row(self, block_ids: list[int], row: int) -> None:
        self.counts[row] = 0
        self.append_row(block_ids, row)

    def move_row(self, source: int, target: int) -> None:
        count = self.counts[source]
        self.host[target, :count] = self.host[source, :count]
        self.counts[target] = count

    def commit(self, rows: int) -> None:
        np.copyto(self.device[:rows], self.host[:rows])


class NumpyBatch:
    """The batch in numpy."""

    def __init__(
        self, *, slots: int, max_batched_tokens: int, max_model_len: int, block_size: int, vocab_size: int
    ) -> None:
        self.block_size, self.vocab_size = block_size, vocab_size
        self.requests: dict[str, Any] = {}
        self.arange = np.arange(max(slots + 1, max_batched_tokens), dtype=np.int64)
        self.input_ids = np.zeros(max_batched_tokens, dtype=np.int32)
        self.query_starts = np.zeros(slots + 1, dtype=np.int32)
        self.lengths = np.zeros(slots, dtype=np.int32)
        self.device = [np.zeros(max_batched_tokens, dtype=np.int64) for _ in range(5)]
        self.new_batch(slots, max_batched_tokens, max_model_len)

    def new_batch(self, slots: int, _max_batched_tokens: int, max_model_len: int) -> None:
        self.req_ids: list[Any] = []
        self.req_id_to_index: dict[str, int] = {}
        self.req_output_token_ids: list[Any] = []
        self.removed: list[int] = []
        self.token_ids = np.zeros((slots, max_model_len), dtype=np.int32)
        self.num_tokens = np.zeros(slots, dtype=np.int32)
        self.num_prompt_tokens = np.zeros(slots, dtype=np.int32)
        self.num_computed_tokens = np.zeros(slots, dtype=np.int32)
        self.temperature = np.empty(slots, dtype=np.float32)
        self.top_p = np.empty(slots, dtype=np.float32)
        self.top_k = np.empty(slots, dtype=np.int32)
        self.frequency_penalties = np.empty(slots, dtype=np.float32)
        self.presence_penalties = np.empty(slots, dtype=np.float32)
        self.repetition_penalties = np.empty(slots, dtype=np.float32)
        self.greedy_reqs: set[str] = set()
        self.random_reqs: set[str] = set()
        self.top_p_reqs: set[str] = set()
        self.top_k_reqs: set[str] = set()
        self.frequency_penalties_reqs: set[str] = set()
        self.presence_penalties_reqs: set[str] = set()
        self.repetition_penalties_reqs: set[str] = set()
        self.num_logprobs: dict[str, int] = {}
        self.generators: dict[int, Any] = {}
        # One table for each KV cache group; the benchmark has one group.
        self.tables = [BlockTable(slots, -(-max_model_len // self.block_size))]
        self.host_table = self.tables[0].host

    @property
    def num_reqs(self) -> int:
        return len(self.req_id_to_index)

    def new_request(self, key: int, prompt: list[int], computed: int, block_ids: list[int]) -> Any:
        return CachedRequestState(str(key), prompt, Sampling(), (list(block_ids),), computed)

    # Membership

    def add_request(self, request: Any) -> None:
        self.requests[request.req_id] = request
        self.enter(request)

    def enter(self, request: CachedRequestState) -> None:
        req_id = request.req_id
        if self.removed:
            row = self.removed.pop()
            self.req_ids[row] = req_id
            self.req_output_token_ids[row] = request.output_token_ids
        else:
            row = len(self.req_ids)
            self.req_ids.append(req_id)
            self.req_output_token_ids.append(request.output_token_ids)
        self.req_id_to_index[req_id] = row
        prompt_tokens, total = request.num_prompt_tokens, request.num_tokens
        self.num_prompt_tokens[row] = prompt_tokens
        self.token_ids[row, :prompt_tokens] = request.prompt_token_ids
        self.token_ids[row, prompt_tokens:total] = request.output_token_ids
        self.num_tokens[row] = total
        self.num_computed_tokens[row] = request.num_computed_tokens
        for table, block_ids in zip(self.tables, request.block_ids, strict=True):
            table.add_row(block_ids, row)
        self.enter_sampling(row, req_id, request.sampling_params)
        if request.generator is not None:
            self.generators[row] = request.generator

    def enter_sampling(self, row: int, req_id: str, sampling: Sampling) -> None:
        self.temperature[row] = sampling.temperature
        (self.random_reqs if sampling.temperature > 0 else self.greedy_reqs).add(req_id)
        self.top_p[row] = sampling.top_p
        if sampling.top_p < 1:
            self.top_p_reqs.add(req_id)
        self.top_k[row] = sampling.top_k
        if 0 < sampling.top_k < self.vocab_size:
            self.top_k_reqs.add(req_id)
        self.frequency_penalties[row] = sampling.frequency_penalty
        if sampling.frequency_penalty:
            self.frequency_penalties_reqs.add(req_id)
        self.presence_penalties[row] = sampling.presence_penalty
        if sampling.presence_penalty:
            self.presence_penalties_reqs.add(req_id)
        self.repetition_penalties[row] = sampling.repetition_penalty
        if sampling.repetition_penalty != 1:
            self.repetition_penalties_reqs.add(req_id)
        if sampling.logprobs is not None:
            self.num_logprobs[req_id] = sampling.logprobs

    def remove_request(self, req_id: str) -> None:
        del self.requests[req_id]
        self.leave(req_id)

    def leave(self, req_id: str) -> None:
        row = self.req_id_to_index.pop(req_id)
        self.removed.append(row)
        self.removed.sort(reverse=True)  # nearly sorted already; the lowest row is popped first
        self.req_ids[row] = None
        self.req_output_token_ids[row] = None
        self.greedy_reqs.discard(req_id)
        self.random_reqs.discard(req_id)
        self.top_p_reqs.discard(req_id)
        self.top_k_reqs.discard(req_id)
        self.frequency_penalties_reqs.discard(req_id)
        self.presence_penalties_reqs.discard(req_id)
        self.repetition_penalties_reqs.discard(req_id)
        self.num_logprobs.pop(req_id, None)
        self.generators.pop(row, None)

    def condense(self) -> None:
        if not self.removed:
            return
        empty = set(self.removed)
        last = len(self.req_ids) - 1
        while self.removed:
            while last in empty:
                last -= 1
            target = self.removed[-1]
            if target >= last:
                break
            self.removed.pop()
            empty.discard(target)
            self.move(last, target)
            last -= 1
        self.removed.clear()
        del self.req_ids[self.num_reqs :]
        del self.req_output_token_ids[self.num_reqs :]

    def move(self, source: int, target: int) -> None:
        req_id = self.req_ids[source]
        self.req_ids[target], self.req_ids[source] = req_id, None
        self.req_output_token_ids[target] = self.req_output_token_ids[source]
        self.req_id_to_index[req_id] = target
        tokens = self.num_tokens[source]
        self.token_ids[target, :tokens] = self.token_ids[source, :tokens]
        self.num_tokens[target] = tokens
        self.num_prompt_tokens[target] = self.num_prompt_tokens[source]
        self.num_computed_tokens[target] = self.num_computed_tokens[source]
        for table in self.tables:
            table.move_row(source, target)
        self.temperature[target] = self.temperature[source]
        self.top_p[target] = self.top_p[source]
        self.top_k[target] = self.top_k[source]
        self.frequency_penalties[target] = self.frequency_penalties[source]
        self.presence_penalties[target] = self.presence_penalties[source]
        self.repetition_penalties[target] = self.repetition_penalties[source]
        generator = self.generators.pop(source, None)
        if generator is not None:
            self.generators[target] = generator

    def append_blocks(self, req_id: str, block_ids: tuple[list[int], ...]) -> None:
        row = self.req_id_to_index[req_id]
        for table, held, ids in zip(self.tables, self.requests[req_id].block_ids, block_ids, strict=True):
            held.extend(ids)
            table.append_row(ids, row)

    def commit_tables(self, rows: int) -> None:
        for table in self.tables:
            table.commit(rows)

    # A step

    def prepare(self, num_scheduled: dict[str, int]) -> None:
        rows = self.num_reqs
        self.commit_tables(rows)
        counts = np.array([num_scheduled[req_id] for req_id in self.req_ids], dtype=np.int32)
        owners = np.repeat(self.arange[:rows], counts)
        ends = np.cumsum(counts)
        total = int(ends[-1])
        within = self.arange[:total] - np.repeat(ends - counts, counts)
        positions = self.num_computed_tokens[owners] + within
        self.take_tokens(positions + owners * self.token_ids.shape[1], total)
        table = self.host_table
        blocks = table.ravel()[owners * table.shape[1] + positions // self.block_size]
        slot_mapping = blocks * self.block_size + positions % self.block_size
        self.query_starts[0] = 0
        self.query_starts[1 : rows + 1] = ends
        np.add(self.num_computed_tokens[:rows], counts, out=self.lengths[:rows])
        samples = self.lengths[:rows] >= self.num_tokens[:rows]
        self.samples = np.flatnonzero(samples)
        self.counts, self.positions, self.slot_mapping, self.total = counts, positions, slot_mapping, total
        for target, source in zip(
            self.device,
            (self.input_ids[:total], positions, slot_mapping, self.query_starts, self.lengths[:rows]),
            strict=True,
        ):
            target[: len(source)] = source

    def count_computed(self) -> None:
        """Update the column, and the states of the requests, which outlive their rows."""
        computed = self.num_computed_tokens[: self.num_reqs]
        computed += self.counts
        for req_id, count in zip(self.req_ids, computed.tolist(), strict=True):
            self.requests[req_id].num_computed_tokens = count

    def take_tokens(self, indices: npt.NDArray[np.int64], total: int) -> None:
        np.take(self.token_ids.ravel(), indices, out=self.input_ids[:total], mode="clip")

    def commit(self, sampled: Int32s) -> None:
        """Append the sampled tokens: one for each row that samples."""
        self.count_computed()
        for row, token_ids in zip(self.samples.tolist(), sampled[:, None].tolist(), strict=True):
            start = self.num_tokens[row]
            end = start + len(token_ids)
            self.token_ids[row, start:end] = token_ids
            self.num_tokens[row] = end
            self.requests[self.req_ids[row]].output_token_ids.extend(token_ids)


class VllmBatch(NumpyBatch):
    """vLLM's `InputBatch` (V1)."""

    version = ""
    modules: Any = None

    def new_batch(self, slots: int, max_batched_tokens: int, max_model_len: int) -> None:
        import torch

        self.torch = torch
        self.batch = self.modules.InputBatch(
            max_num_reqs=slots,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_batched_tokens,
            device=torch.device("cpu"),
            vocab_size=self.vocab_size,
            block_sizes=[self.block_size],
            max_num_blocks_per_req=[-(-max_model_len // self.block_size)],
        )
        self.sampling = self.modules.SamplingParams(temperature=0.7, top_p=0.9)
        self.token_ids = self.batch.token_ids_cpu
        self.num_tokens = self.batch.num_tokens_no_spec
        self.num_computed_tokens = self.batch.num_computed_tokens_cpu
        self.host_table = self.batch.block_table[0].get_numpy_array()
        self.tokens_tensor = self.batch.token_ids_cpu_tensor.flatten()
        self.input_tensor = torch.from_numpy(self.input_ids)

    @property
    def num_reqs(self) -> int:
        return int(self.batch.num_reqs)

    def new_request(self, key: int, prompt: list[int], computed: int, block_ids: list[int]) -> Any:
        return self.modules.CachedRequestState(
            req_id=str(key),
            prompt_token_ids=prompt,
            mm_features=[],
            sampling_params=self.sampling,
            generator=None,
            block_ids=(list(block_ids),),
            num_computed_tokens=computed,
            output_token_ids=[],
        )

    def enter(self, request: Any) -> None:
        self.batch.add_request(request)

    def leave(self, req_id: str) -> None:
        self.batch.remove_request(req_id)

    def condense(self) -> None:
        self.batch.condense()
        self.batch.refresh_metadata()
        self.req_ids = self.batch.req_ids

    def append_blocks(self, req_id: str, block_ids: tuple[list[int], ...]) -> None:
        self.requests[req_id].block_ids[0].extend(block_ids[0])
        self.batch.block_table.append_row(block_ids, self.batch.req_id_to_index[req_id])

    def commit_tables(self, rows: int) -> None:
        self.batch.block_table.commit_block_table(rows)

    def take_tokens(self, indices: npt.NDArray[np.int64], total: int) -> None:
        self.torch.index_select(
            self.tokens_tensor, 0, self.torch.from_numpy(indices), out=self.input_tensor[:total]
        )

    def commit(self, sampled: Int32s) -> None:
        batch = self.batch
        self.count_computed()
        for row, token_ids in zip(self.samples.tolist(), sampled[:, None].tolist(), strict=True):
            start = batch.num_tokens_no_spec[row]
            end = start + len(token_ids)
            batch.token_ids_cpu[row, start:end] = token_ids
            batch.is_token_ids[row, start:end] = True
            batch.num_tokens_no_spec[row] = end
            self.requests[self.req_ids[row]].output_token_ids.extend(token_ids)
