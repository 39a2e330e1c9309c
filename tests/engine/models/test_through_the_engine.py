"""Models with sliding layers through the whole engine: outputs match each sequence alone."""

import struct

import pytest
import transformers

from engine.models.tiny import SIZES, generate, load, prompt_of, save
from fairlead.base.job import Sampling
from fairlead.engine.engine import Engine

SAMPLINGS = [
    {"temperature": 0},
    {"temperature": 1.0, "seed": 5},
    {"seed": 6, "top_p": 0.9, "presence_penalty": 0.5, "repetition_penalty": 1.1},
    {"temperature": 0, "logprobs": 1},
]
SHARED = prompt_of(80)


def requests():
    """Return 20 requests; every other one begins with part of the same text, every fourth answer is long."""
    requests_made = []
    for row in range(20):
        shared_prefix = SHARED[: 16 * (row % 6)] if row % 2 else []
        prompt = shared_prefix + prompt_of(1 + 37 * row % 110, seed=row)
        length = 5 + 11 * row % 50 if row % 4 == row // 5 else 5 + row
        requests_made.append((prompt, Sampling(max_tokens=length, **SAMPLINGS[row % 4])))
    return requests_made


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    layer_types = ["sliding_attention", "full_attention", "sliding_attention"]
    config = transformers.Gemma3TextConfig(
        **SIZES, sliding_window=30, query_pre_attn_scalar=16, layer_types=layer_types
    )
    save(config, directory)
    return directory


@pytest.fixture(scope="module", params=[True, False], ids=["compiled", "torch"])
def compiled(request):
    """Whether the compiled step is used, where it is available."""
    return request.param


@pytest.fixture(scope="module")
def with_large_cache(directory, compiled):
    return load(directory, compiled=compiled, kv_cache_bytes=4 << 20)


@pytest.fixture(scope="module")
def block_bytes(with_large_cache):
    """Bytes of a block in one layer: one of the three has full attention, the others slide."""
    full_blocks, window_blocks = with_large_cache.blocks_total
    return with_large_cache.kv_cache_bytes // (full_blocks + 2 * window_blocks)


@pytest.fixture(scope="module")
def expected(with_large_cache):
    loaded = with_large_cache
    return [
        generate(loaded, [prompt], sampling, seeds=[sampling.seed or 0])[0] for prompt, sampling in requests()
    ]


class EngineDriver:
    """An engine over a loaded model; `run_together` runs requests and returns their outputs."""

    def __init__(self, loaded, *, overlaps):
        loaded.runner.overlaps = overlaps
        self.runner, self.overlaps = loaded.runner, overlaps
        self.engine = Engine(
            loaded.runner,
            slots=loaded.slots,
            max_batch=loaded.max_batch,
            max_batched_tokens=loaded.max_batched_tokens,
            max_model_len=loaded.max_model_len,
            blocks_total=loaded.blocks_total,
            windows=loaded.windows,
            block_size=loaded.block_size,
            vocab_size=loaded.vocab_size,
            eos_token_ids=loaded.eos_token_ids,
            draw_seed=lambda: 0,
        )
        self.outputs = {}

    def run_together(self, requests_to_run, *, after_a_step=lambda _engine: None):
        first = len(self.outputs)
        for key, (prompt, sampling) in enumerate(requests_to_run, first):
            self.outputs[key] = []
            self.engine.submit(key, prompt, sampling)
        under_way = []
        for now_s in range(2000):
            if self.engine.idle and not under_way:
                return [self.outputs[key] for key in range(first, len(self.outputs))]
            step = self.engine.plan(float(now_s))
            if step is not None:
                under_way.append((step, self.runner.launch(step, self.engine.batch)))
            if under_way and (not self.overlaps or step is None or len(under_way) == 2):
                completed, pending = under_way.pop(0)
                self.collect(self.engine.commit(completed, pending.wait()))
                after_a_step(self.engine)
        raise AssertionError("no end after 2000 steps")

    def collect(self, outcome):
        keys, tokens = struct.iter_unpack("<q", outcome.keys), struct.iter_unpack("<i", outcome.tokens)
        for (key,), (token,) in zip(keys, tokens, strict=True):
            self.outputs[key].append(token)
        for output in outcome.outputs:
            assert output.error is None
            self.outputs[output.key] += output.token_ids


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize(
    "bounds",
    [
        {"blocks": 1000},
        {"blocks": 70, "slots": 4, "max_batched_tokens": 32},
        {"blocks": 60, "slots": 1, "max_batched_tokens": 40},
        {"blocks": 48, "slots": 8, "max_batched_tokens": 64},
    ],
    ids=["many blocks", "few blocks", "one slot", "many slots, few blocks"],
)
def test_hybrid_model_generates_the_same_in_the_engine_as_outside(
    directory, compiled, expected, block_bytes, bounds, overlaps
):
    bounds = {**bounds, "kv_cache_bytes": bounds["blocks"] * block_bytes}
    del bounds["blocks"]
    served = EngineDriver(load(directory, compiled=compiled, **bounds), overlaps=overlaps)
    assert expected == served.run_together(requests())
    statistics = served.engine.statistics()
    assert statistics.running + statistics.pending == 0


