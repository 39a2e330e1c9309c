"""Steps of a whole model: batches, failures of single rows, loading, and limits."""

import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.models.tiny import SHAPE, SIZES, VOCABULARY, Driver, generate, load, prompt_of, save
from fairlead.base.errors import LoadFailed
from fairlead.base.job import Sampling
from fairlead.base.messages import WorkerSpec
from fairlead.engine import threads
from fairlead.engine.cpu_step import CpuStep, variants
from fairlead.engine.loading import load_runner

GREEDY = Sampling(max_tokens=12, temperature=0)
TOKEN_BYTES = 2 * SHAPE.layers * SHAPE.kv_heads * 32 * 4  # the compiled step pads heads of 16 to 32


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    save(transformers.MistralConfig(**SIZES, sliding_window=23), directory)
    return directory


@pytest.fixture(scope="module")
def loaded(directory):
    return load(directory, kv_cache_bytes=6 << 20)


def with_nan(directory, target, name, row):
    """Load a copy of the checkpoint with NaN in a row of a tensor, by torch: the compiled step refuses it."""
    shutil.copytree(directory, target, dirs_exist_ok=True)
    tensors = load_file(target / "model.safetensors")
    tensors[name][row] = float("nan")
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return load(target, kv_cache_bytes=2 << 20, compiled=False)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_seeded_texts_are_the_same_alone_and_in_a_batch_of_32(directory, dtype):
    loaded = load(directory, kv_cache_bytes=6 << 20, dtype=dtype)
    kinds = [
        {},
        {"temperature": 0.7, "top_k": 20},
        {"top_p": 0.9, "min_p": 0.01},
        {"presence_penalty": 0.5, "repetition_penalty": 1.2},
    ]
    samplings = [Sampling(max_tokens=16, **kinds[row % 4]) for row in range(32)]
    prompts = [prompt_of(3 + 2 * row) for row in range(32)]
    together = generate(loaded, prompts, samplings, seeds=range(32), max_batched_tokens=200)
    for row in range(0, 32, 5):
        unbatched = generate(
            loaded, prompts[row : row + 1], samplings[row], seeds=[row], max_batched_tokens=200
        )
        assert unbatched == [together[row]]


def test_step_without_sampling_rows_samples_no_tokens(loaded):
    driver = Driver(loaded, max_batched_tokens=10)
    text = driver.add(prompt_of(25), GREEDY)
    assert len(driver.step().token_ids) == 0
    assert len(driver.step().token_ids) == 0
    [token_id] = driver.step().token_ids.tolist()
    assert token_id in range(VOCABULARY)
    assert [token_id] == text.output


KINDS = [
    {"temperature": 0},
    {"logprobs": 2},
    {"temperature": 0.7, "top_k": 20, "presence_penalty": 0.8, "frequency_penalty": 0.3},
    {"top_p": 0.9, "min_p": 0.01, "logit_bias": {5: 3.0}, "allowed_token_ids": tuple(range(4, 200, 3))},
    {"repetition_penalty": 1.4, "repeat_last_n": 6, "min_tokens": 40, "stop_token_ids": (7, 8, 9)},
]


def test_sampled_tokens_are_the_same_when_each_step_is_launched_ahead(loaded):
    picks = []
    for ahead in (False, True):
        driver = Driver(loaded, ahead=ahead)
        for row in range(10):
            driver.add(
                prompt_of(3 + 7 * row), Sampling(**{"max_tokens": 4 + 3 * row, **KINDS[row % 5]}), seed=row
            )
        driver.run()
        picks.append([text.sampled for text in driver.sequences])
    for one, other in zip(*picks, strict=True):
        assert [pick.token_id for pick in one] == [pick.token_id for pick in other]
        for pick, same in zip(one, other, strict=True):
            if pick.logprob is not None:
                assert pytest.approx(pick.logprob.logprob, abs=1e-4) == same.logprob.logprob
    assert [4 + 3 * row for row in range(10)] == [len(one) for one in picks[0]]


