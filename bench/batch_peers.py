"""The persistent batch and its peers, with the sequences of the steps, as `batch.py` measures them."""

import random
import time
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from fairlead._cext.inputbatch import InputBatch, SequenceState, Step
from fairlead.engine.sampling.parameters import TABLE, BatchUpdate, SamplingColumns
from fairlead.job import Sampling
from numpy_batch import NumpyBatch, VllmBatch

BLOCK_SIZE = 16
MAX_MODEL_LEN = 4096
VOCABULARY = 32_000
CHUNK = 16


class NewSequence(NamedTuple):
    key: int
    slot: int
    prompt: list[int]
    computed: int
    block_ids: list[int]


class BatchChange(NamedTuple):
    """One step: sequences to remove and to add, blocks to append, and the sampled token of each key."""

    leaving: list[tuple[int, int]]  # (key, slot)
    joining: list[NewSequence]
    appended: list[tuple[int, int, int]]  # (key, slot, block)
    scheduled: dict[str, int]
    sampled: dict[int, int]


class Inputs(NamedTuple):
    """The inputs that a peer prepared for one sequence."""

    input_ids: list[int]
    positions: list[int]
    slot_mapping: list[int]
    length: int


class Peer(Protocol):
    label: str  # a key of the result

    def __init__(self, slots: int) -> None: ...

    def load(self, changes: Sequence[BatchChange]) -> None:
        """Create the requests and the arguments of all steps."""

    def preload(self, index: int) -> None:
        """Read all arguments of a step, so that they are in the processor's cache."""

    def step(self, index: int) -> None: ...

    def inputs(self) -> dict[int, Inputs]:
        """Return the inputs of the last step, by key."""

    def tokens(self) -> dict[int, list[int]]: ...


