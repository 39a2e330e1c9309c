"""Measure what each format of weights costs in accuracy and saves in memory, beside bfloat16, on this CPU.

    python bench/formats.py [MODEL] [--texts 32] [--tokens 256] [--json bench/results/formats.json]

The loss is the mean Kullback–Leibler divergence of the next token's distribution from bfloat16's, in nats,
and the share of tokens at which the most probable token is another one. The texts are the model's own, drawn
at temperature 1 in bfloat16 after a first token, so that no data set is needed. MODEL is a folder; without
it, the demonstration model is measured. It is small: larger models lose less. Of a GGUF's types, those are
measured to which the library `gguf` rounds; embedding and head are rounded too.
"""

import argparse
import os
import platform
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import torch

import fairlead
from fairlead._cext.cpustep import formats
from fairlead.engine.cpu_step import BLOCK_SIZE, CpuStep, make_model, stored_tensors
from fairlead.engine.inputs import Inputs
from fairlead.engine.models.checkpoint_tensors import CheckpointTensors, tied_as_stored
from fairlead.engine.models.loader import read_source
from fairlead.engine.models.numbers import widen
from fairlead.language.checkpoint.architecture import ArchitectureSpec

CPU = torch.device("cpu")
MATRICES = ("query", "key", "value", "output", "gate", "up", "down")
TYPES = ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "mxfp4")
"""The types of a GGUF to which the library rounds."""
DEMONSTRATION = Path(fairlead.__file__).parent / "server" / "demo" / "fairlead-demo"


class Model:
    """A model in one format, with room for one text of `length` tokens."""

    def __init__(self, directory: Path, form: str, length: int, threads: int) -> None:
        source = read_source(directory, device=CPU, dtype="bfloat16")
        assert source.spec is not None
        with source.weights(CPU, lambda _: None) as weights:
            if form in TYPES:
                self.step = load_rounded(source.spec, weights, form, threads, length)
            else:
                self.step = CpuStep.load(
                    source.spec, weights, threads=threads, max_batched_tokens=length, quantization=form
                )
        blocks = -(-length // BLOCK_SIZE)
        self.step.allocate_cache([blocks] * len(self.step.shape.groups))
        self.table = np.arange(blocks, dtype=np.int32)[None]

    def logits(self, token_ids: list[int], start: int = 0) -> torch.Tensor:
        """Compute the tokens from `start` on, and return the logits after each of them, [T, V]."""
        positions = np.arange(start, len(token_ids), dtype=np.int32)
        count, groups = len(positions), len(self.step.shape.groups)
        inputs = Inputs(
            token_ids=np.array(token_ids[start:], np.int32),
            positions=positions,
            slot_mapping=(positions,) * groups,
            query_starts=np.arange(count + 1, dtype=np.int32),
            sequence_lengths=positions + 1,
            slots=np.zeros(count, dtype=np.int32),
            sample_tokens=np.arange(count, dtype=np.int32),
            tables=(self.table,) * groups,
            decodes=count,
        )
        return torch.from_numpy(self.step(inputs).copy())

    def write(self, length: int, seed: int) -> list[int]:
        """Draw a text at temperature 1."""
        generator = torch.Generator().manual_seed(seed)
        token_ids = [seed % self.step.vocab_size]
        while len(token_ids) < length:
            shares = self.logits(token_ids, len(token_ids) - 1)[-1].softmax(-1)
            token_ids.append(int(torch.multinomial(shares, 1, generator=generator)))
        return token_ids


def load_rounded(
    spec: ArchitectureSpec, tensors: CheckpointTensors, form: str, threads: int, length: int
) -> CpuStep:
    """Load a model with its matrices rounded to a type of a GGUF."""
    tensors.rename(spec.names.renamed)
    spec = tied_as_stored(spec, tensors)
    matrices: list[tuple[int | None, str]] = [(None, "embedding")]
    if not spec.tied:
        matrices.append((None, "head"))
    matrices += [(layer, name) for layer in range(spec.layers) for name in MATRICES]
    stored = dict.fromkeys(matrices, form)
    model = make_model(spec, "bfloat16", threads=threads, max_batched_tokens=length, stored=stored)
    for layer, name, parts in stored_tensors(model, spec.names):
        first = 0
        sizes = [model.rows(part) for part in parts]
        rows = np.concatenate(list(tensors.pieces(name, sum(size[0] for size in sizes), *sizes[0][1:])))
        for part, size in zip(parts, sizes, strict=True):
            values = widen(rows[first : first + size[0]])
            first += size[0]
            if values.ndim == 1:
                values = values + np.float32(spec.norm_offset and part.endswith("norm"))
            else:
                values = gguf.quants.quantize(values, gguf.GGMLQuantizationType[form.upper()])
            model.pack(part, values, layer=layer)
    return CpuStep(model, spec)


def loss(exact: torch.Tensor, narrow: torch.Tensor) -> dict[str, float]:
    """Compare logits [T, V] with those of bfloat16."""
    expected, found = exact.double().log_softmax(-1), narrow.double().log_softmax(-1)
    divergence = (expected.exp() * (expected - found)).sum(-1)
    return {
        "divergence": round(float(divergence.mean()), 5),
        "divergence_p99": round(float(divergence.quantile(0.99)), 4),
        "other_best_token": round(float((exact.argmax(-1) != narrow.argmax(-1)).float().mean()), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, nargs="?", default=DEMONSTRATION, help="folder of the model")
    parser.add_argument("--texts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=256, help="length of a text")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, help="write the result to this file")
    options = parser.parse_args()
    names = (*formats("bfloat16"), *TYPES)
    models = {name: Model(options.model, name, options.tokens, options.threads) for name in names}
    exact = models[names[0]]
    texts = [exact.write(options.tokens, seed) for seed in range(options.texts)]
    expected = torch.cat([exact.logits(text) for text in texts])
    results: dict[str, Any] = {}
    for name, model in models.items():
        found = torch.cat([model.logits(text) for text in texts])
        results[name] = {"weight_bytes": model.step.model.weight_bytes, **loss(expected, found)}
        print(name, *(f"{key} {value}" for key, value in results[name].items()), sep="  ", flush=True)
    if options.json:
        document = {
            "machine": platform.processor() or platform.machine(),
            "kernel": exact.step.kernel,
            "model": options.model.name,
            "tokens": len(expected),
            "formats": results,
        }
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")


if __name__ == "__main__":
    main()