def test_token_passes_between_two_unawaited_steps_on_the_device(loaded):
    [expected] = generate(loaded, [prompt_of(20)], Sampling(max_tokens=3, temperature=0))
    driver = Driver(loaded)
    batch = driver.batch
    text = driver.add(prompt_of(20), Sampling(max_tokens=3, temperature=0))
    driver.add(prompt_of(21), GREEDY)
    driver._launch()
    for other in range(2):
        driver._launch()
        step, _, _ = driver._under_way[-1]
        if other == 0:  # the first sequence samples; the second has the rest of the budget
            assert list(step.input_ids)[:1] == [-1]
            assert list(step.positions)[:1] == [20]
            driver._commit()
    assert expected[:1] == text.output
    while driver._under_way:
        driver._commit()
    assert expected == text.output
    assert text.slot == -1
    assert batch.num_reqs == 1


def test_row_of_nan_fails_alone_while_its_next_step_is_already_launched(directory, tmp_path):
    loaded = with_nan(directory, tmp_path, "model.embed_tokens.weight", 200)
    prompts = [[token for token in prompt_of(20, seed=seed) if token != 200] for seed in (1, 2)]
    expected = generate(loaded, prompts, GREEDY)
    driver = Driver(loaded, max_batched_tokens=80, ahead=True)
    texts = [driver.add(prompt, GREEDY) for prompt in (prompts[0], [200, *prompts[0]], prompts[1])]
    driver.run()
    assert ["NaN" in pick.error for pick in texts[1].sampled] == [True]
    assert expected == [texts[0].output, texts[2].output]


def test_recomputed_sequence_continues_unchanged(loaded):
    [expected] = generate(loaded, [prompt_of(30)], GREEDY)
    driver = Driver(loaded)
    text = driver.add(prompt_of(30), GREEDY)
    while len(text.output) < 5:
        driver.step()
    driver.release(text)  # preempt it: its tokens are kept, its blocks are not
    driver.admit(text)
    driver.run()
    assert expected == text.output


def test_blocks_of_another_sequence_can_be_shared(loaded):
    prompt = prompt_of(50)
    [expected] = generate(loaded, [prompt], GREEDY)
    driver = Driver(loaded)
    first = driver.add(prompt[:33], Sampling(max_tokens=1))
    driver.run()
    second = driver.add(prompt, GREEDY, shared=tuple(blocks[:2] for blocks in first.blocks))
    driver.run()
    assert expected == second.output


def test_reused_blocks_do_not_affect_their_next_sequence(directory):
    loaded = load(directory, kv_cache_bytes=6 * 16 * TOKEN_BYTES)
    driver = Driver(loaded)
    prompts = [prompt_of(60), prompt_of(33), prompt_of(41)]
    expected = [generate(load(directory, kv_cache_bytes=1 << 20), [prompt], GREEDY)[0] for prompt in prompts]
    for prompt, output in zip(prompts, expected, strict=True):
        text = driver.add(prompt, GREEDY)
        driver.run()
        assert output == text.output
        driver.release(text)


@pytest.mark.parametrize("unknown_token", [VOCABULARY, 2**31 - 2])
@pytest.mark.parametrize("ahead", [False, True])
def test_prompt_with_an_unknown_token_id_fails_alone(loaded, unknown_token, ahead):
    [expected] = generate(loaded, [prompt_of(40)], GREEDY)
    driver = Driver(loaded, ahead=ahead, vocab_size=2**31 - 1)
    healthy = driver.add(prompt_of(40), GREEDY)
    broken = driver.add([1, unknown_token, *prompt_of(30)], Sampling(max_tokens=9, logprobs=1))
    driver.run()
    assert expected == healthy.output
    [pick] = broken.sampled
    assert "token ids outside 0…319" in pick.error
    assert pick.logprob is None


def test_nan_weights_fail_only_the_prompt_that_uses_them(directory, tmp_path):
    loaded = with_nan(directory, tmp_path, "model.embed_tokens.weight", 200)
    prompts = [[token for token in prompt_of(40, seed=seed) if token != 200] for seed in (1, 2)]
    prompt_with_nan = [*prompts[0][:10], 200, *prompts[0][10:]]
    expected = [generate(loaded, [prompt], GREEDY)[0] for prompt in prompts]
    assert all(len(output) == GREEDY.max_tokens for output in expected)
    driver = Driver(loaded)
    texts = [driver.add(prompt, GREEDY) for prompt in (prompts[0], prompt_with_nan, prompts[1])]
    driver.run()
    assert "NaN" in texts[1].sampled[0].error
    assert expected == [texts[0].output, texts[2].output]
    # The failed sequence's blocks can be reused, although they contain NaN.
    driver.release(texts[1])
    again = driver.add(prompts[1], GREEDY)
    driver.run()
    assert expected[1] == again.output


