"""The GPU's whole step, with interpreted kernels and fake CUDA graphs, compared with torch."""

import copy
import threading

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.interpreted import Noted, interpreted
from engine.models.rank_threads import on_ranks
from engine.models.tiny import SIZES, Driver, Kept, prompt_of, save
from fairlead.base.job import Sampling
from fairlead.engine import torch_loading
from fairlead.engine.cache import KVCache
from fairlead.engine.device_forward import DeviceForward
from fairlead.engine.forward import TorchForward
from fairlead.engine.loading import LoadedModel
from fairlead.engine.models.loader import load_model
from fairlead.engine.runner import ModelRunner

pytestmark = interpreted
CPU = torch.device("cpu")
SLOTS, TOKENS = Driver.SLOTS, 16
SMALL = {**SIZES, "num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 1}
GREEDY = Sampling(max_tokens=3, temperature=0)

FAMILIES = {
    "llama": transformers.LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True),
    "mistral": transformers.MistralConfig(**SMALL, sliding_window=11),
    "qwen3": transformers.Qwen3Config(**SMALL),
    "gemma3": transformers.Gemma3TextConfig(
        **SMALL,
        sliding_window=9,
        layer_types=["sliding_attention", "full_attention"],
        final_logit_softcapping=12.0,
        attn_logit_softcapping=3.0,
    ),
    "mixtral": transformers.MixtralConfig(**SMALL, num_local_experts=4),
    "fallback": transformers.GraniteConfig(**{**SMALL, "head_dim": 16}),
}


class Recorder:
    """A fake of CUDA graphs: a replay runs the work again and asserts that it equals what was recorded.

    A graph records addresses and numbers, not variables. So a replay must launch the same kernels and
    operators with the same numbers, on the same memory, except for memory that the work allocates itself.
    """

    def __init__(self, launches):
        self._launches = launches
        self.replays = 0

    def __call__(self, work):
        recorded = self._trace(work)

        def replay():
            self.replays += 1
            assert recorded == self._trace(work)

        return replay

    def _trace(self, work):
        seen = len(self._launches)
        with _Operators() as operators:
            work()
        trace = operators.trace
        for name, grid, arguments, options in self._launches[seen:]:
            trace.append((name, grid, [operators.traced(one) for one in arguments], sorted(options.items())))
        return trace


