"""A row that samples several times computes what as many steps would, bit for bit, on every backend."""

from array import array

import numpy as np
import pytest
import torch
import transformers

from engine.interpreted import interpreted, note_launches
from engine.models.tiny import SIZES, save
from fairlead._cext.cpustep import variants
from fairlead._cext.inputbatch import InputBatch, SequenceState
from fairlead.engine.backend import staging
from fairlead.engine.cache import KVCache
from fairlead.engine.cpu_step import CpuStep
from fairlead.engine.forward import TorchForward
from fairlead.engine.models.loader import load_model, read_source
from fairlead.engine.models.quantization.none import UnquantizedLinear

CPU = torch.device("cpu")
BLOCK_SIZE, TOKENS, SLOTS, BLOCKS = 16, 16, 1, 8
SMALL = {**SIZES, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
FAMILIES = {
    "llama": transformers.LlamaConfig(**SMALL),
    "gemma3": transformers.Gemma3TextConfig(
        **SMALL, sliding_window=9, layer_types=["sliding_attention", "full_attention"]
    ),
}


@pytest.fixture(scope="module", params=FAMILIES)
def directory(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    save(FAMILIES[request.param], path)
    return path


def kernel(variant, dtype, quantization):
    def make(directory):
        source = read_source(directory, device=CPU, dtype=dtype, quantization=quantization, needs_head=False)
        with source.weights(CPU, lambda _: None) as weights:
            step = CpuStep.load(
                source.spec,
                weights,
                threads=2,
                max_batched_tokens=TOKENS,
                variant=variant,
                quantization=quantization,
            )
        step.allocate_cache([BLOCKS] * len(step.shape.groups))
        return step

    return make


def in_torch(directory):
    return TorchForward(*network(directory), exact=True)


def in_triton(directory):
    from fairlead.engine.device_forward import DeviceForward

    forward = DeviceForward(*network(directory))
    forward.prepare(slots=SLOTS, max_batch=SLOTS, max_batched_tokens=TOKENS, max_model_len=256, most_drafts=4)
    return forward


def network(directory):
    model = load_model(directory, device=CPU, dtype="float32").model
    blocks = (BLOCKS,) * len(model.shape.groups)
    return model, KVCache(model.shape, blocks=blocks, block_size=BLOCK_SIZE, dtype=torch.float32, device=CPU)


KERNELS = {
    f"{variant} {dtype} {quantization}": kernel(variant, dtype, quantization)
    for dtype in ("float32", "bfloat16")
    for variant in variants(dtype)
    for quantization in (None, "int8")
}


class Steps:
    """One sequence in a batch over a backend."""

    def __init__(self, forward):
        self.forward, self.stage = forward, staging(forward)
        shape = forward.shape if isinstance(forward, CpuStep) else forward.model.shape
        groups = shape.groups
        self.batch = InputBatch(
            slots=SLOTS,
            max_batched_tokens=TOKENS,
            max_model_len=200,
            block_size=BLOCK_SIZE,
            vocab_size=forward.vocab_size,
            windows=groups,
            most_drafts=4,
            one_sample_a_row=not forward.samples_several,
        )
        prompt = np.random.default_rng(1).integers(0, forward.vocab_size, 14).tolist()
        self.batch.add_request(0, SequenceState(0, prompt, max_tokens=60), (list(range(6)),) * len(groups))
        self.step([7])

    def step(self, tokens, drafts=()):
        """Compute a step; return its logits. `tokens` are taken as what was sampled."""
        self.batch.survey(1)
        state = self.batch.state(0)
        self.batch.num_scheduled[0] = state.num_tokens - state.computed
        self.batch.num_drafts[0] = len(drafts)
        for index, draft in enumerate(drafts):
            self.batch.drafts[0, index] = draft
        step = self.batch.prepare_inputs()
        with torch.inference_mode():
            logits = np.array(torch.as_tensor(self.forward(self.stage(step, self.batch, None))).numpy())
        self.committed = self.batch.commit_tokens(
            step, array("i", [*tokens, *[5] * step.samples][: step.samples])
        )
        return logits


def check(make, directory):
    """Compare three steps with one of three samples, and what follows after drafts that were wrong."""
    single, several = (Steps(make(directory)) for _ in range(2))
    one_by_one = np.concatenate([single.step([token]) for token in (11, 12, 13)])
    at_once = several.step([11, 12, 13], drafts=[11, 12])
    assert at_once.shape[0] == 3
    assert np.array_equal(one_by_one, at_once)
    assert several.batch.state(0).token_ids() == single.batch.state(0).token_ids()
    wrong = several.step([14, 9], drafts=[3, 4, 5])
    assert np.array_equal(single.step([14]), wrong[:1])
    assert several.committed.rewound.tolist() == [0]
    assert np.array_equal(single.step([15]), several.step([15]))


@pytest.mark.parametrize("name", KERNELS)
def test_cpu_kernel_samples_several_positions_of_a_row(name, directory):
    check(KERNELS[name], directory)


def test_torch_samples_several_positions_of_a_row(directory):
    check(in_torch, directory)


@interpreted
def test_device_kernels_sample_several_positions_of_a_row(tmp_path, monkeypatch):
    save(FAMILIES["gemma3"], tmp_path)
    note_launches(monkeypatch)
    multiply = UnquantizedLinear.__call__

    def multiply_many(linear, x):
        return multiply(linear, torch.nn.functional.pad(x, (0, 0, 0, 32)))[: len(x)]

    # torch's products round otherwise for few rows; these are not what is tested.
    monkeypatch.setattr(UnquantizedLinear, "__call__", multiply_many)
    check(in_triton, tmp_path)
