"""Tiny random models saved by transformers, and a driver that runs plans as the engine would, without it."""

from collections.abc import Sequence as ReadOnlySequence
from pathlib import Path

import torch
import transformers

from fairlead.engine.runner import LoadedModel, load_runner
from fairlead.engine.sequence import Chunk, Plan, Sequence
from fairlead.engine.step import Pick
from fairlead.job import Sampling
from fairlead.models.config import Config
from fairlead.models.shape import read_shape
from fairlead.worker.wire import WorkerSpec

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
    "initializer_range": 0.2,  # less, and every text is one token over and over
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
SHAPE = read_shape(Config(Path("config.json"), SIZES))


def save(
    config: transformers.PretrainedConfig, directory: Path, *, seed: int = 0, **options
) -> torch.nn.Module:
    """Save a random model of `config` whose norms and biases matter, and return it, in float32."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith(".bias"):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(directory, safe_serialization=True, **options)
    return model


def load(directory: Path, **options) -> LoadedModel:
    """Load it the way a worker does, in float32 on the CPU unless told otherwise."""
    spec = WorkerSpec(path=str(directory), **{"device": "cpu", "dtype": "float32", **options})
    return load_runner(spec, lambda _fraction, _stage: None)


class Driver:
    """Gives sequences blocks, plans decodes before prefills within a token budget, and commits the picks.

    Blocks are handed out from both ends in turn, so that no sequence's are neighbours, and never reused
    unless `release` is called.
    """

    def __init__(self, loaded: LoadedModel, *, max_batched_tokens: int = 24) -> None:
        self.loaded = loaded
        self.max_batched_tokens = max_batched_tokens
        self.free = list(range(loaded.blocks_total))
        self.picks: dict[int, list[Pick]] = {}
        self._running: list[Sequence] = []

    def add(self, prompt: ReadOnlySequence[int], sampling: Sampling, *, seed: int = 0) -> Sequence:
        key = len(self.picks)
        sequence = Sequence(key, list(prompt), sampling, seed=seed)
        self.picks[key] = []
        self._running.append(sequence)
        return sequence

    def step(self) -> list[Pick | None]:
        """Run one step and append what was picked; a sequence with an error, or at its end, leaves."""
        chunks = self._plan()
        picks = self.loaded.runner.launch(Plan(tuple(chunks))).wait()
        for chunk, pick in zip(chunks, picks, strict=True):
            sequence = chunk.sequence
            sequence.computed += chunk.count
            if pick is None:
                continue
            self.picks[sequence.key].append(pick)
            if pick.error is None:
                sequence.token_ids.append(pick.token_id)
            if pick.error is not None or sequence.output_length == sequence.sampling.max_tokens:
                self._running.remove(sequence)
        return picks

    def run(self) -> None:
        while self._running:
            self.step()

    def release(self, sequence: Sequence) -> None:
        """Give its blocks back, to be the next that are handed out."""
        self.free = sequence.block_ids[0] + self.free
        sequence.block_ids = ([],)

    def _plan(self) -> list[Chunk]:
        budget = self.max_batched_tokens
        chunks = []
        for sequence in sorted(self._running, key=lambda s: len(s.token_ids) - s.computed > 1):
            left = len(sequence.token_ids) - sequence.computed
            count = min(left, budget)
            if count:
                self._grow(sequence, sequence.computed + count)
                chunks.append(Chunk(sequence, sequence.computed, count, samples=count == left))
                budget -= count
        return chunks

    def _grow(self, sequence: Sequence, tokens: int) -> None:
        blocks = sequence.block_ids[0]
        while len(blocks) * self.loaded.block_size < tokens:
            blocks.append(self.free.pop(0 if len(self.free) % 2 else -1))


def generate(
    loaded: LoadedModel,
    prompts: ReadOnlySequence[ReadOnlySequence[int]],
    sampling: Sampling | ReadOnlySequence[Sampling],
    *,
    seeds: ReadOnlySequence[int] | None = None,
    max_batched_tokens: int = 24,
) -> list[list[int]]:
    """Run all prompts together; return what each was continued with."""
    driver = Driver(loaded, max_batched_tokens=max_batched_tokens)
    samplings = [sampling] * len(prompts) if isinstance(sampling, Sampling) else sampling
    sequences = [
        driver.add(prompt, one, seed=seed)
        for prompt, one, seed in zip(prompts, samplings, seeds or [0] * len(prompts), strict=True)
    ]
    driver.run()
    return [sequence.token_ids[sequence.prompt_length :] for sequence in sequences]


def prompt_of(length: int, *, seed: int = 0) -> list[int]:
    """Random token ids, the same for the same length and seed."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()
