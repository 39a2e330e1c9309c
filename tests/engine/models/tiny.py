"""Tiny random models saved by transformers, and a driver that runs their steps without an engine."""

from collections.abc import Sequence as ReadOnlySequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch
import transformers

from fairlead._cext.inputbatch import InputBatch, SequenceState
from fairlead.base.job import Sampling, TokenLogprob
from fairlead.base.messages import WorkerSpec
from fairlead.engine.loading import LoadedModel, load_runner
from fairlead.engine.sampling.parameters import TABLE
from fairlead.engine.step import SampledTokens
from fairlead.language.checkpoint.architecture import read_architecture
from fairlead.language.checkpoint.config import CheckpointConfig

VOCABULARY = 320
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,  # not hidden / heads
    "max_position_embeddings": 512,
    "initializer_range": 0.2,  # with less, every text repeats a single token
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
SHAPE = read_architecture(CheckpointConfig(Path("config.json"), SIZES))


def save(
    config: transformers.PretrainedConfig, directory: Path, *, seed: int = 0, **options
) -> torch.nn.Module:
    """Save a random float32 model of `config`, with random norms and biases, and return it."""
    # Without strong norms, Gemma's embedding, which is scaled up and tied, would outweigh all layers.
    perturbation = 4.0 if config.model_type.startswith("gemma") else 0.3
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith(".bias"):
                parameter.add_(torch.randn_like(parameter) * perturbation)
    model.save_pretrained(directory, safe_serialization=True, **options)
    return model


def load(directory: Path, *, compiled: bool = True, **options) -> LoadedModel:
    """Load a model as a worker does, by default in float32 on the CPU."""
    spec = WorkerSpec(path=str(directory), **{"device": "cpu", "dtype": "float32", **options})
    return load_runner(spec, lambda _fraction, _stage: None, compiled=compiled)


class Kept:
    """A forward that also keeps a copy of all its logits, in float32 on the CPU."""

    def __init__(self, forward):
        self.forward = forward
        self.logits = []

    def __getattr__(self, name):
        return getattr(self.forward, name)

    def __call__(self, inputs):
        found = self.forward(inputs)
        self.logits.append(found.float().cpu().clone())
        return found


class SampledToken(NamedTuple):
    """The token, or the error, that one step gave one sequence."""

    token_id: int
    logprob: TokenLogprob | None = None
    error: str | None = None


class DriverSequence:
    """One sequence of a driver: its picks so far, and its blocks by KV cache group."""

    def __init__(self, state: SequenceState) -> None:
        self.state = state
        self.slot = -1
        self.blocks: tuple[list[int], ...] = ()
        self.sampled: list[SampledToken] = []

    @property
    def output(self) -> list[int]:
        return list(self.state.token_ids(self.state.prompt_length))