@pytest.mark.parametrize("overlaps", [False, True])
def test_second_turn_of_a_hybrid_model_computes_only_new_tokens(directory, compiled, overlaps):
    served = EngineDriver(load(directory, compiled=compiled, kv_cache_bytes=2 << 20), overlaps=overlaps)
    prompt, sampling = prompt_of(200), Sampling(max_tokens=40, temperature=0)
    [answer] = served.run_together([(prompt, sampling)])
    prompt = prompt + answer + prompt_of(20)
    unbatched = load(directory, compiled=compiled, kv_cache_bytes=2 << 20)
    assert generate(unbatched, [prompt], sampling) == served.run_together([(prompt, sampling)])
    # The last token was never computed: all whole blocks of 239 tokens are cached.
    assert served.engine.statistics().prefix_hits == 239 // 16 * 16


# Families whose layers have windows: in all layers, in the upper ones, and in two of three.
WINDOWED = {
    "mistral": transformers.MistralConfig(**SIZES, sliding_window=37),
    "qwen2": transformers.Qwen2Config(
        **SIZES | {"hidden_size": 96}, use_sliding_window=True, sliding_window=37, max_window_layers=1
    ),
    "gemma3": transformers.Gemma3TextConfig(
        **SIZES,
        sliding_window=37,
        query_pre_attn_scalar=16,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
}


@pytest.mark.parametrize("family", WINDOWED)
def test_prefix_that_has_slid_out_of_the_windows_gives_the_tokens_of_a_fresh_computation(
    family, compiled, tmp_path
):
    """Its last window is read from the cache; a wrong or missing block there would change the tokens."""
    save(WINDOWED[family], tmp_path)
    sampling = Sampling(max_tokens=30, temperature=0, ignore_eos=True)
    beginning = prompt_of(200)
    prompts = [beginning + prompt_of(3 + 29 * row, seed=row) for row in range(4)]
    fresh = load(tmp_path, compiled=compiled, kv_cache_bytes=2 << 20)
    expected = [generate(fresh, [prompt], sampling)[0] for prompt in prompts]
    assert len({tuple(output) for output in expected}) == len(expected), "the ends of the prompts matter"
    served = EngineDriver(load(tmp_path, compiled=compiled, kv_cache_bytes=2 << 20), overlaps=True)
    assert served.run_together([(prompts[0], sampling)]) == expected[:1]
    assert served.run_together([(prompt, sampling) for prompt in prompts[1:]]) == expected[1:]
    assert served.engine.statistics().prefix_hits == 3 * (200 // 16 * 16)