def make_changes(slots: int, churn: float, steps: int, seed: int) -> list[BatchChange]:
    """Return the steps. The first one fills every slot."""
    rng = random.Random(seed)
    blocks, keys = 0, 0
    lengths: dict[int, int] = {}  # tokens of each sequence in the batch, by slot
    owners: dict[int, int] = {}
    changes = []
    credit = 0.0
    for index in range(steps + 1):
        credit += slots * churn
        count = slots if index == 0 else int(credit)
        credit -= int(credit)
        slots_left = range(slots) if index == 0 else sorted(rng.sample(range(slots), count))
        leaving = [(owners[slot], slot) for slot in slots_left] if index else []
        joining, scheduled = [], {}
        for slot in slots_left:
            prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randint(32, 480))]
            computed = len(prompt) - rng.randint(1, CHUNK)
            need = -(-len(prompt) // BLOCK_SIZE)
            joining.append(NewSequence(keys, slot, prompt, computed, list(range(blocks, blocks + need))))
            owners[slot], lengths[slot] = keys, len(prompt)
            scheduled[str(keys)] = len(prompt) - computed
            blocks += need
            keys += 1
        joined = {added.slot for added in joining}
        appended = []
        for slot, key in owners.items():
            if slot not in joined:
                scheduled[str(key)] = 1
                if (lengths[slot] - 1) % BLOCK_SIZE == 0:
                    appended.append((key, slot, blocks))
                    blocks += 1
            lengths[slot] += 1
        sampled = {key: rng.randrange(VOCABULARY) for key in owners.values()}
        changes.append(BatchChange(leaving, joining, appended, scheduled, sampled))
    return changes


# The kernel ----------------------------------------------------------------------------------------


class Kernel:
    """The kernel, and the columns of the sampling parameters."""

    label = "fairlead"

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.batch = InputBatch(
            slots=slots,
            max_batched_tokens=slots * CHUNK,
            max_model_len=MAX_MODEL_LEN,
            block_size=BLOCK_SIZE,
            vocab_size=VOCABULARY,
            eos_token_ids=[VOCABULARY - 1],
        )
        self.columns, self.version = SamplingColumns(slots), 0
        self.device = memoryview(array("i", bytes(4 * slots * CHUNK * 64)))
        self.states: dict[int, SequenceState] = {}
        self.last: Step
        self.sampled: list[Any] = []  # by step, in the order of its samples

    def load(self, changes: Sequence[BatchChange]) -> None:
        self.request_ns = 0
        self.steps = [self.converted(change) for change in changes]

    def converted(self, change: BatchChange) -> Any:
        return (
            [slot for _, slot in change.leaving],
            [
                (
                    added.slot,
                    self.new_state(added),
                    (added.block_ids,),
                    len(added.prompt) - added.computed,
                )
                for added in change.joining
            ],
            [(slot, ([block],)) for _, slot, block in change.appended],
            self.sampled_by_slot(change),
        )

    def new_state(self, added: NewSequence) -> SequenceState:
        begin_ns = time.thread_time_ns()
        state = SequenceState(
            added.key,
            added.prompt,
            max_tokens=2000,
            ignore_eos=True,
            sampling=TABLE.encode(Sampling(max_tokens=2000, temperature=0.7, top_p=0.9, seed=1)),
        )
        state.rewind(added.computed)
        self.request_ns += time.thread_time_ns() - begin_ns
        self.states[added.key] = state
        return state

    def sampled_by_slot(self, change: BatchChange) -> Any:
        """Return the sampled tokens, indexed by slot."""
        by_slot = np.zeros(self.slots, dtype=np.int32)
        slots = self.owners = {**getattr(self, "owners", {})}
        for added in change.joining:
            slots[added.slot] = added.key
        for slot, key in slots.items():
            by_slot[slot] = change.sampled[key]
        return by_slot

    def preload(self, index: int) -> None:
        leaving, joining, appended, _ = self.steps[index]
        touch(leaving, self.sampled[index], *(blocks for _, (blocks,) in appended))
        for _, state, (block_ids,), _ in joining:
            touch(state.token_ids(), block_ids)

    def step(self, index: int) -> None:
        leaving, joining, appended, by_slot = self.steps[index]
        batch = self.batch
        for slot in leaving:
            batch.remove_request(slot)
        for slot, state, block_ids, _ in joining:
            batch.add_request(slot, state, block_ids)
        batch.condense()
        batch.survey(self.slots)
        for slot, block_ids in appended:
            batch.append_block_ids(slot, block_ids)
        counts = batch.num_scheduled
        for slot, _, _, count in joining:
            counts[slot] = count
        step = batch.prepare_inputs()
        assert step is not None
        changes = batch.changes(self.version)
        self.version = changes.version
        self.columns.update_state(
            BatchUpdate(changes.removed, [(slot, batch.state(slot)) for slot in changes.added])
        )
        arena = step.arena
        self.device[: len(arena)] = arena
        if index == len(self.sampled):
            self.sampled.append(by_slot[step.sample_slots])
        batch.commit_tokens(step, self.sampled[index])
        self.last = step

    def inputs(self) -> dict[int, Inputs]:
        step, found = self.last, {}
        for row, slot in enumerate(step.slots):
            span = slice(step.query_starts[row], step.query_starts[row + 1])
            found[self.batch.state(slot).key] = Inputs(
                list(step.input_ids[span]),
                list(step.positions[span]),
                list(step.slot_mapping[0][span]),
                step.sequence_lengths[row],
            )
        return found

    def tokens(self) -> dict[int, list[int]]:
        states = [self.batch.state(slot) for slot in self.batch.order()]
        return {state.key: state.token_ids().tolist() for state in states}


def touch(*given: Iterable[int]) -> None:
    """Read all values, which loads them into the processor's cache."""
    for numbers in given:
        assert sum(numbers) >= 0


# The peers -----------------------------------------------------------------------------------------


class Reference:
    """The reference in numpy."""

    label = "numpy to the letter of seed 001"
    new_batch: type[NumpyBatch] = NumpyBatch

    def __init__(self, slots: int) -> None:
        self.batch = self.new_batch(
            slots=slots,
            max_batched_tokens=slots * CHUNK,
            max_model_len=MAX_MODEL_LEN,
            block_size=BLOCK_SIZE,
            vocab_size=VOCABULARY,
        )
        self.sampled: list[Any] = []  # by step, in the order of its samples

    def load(self, changes: Sequence[BatchChange]) -> None:
        self.request_ns = 0
        self.steps = [self.converted(change) for change in changes]

    def converted(self, change: BatchChange) -> Any:
        joining = []
        for added in change.joining:
            begin_ns = time.thread_time_ns()
            joining.append(self.batch.new_request(added.key, added.prompt, added.computed, added.block_ids))
            self.request_ns += time.thread_time_ns() - begin_ns
        by_key = np.zeros(max(change.sampled) + 1, dtype=np.int32)
        by_key[list(change.sampled)] = list(change.sampled.values())
        return (
            [str(key) for key, _ in change.leaving],
            joining,
            [(str(key), ([block],)) for key, _, block in change.appended],
            change.scheduled,
            by_key,
        )

    def preload(self, index: int) -> None:
        _, joining, appended, scheduled, _ = self.steps[index]
        touch(scheduled.values(), self.sampled[index], *(blocks for _, (blocks,) in appended))
        for request in joining:
            touch(request.prompt_token_ids, *request.block_ids)

    def step(self, index: int) -> None:
        leaving, joining, appended, scheduled, by_key = self.steps[index]
        batch = self.batch
        for req_id in leaving:
            batch.remove_request(req_id)
        for request in joining:
            batch.add_request(request)
        batch.condense()
        for req_id, block_ids in appended:
            batch.append_blocks(req_id, block_ids)
        batch.prepare(scheduled)
        if index == len(self.sampled):
            self.sampled.append(by_key[[int(batch.req_ids[row]) for row in batch.samples]])
        batch.commit(self.sampled[index])

    def inputs(self) -> dict[int, Inputs]:
        batch, found = self.batch, {}
        for row, req_id in enumerate(batch.req_ids):
            span = slice(batch.query_starts[row], batch.query_starts[row + 1])
            found[int(req_id)] = Inputs(
                batch.input_ids[span].tolist(),
                batch.positions[span].tolist(),
                batch.slot_mapping[span].tolist(),
                int(batch.lengths[row]),
            )
        return found

    def tokens(self) -> dict[int, list[int]]:
        batch = self.batch
        return {
            int(req_id): batch.token_ids[row, : batch.num_tokens[row]].tolist()
            for row, req_id in enumerate(batch.req_ids)
        }


class Vllm(Reference):
    """vLLM's batch."""

    label = "vLLM's InputBatch (V1)"
    new_batch = VllmBatch