class Driver:
    """Allocates blocks, schedules decodes before prefills within a token budget, and commits the picks.

    Blocks come alternately from both ends of the free list, so that those of a sequence are not adjacent.
    They are reused only after `release` or once outside a window. With `ahead`, a step is launched before
    the previous one is awaited.
    """

    SLOTS = 40

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        max_batched_tokens: int = 24,
        ahead: bool = False,
        vocab_size: int | None = None,
    ) -> None:
        self.loaded = loaded
        self.max_batched_tokens = max_batched_tokens
        self.ahead = ahead
        self.batch = InputBatch(
            slots=self.SLOTS,
            max_batched_tokens=max_batched_tokens,
            max_model_len=loaded.max_model_len + 1,  # the last token may be chosen, if not computed
            block_size=loaded.block_size,
            vocab_size=vocab_size or loaded.vocab_size,
            windows=loaded.windows,
            arenas=loaded.runner.arenas,
        )
        self.free = [list(range(blocks)) for blocks in loaded.blocks_total]
        self.sequences: list[DriverSequence] = []
        self._free_slots = list(range(self.SLOTS))
        self._running: dict[int, DriverSequence] = {}
        self._under_way: list[tuple] = []

    def add(
        self,
        prompt: ReadOnlySequence[int],
        sampling: Sampling,
        *,
        seed: int = 0,
        shared: tuple[list[int], ...] | None = None,
    ) -> DriverSequence:
        """Start a sequence; the blocks in `shared` already hold the beginning of its prompt."""
        sequence = DriverSequence(state_of(prompt, sampling, key=len(self.sequences), seed=seed))
        if shared is not None:
            sequence.state.rewind(len(shared[0]) * self.loaded.block_size)
        self.sequences.append(sequence)
        self.admit(sequence, shared)
        return sequence

    def admit(self, sequence: DriverSequence, blocks: tuple[list[int], ...] | None = None) -> None:
        sequence.slot = self._free_slots.pop()
        self._running[sequence.slot] = sequence
        self.batch.add_request(sequence.slot, sequence.state, blocks or tuple([] for _ in self.free))

    def step(self) -> SampledTokens | None:
        """Launch a step if there is work; commit the oldest one if it is due, and return its picks."""
        launched = self._launch()
        if self._under_way and (not self.ahead or len(self._under_way) == 2 or not launched):
            return self._commit()
        return None

    def run(self) -> None:
        while self._running:
            self.step()

    def release(self, sequence: DriverSequence) -> None:
        """Free the blocks of a sequence, to be reused first; preempt it if it is running."""
        if sequence.slot >= 0:
            self._remove(sequence)
            sequence.state.rewind(0)
        for free, blocks in zip(self.free, sequence.blocks, strict=True):
            free[:0] = [block for block in blocks if block >= 0]
        sequence.blocks = tuple([] for _ in self.free)

    def _launch(self) -> bool:
        budget = self.max_batched_tokens
        survey = self.batch.survey(min(self.SLOTS, budget))
        for slot in survey.short:
            self._grow(slot, self._running[slot].state.computed + 1)
        budget -= survey.decodes
        for slot in survey.prefills:
            state = self._running[slot].state
            count = min(state.num_tokens - state.computed, budget)
            self._grow(slot, state.computed + count)
            self.batch.num_scheduled[slot] = count
            budget -= count
        step = self.batch.prepare_inputs()
        if step is None:
            return False
        sequences = [self._running[slot] for slot in step.sample_slots]
        self._under_way.append((step, sequences, self.loaded.runner.launch(step, self.batch)))
        return True

    def _commit(self) -> SampledTokens:
        step, sequences, pending = self._under_way.pop(0)
        sampled = pending.wait()
        committed = self.batch.commit_tokens(step, sampled.token_ids)
        for index, sequence in enumerate(sequences):
            if sequence.slot >= 0:
                token_id = int(np.asarray(sampled.token_ids)[index])
                sequence.sampled.append(
                    SampledToken(token_id, sampled.logprobs.get(index), sampled.errors.get(index))
                )
        for slot in {*(slot for slot, *_ in committed.finished), *(slot for slot, _ in committed.failed)}:
            self._remove(self._running[slot])
        for slot in self._running:
            for group, free in enumerate(self.free):
                free.extend(self.batch.slide(slot, group))
        return sampled

    def _remove(self, sequence: DriverSequence) -> None:
        sequence.blocks = self.batch.block_ids(sequence.slot)
        self.batch.remove_request(sequence.slot)
        del self._running[sequence.slot]
        self._free_slots.append(sequence.slot)
        sequence.slot = -1

    def _grow(self, slot: int, tokens: int) -> None:
        required = -(-tokens // self.loaded.block_size)
        self.batch.append_block_ids(
            slot,
            tuple(
                [free.pop(0 if len(free) % 2 else -1) for _ in range(required - count)]
                for free, count in zip(self.free, self.batch.block_counts(slot), strict=True)
            ),
        )


def state_of(
    prompt: ReadOnlySequence[int],
    sampling: Sampling,
    *,
    key: int = 0,
    seed: int = 0,
    replaced_by: Sampling | None = None,
) -> SequenceState:
    """Return a request's state as the engine makes it; the runner reads `replaced_by` instead, if given."""
    encoded = TABLE.encode(msgspec.structs.replace(replaced_by or sampling, seed=seed))
    return SequenceState(
        key,
        list(prompt),
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        ignore_eos=sampling.ignore_eos,
        stop_token_ids=sampling.stop_token_ids,
        processes_logits=encoded.processes_logits,
        sampling=encoded,
    )


def generate(
    loaded: LoadedModel,
    prompts: ReadOnlySequence[ReadOnlySequence[int]],
    sampling: Sampling | ReadOnlySequence[Sampling],
    *,
    seeds: ReadOnlySequence[int] | None = None,
    max_batched_tokens: int = 24,
    ahead: bool = False,
) -> list[list[int]]:
    """Run all prompts together; return the output of each."""
    driver = Driver(loaded, max_batched_tokens=max_batched_tokens, ahead=ahead)
    samplings = [sampling] * len(prompts) if isinstance(sampling, Sampling) else sampling
    sequences = [
        driver.add(prompt, one, seed=seed)
        for prompt, one, seed in zip(prompts, samplings, seeds or [0] * len(prompts), strict=True)
    ]
    driver.run()
    return [sequence.output for sequence in sequences]


def prompt_of(length: int, *, seed: int = 0) -> list[int]:
    """Return random token ids, always the same for a given length and seed."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()