def test_nan_in_every_row_fails_every_sequence_without_an_exception(directory, tmp_path):
    loaded = with_nan(directory, tmp_path, "model.norm.weight", slice(None))
    driver = Driver(loaded)
    for seed in range(3):
        driver.add(prompt_of(20, seed=seed), Sampling(max_tokens=5, logprobs=2, top_p=0.5))
    driver.run()
    assert all("NaN" in text.sampled[0].error for text in driver.sequences)


def test_defaults_on_a_cpu_are_those_of_the_specification(directory):
    loaded = load(directory)
    assert (loaded.slots, loaded.max_batch, loaded.max_batched_tokens) == (8, 8, 512)
    assert loaded.max_model_len == 512
    # 1024 MiB would hold far more than eight whole contexts.
    assert loaded.blocks_total == (8 * 512 // 16,)
    assert loaded.windows == (23,)
    assert (loaded.max_input_tokens, loaded.max_output_tokens) == (512, 512)
    assert loaded.kv_cache_bytes == 8 * 512 * TOKEN_BYTES
    assert (
        loaded.device,
        loaded.dtype,
        loaded.vocab_size,
        loaded.block_size,
    ) == ("cpu", "float32", VOCABULARY, 16)


def test_worker_specification_is_applied(directory):
    loaded = load(
        directory,
        slots=3,
        max_batch=7,
        max_batched_tokens=99,
        max_model_len=100,
        max_input_tokens=60,
        max_output_tokens=2000,
        kv_cache_bytes=10_000_000,
        block_size=8,
        dtype="bfloat16",
    )
    assert (
        loaded.slots,
        loaded.max_batch,
        loaded.max_batched_tokens,
        loaded.max_model_len,
    ) == (3, 3, 99, 100)
    assert (loaded.max_input_tokens, loaded.max_output_tokens) == (60, 100)
    assert loaded.blocks_total == (10_000_000 // (8 * TOKEN_BYTES // 2 // 2),)  # torch does not pad heads
    assert loaded.dtype == "bfloat16"


def test_context_is_limited_to_the_cache(directory):
    loaded = load(directory, kv_cache_bytes=5 * 16 * TOKEN_BYTES + 1)
    assert (loaded.blocks_total, loaded.max_model_len) == ((5,), 80)
    [text] = generate(loaded, [prompt_of(60)], Sampling(max_tokens=20, temperature=0))
    assert len(text) == 20


def gemma(directory, **values):
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    save(transformers.Gemma3TextConfig(**SIZES, sliding_window=30, layer_types=kinds, **values), directory)
    return directory


def test_sliding_layers_get_the_blocks_they_can_use_and_full_attention_the_rest(tmp_path):
    a_layer = TOKEN_BYTES // 3 * 16
    loaded = load(gemma(tmp_path), slots=2, max_batched_tokens=50, kv_cache_bytes=1000 * a_layer)
    # Per slot a window and a step's tokens, with partial blocks at both ends; and one more step's tokens.
    most = 2 * (-(-(30 + 50) // 16) + 1) + 4
    assert loaded.windows == (None, 30)
    assert (1000 - 2 * most, most) == loaded.blocks_total
    assert 1000 * a_layer == loaded.kv_cache_bytes
    small = load(tmp_path, slots=2, max_batched_tokens=50, kv_cache_bytes=12 * a_layer)
    assert (small.blocks_total, small.max_model_len) == ((4, 4), 64)
    # By default: eight whole contexts for full attention, and never more for sliding layers.
    assert load(tmp_path, max_batched_tokens=64).blocks_total == (8 * 512 // 16, 8 * 7 + 4)
    assert load(tmp_path).blocks_total == (8 * 512 // 16, 8 * 512 // 16)


def test_long_text_of_a_hybrid_model_needs_few_blocks_in_sliding_layers(tmp_path):
    directory = gemma(tmp_path)
    prompts = [prompt_of(150), prompt_of(171)]
    sampling = Sampling(max_tokens=60, temperature=0)
    expected = generate(load(directory), prompts, sampling, max_batched_tokens=40)
    a_layer = TOKEN_BYTES // 3 * 16
    small = load(directory, slots=2, max_batched_tokens=40, kv_cache_bytes=(40 + 2 * 15) * a_layer)
    assert small.blocks_total == (40, 15)
    assert expected == generate(small, prompts, sampling, max_batched_tokens=40)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"device": "abacus"}, "'abacus' is not known"),
        ({"device": "meta"}, "'meta' is not supported"),
        ({"device": "cuda:99"}, "'cuda:99' is not there"),
        ({"kv_cache_bytes": 100}, "do not hold one block"),
        ({"kv_cache_bytes": 2**60}, "out of memory|cannot be"),
        ({"dtype": "int4"}, "'int4' is not supported"),
        ({"path": "nowhere"}, "nowhere: no such directory"),
    ],
)
def test_failed_load_reports_the_reason(directory, options, reason):
    spec = WorkerSpec(**{"path": str(directory), "device": "cpu", **options})
    with pytest.raises(LoadFailed, match=reason):
        load_runner(spec, lambda _fraction, _stage: None)


def test_loading_reports_ascending_progress(directory):
    progress = []
    load_runner(
        WorkerSpec(path=str(directory), device="cpu"),
        lambda fraction, stage: progress.append((stage, fraction)),
    )
    assert progress[-1] == ("weights", 1.0)
    assert progress == sorted(progress)


def test_worker_sets_the_number_of_threads(directory):
    before = threads.get_threads(), torch.get_num_threads()
    try:
        load(directory, threads=3, compiled=False)
        assert threads.get_threads() == torch.get_num_threads() == 3
        load(directory, threads=2)
        assert threads.get_threads() == 2
    finally:
        threads.set_threads(before[0])
        torch.set_num_threads(before[1])


def test_cpu_uses_the_compiled_step_where_supported_and_torch_otherwise(directory):
    compiled = load(directory)
    assert isinstance(compiled.runner.forward, CpuStep)
    assert variants("float32")[0] == compiled.kernel
    others = [{"block_size": 8}, {"dtype": "float16"}, {"compiled": False}]
    assert [load(directory, **options).kernel for options in others] == ["torch"] * 3
    expected = generate(load(directory, compiled=False), [prompt_of(40)], GREEDY)
    assert expected == generate(compiled, [prompt_of(40)], GREEDY)


def test_compiled_step_allocates_the_reported_cache_and_weight_bytes(directory):
    loaded = load(directory, kv_cache_bytes=1 << 20)
    assert loaded.runner.forward.model.cache_bytes <= 1.1 * loaded.kv_cache_bytes
    assert loaded.kv_cache_bytes <= 1 << 20
    assert loaded.runner.forward.model.weight_bytes == loaded.weight_bytes


def test_compiled_step_loads_unprefixed_tensors_and_a_duplicate_tied_head(tmp_path):
    save(transformers.LlamaConfig(**SIZES, tie_word_embeddings=True), tmp_path)
    expected = generate(load(tmp_path), [prompt_of(40)], GREEDY)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    tensors["lm_head.weight"] = tensors["embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = load(tmp_path)
    assert loaded.kernel != "torch"
    assert expected == generate(loaded, [prompt_of(40)], GREEDY)


def test_compiled_step_refuses_unexpected_tensors(tmp_path):
    save(transformers.LlamaConfig(**SIZES), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.q_norm.weight"] = torch.ones(16)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(LoadFailed, match=r"model.safetensors: tensor '.*q_norm.weight' is unexpected"):
        load(tmp_path)


def test_small_model_uses_one_thread_unless_threads_is_set(directory):
    before = threads.get_threads()
    try:
        assert load(directory, threads=3).runner.forward.model.threads == 3
        assert load(directory).runner.forward.model.threads == 1
    finally:
        threads.set_threads(before)