class _Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.trace = []
        self._made = set()
        self._kept = []  # so that no address is reused

    def traced(self, value):
        if not isinstance(value, torch.Tensor):
            return value
        storage = value.untyped_storage().data_ptr()
        return "scratch" if storage in self._made else (value.data_ptr(), value.shape, value.stride())

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        given = tree_leaves((args, kwargs or {}))
        self.trace.append((str(operator), [self.traced(one) for one in given]))
        before = {one.untyped_storage().data_ptr() for one in given if isinstance(one, torch.Tensor)}
        result = operator(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if isinstance(one, torch.Tensor):
                self._kept.append(one)
                if (pointer := one.untyped_storage().data_ptr()) not in before:
                    self._made.add(pointer)
        return result


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    made = {}

    def model(name):
        if name not in made:
            directory = tmp_path_factory.mktemp(name)
            save(FAMILIES[name], directory)
            made[name] = load_model(directory, device=CPU, dtype="float32").model
        return made[name]

    return model


def loaded_of(model, make, *, blocks=60):
    """Return a `LoadedModel` of `model`, with `make(model, cache)` as its forward."""
    shape = model.shape
    cache = KVCache(
        shape, blocks=(blocks,) * len(shape.groups), block_size=16, dtype=torch.float32, device=CPU
    )
    forward = make(model, cache)
    if isinstance(forward, DeviceForward):
        forward.prepare(slots=SLOTS, max_batch=2, max_batched_tokens=TOKENS, max_model_len=512)
    return LoadedModel(
        runner=ModelRunner(forward, ()),
        slots=SLOTS,
        max_batch=2,
        max_batched_tokens=TOKENS,
        max_model_len=512,
        max_input_tokens=512,
        max_output_tokens=512,
        vocab_size=shape.vocab_size,
        windows=shape.groups,
        blocks_total=cache.blocks,
        block_size=16,
        eos_token_ids=(),
        device="cpu",
        dtype="float32",
        weight_bytes=0,
        kv_cache_bytes=cache.nbytes,
        kernel=forward.kernel,
    )


def texts_of(loaded, *, ahead=False, samplings=(GREEDY,), lengths=(3, 20)):
    driver = Driver(loaded, max_batched_tokens=TOKENS, ahead=ahead)
    for row, length in enumerate(lengths):
        driver.add(prompt_of(length), samplings[row % len(samplings)], seed=row)
    driver.run()
    return [text.output for text in driver.sequences]


@pytest.mark.parametrize("name", FAMILIES)
def test_texts_and_logits_match_torch(models, launches, name):
    model, recorder = models(name), Recorder(launches)
    texts, logits = [], []
    for make in (TorchForward, lambda *one: DeviceForward(*one, recorder)):
        loaded = loaded_of(model, make)
        loaded.runner.forward = kept = Kept(loaded.runner.forward)
        texts.append(texts_of(loaded))
        logits.append(kept.logits)
    assert texts[0] == texts[1]
    for eager, replayed in zip(*logits, strict=True):
        torch.testing.assert_close(replayed, eager, rtol=1e-4, atol=1e-4)
    is_dense = name not in {"mixtral", "fallback"}
    assert is_dense == (recorder.replays > 0)
    assert ("triton with CUDA graphs" if is_dense else "triton") == loaded.kernel
    assert is_dense == any(name == "rotate_and_store" for name, *_ in launches)


def test_prompt_logits_match_torch(models, launches):
    with_prompt_logprobs = Sampling(max_tokens=1, temperature=0, prompt_logprobs=2)
    logits = []
    for make in (TorchForward, lambda *one: DeviceForward(*one, Recorder(launches))):
        loaded = loaded_of(models("llama"), make)
        loaded.runner.forward = kept = Kept(loaded.runner.forward)
        texts_of(loaded, samplings=[with_prompt_logprobs, GREEDY], lengths=(18, 2))
        logits.append(kept.logits)
    # Of the 18 prompt tokens all but the last are followed by another. The outputs have 1 and 3 tokens.
    assert sum(map(len, logits[1])) == 17 + 1 + 3
    for eager, replayed in zip(*logits, strict=True):
        torch.testing.assert_close(replayed, eager, rtol=1e-4, atol=1e-4)


def test_step_launched_ahead_uses_the_tokens_that_the_previous_one_chose(models, launches):
    loaded = loaded_of(models("llama"), lambda *one: DeviceForward(*one, Recorder(launches)))
    samplings = [GREEDY, Sampling(max_tokens=3, temperature=0, repetition_penalty=1.5)]
    expected = texts_of(loaded_of(models("llama"), TorchForward), samplings=samplings)
    assert expected == texts_of(loaded, ahead=True, samplings=samplings)


def _on_device(model, cache, *, exact):
    assert not exact
    return DeviceForward(model, cache)


@pytest.mark.parametrize("name", ["llama", pytest.param("gemma3", marks=pytest.mark.nightly)])
def test_texts_of_two_ranks_match_those_of_one(tmp_path, launches, monkeypatch, name):
    config = copy.deepcopy(FAMILIES[name])
    config.num_attention_heads, config.num_key_value_heads = 4, 2
    save(config, tmp_path)
    expected = texts_of(loaded_of(load_model(tmp_path, device=CPU, dtype="float32").model, TorchForward))
    one_at_a_time, launch = threading.Lock(), Noted._launch  # the interpreter has global variables

    def launch_alone(*arguments, **options):
        with one_at_a_time:
            launch(*arguments, **options)

    monkeypatch.setattr(Noted, "_launch", launch_alone)
    monkeypatch.setattr(torch_loading, "TorchForward", _on_device)
    sizes = {"max_batch": 2, "max_batched_tokens": TOKENS, "kv_cache_bytes": 1 << 20}
    with on_ranks(tmp_path, **sizes) as ranks:
        assert ranks.loaded[0].kernel == "triton × 2"
        assert expected == texts_of(ranks.loaded[0], ahead=True)
    assert launches


def test_recorder_rejects_work_that_depends_on_the_step(launches):
    size, memory = [3], torch.zeros(8)

    def work():
        memory[: size[0]].add_(1)

    replay = Recorder(launches)(work)
    replay()
    size[0] = 4
    with pytest.raises(AssertionError):
        replay()


def test_step_larger_than_the_prepared_limits_is_refused(models, launches):
    loaded = loaded_of(models("llama"), DeviceForward)
    driver = Driver(loaded, max_batched_tokens=10 * TOKENS)
    driver.add(prompt_of(9 * TOKENS), GREEDY)
    with pytest.raises(ValueError, match="larger than what was prepared for"):
        driver.step()
