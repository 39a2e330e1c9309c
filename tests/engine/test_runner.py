"""Plans through a whole model: who shares a step, what breaks in it, and within which limits it runs."""

import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from fairlead.engine.runner import load_runner
from fairlead.errors import LoadFailed
from fairlead.job import Sampling
from fairlead.worker.wire import WorkerSpec
from models.tiny import SHAPE, SIZES, VOCABULARY, Driver, generate, load, prompt_of, save

GREEDY = Sampling(max_tokens=12, temperature=0)
TOKEN_BYTES = 2 * SHAPE.layers * SHAPE.kv_heads * SHAPE.head_dim * 4


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    save(transformers.MistralConfig(**SIZES, sliding_window=23), directory)
    return directory


@pytest.fixture(scope="module")
def loaded(directory):
    return load(directory, kv_cache_bytes=6 << 20)


def poisoned(directory, target, name, row):
    """A copy of the checkpoint with NaN in one row of a tensor."""
    shutil.copytree(directory, target, dirs_exist_ok=True)
    tensors = load_file(target / "model.safetensors")
    tensors[name][row] = float("nan")
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return load(target, kv_cache_bytes=2 << 20)


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
        alone = generate(loaded, prompts[row : row + 1], samplings[row], seeds=[row], max_batched_tokens=200)
        assert alone == [together[row]]


def test_a_chunk_that_does_not_sample_has_no_pick(loaded):
    driver = Driver(loaded, max_batched_tokens=10)
    driver.add(prompt_of(25), GREEDY)
    assert [None] == driver.step()
    assert [None] == driver.step()
    assert driver.step()[0].token_id in range(VOCABULARY)


def test_a_recomputed_sequence_goes_on_as_if_nothing_had_happened(loaded):
    [expected] = generate(loaded, [prompt_of(30)], GREEDY)
    driver = Driver(loaded)
    sequence = driver.add(prompt_of(30), GREEDY)
    while sequence.output_length < 5:
        driver.step()
    driver.release(sequence)  # preempted: its tokens stay, its cache goes
    sequence.computed = 0
    driver.run()
    assert expected == sequence.token_ids[30:]


def test_blocks_computed_by_another_sequence_can_be_shared(loaded):
    prompt = prompt_of(50)
    [expected] = generate(loaded, [prompt], GREEDY)
    driver = Driver(loaded)
    first = driver.add(prompt, GREEDY)
    driver.run()
    second = driver.add(prompt, GREEDY)
    second.block_ids[0].extend(first.block_ids[0][:2])
    second.computed = 2 * loaded.block_size
    driver.run()
    assert expected == second.token_ids[50:]


def test_reused_blocks_say_nothing_of_their_former_owner(directory):
    loaded = load(directory, kv_cache_bytes=6 * 16 * TOKEN_BYTES)
    driver = Driver(loaded)
    prompts = [prompt_of(60), prompt_of(33), prompt_of(41)]
    expected = [generate(load(directory, kv_cache_bytes=1 << 20), [prompt], GREEDY)[0] for prompt in prompts]
    for prompt, text in zip(prompts, expected, strict=True):
        sequence = driver.add(prompt, GREEDY)
        driver.run()
        assert text == sequence.token_ids[len(prompt) :]
        driver.release(sequence)


@pytest.mark.parametrize("stranger", [-1, VOCABULARY, 2**31 - 1])
def test_a_prompt_with_a_token_that_does_not_exist_fails_alone(loaded, stranger):
    [expected] = generate(loaded, [prompt_of(40)], GREEDY)
    driver = Driver(loaded)
    healthy = driver.add(prompt_of(40), GREEDY)
    broken = driver.add([1, stranger, *prompt_of(30)], GREEDY)
    driver.run()
    assert expected == healthy.token_ids[40:]
    [pick] = driver.picks[broken.key]
    assert "token ids outside" in pick.error


def test_nan_weights_that_one_prompt_touches_fail_that_prompt_alone(directory, tmp_path):
    loaded = poisoned(directory, tmp_path, "model.embed_tokens.weight", 200)
    prompts = [[token for token in prompt_of(40, seed=seed) if token != 200] for seed in (1, 2)]
    touching = [*prompts[0][:10], 200, *prompts[0][10:]]
    expected = [generate(loaded, [prompt], GREEDY)[0] for prompt in prompts]
    driver = Driver(loaded)
    sequences = [driver.add(prompt, GREEDY) for prompt in (prompts[0], touching, prompts[1])]
    driver.run()
    assert "NaN" in driver.picks[1][0].error
    for row, text in zip((0, 2), expected, strict=True):
        assert (
            text[: sequences[row].output_length] == sequences[row].token_ids[sequences[row].prompt_length :]
        )
        assert sequences[row].output_length == GREEDY.max_tokens
    # What the broken one left in its blocks is nobody's trouble.
    driver.release(sequences[1])
    again = driver.add(prompts[1], GREEDY)
    driver.run()
    assert expected[1] == again.token_ids[again.prompt_length :]


def test_nan_in_every_layer_fails_everybody_without_an_exception(directory, tmp_path):
    loaded = poisoned(directory, tmp_path, "model.norm.weight", slice(None))
    driver = Driver(loaded)
    for seed in range(3):
        driver.add(prompt_of(20, seed=seed), Sampling(max_tokens=5, logprobs=2, top_p=0.5))
    driver.run()
    assert all("NaN" in picks[0].error for picks in driver.picks.values())


def test_the_defaults_on_a_cpu_are_those_of_the_specification(directory):
    loaded = load(directory)
    assert (8, 8, 512) == (loaded.slots, loaded.max_batch, loaded.max_batched_tokens)
    assert 512 == loaded.max_model_len
    # 1024 MiB would hold far more than eight whole contexts.
    assert 8 * 512 // 16 == loaded.blocks_total
    assert 8 * 512 * TOKEN_BYTES == loaded.kv_cache_bytes
    assert ("cpu", "float32", VOCABULARY, 16) == (
        loaded.device,
        loaded.dtype,
        loaded.vocab_size,
        loaded.block_size,
    )


def test_what_the_specification_of_a_worker_says_is_obeyed(directory):
    loaded = load(
        directory,
        slots=3,
        max_batch=7,
        max_batched_tokens=99,
        max_model_len=100,
        kv_cache_bytes=10_000_000,
        block_size=8,
        dtype="bfloat16",
    )
    assert (3, 3, 99, 100) == (
        loaded.slots,
        loaded.max_batch,
        loaded.max_batched_tokens,
        loaded.max_model_len,
    )
    assert 10_000_000 // (8 * TOKEN_BYTES // 2) == loaded.blocks_total
    assert "bfloat16" == loaded.dtype


def test_the_context_is_no_longer_than_the_cache(directory):
    loaded = load(directory, kv_cache_bytes=5 * 16 * TOKEN_BYTES + 1)
    assert (5, 80) == (loaded.blocks_total, loaded.max_model_len)
    [text] = generate(loaded, [prompt_of(60)], Sampling(max_tokens=20, temperature=0))
    assert 20 == len(text)


def test_the_ends_come_from_the_checkpoint(tmp_path):
    save(transformers.LlamaConfig(**{**SIZES, "eos_token_id": [3, 5]}), tmp_path)
    assert (3, 5) == load(tmp_path).eos_token_ids


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"device": "abacus"}, "'abacus' is not known"),
        ({"device": "meta"}, "'meta' is not supported"),
        ({"device": "cuda:99"}, "'cuda:99' is not there"),
        ({"kv_cache_bytes": 100}, "do not hold one block"),
        ({"kv_cache_bytes": 2**60}, "out of memory|cannot be loaded"),
        ({"dtype": "int4"}, "'int4' is not supported"),
        ({"path": "nowhere"}, "nowhere: no such directory"),
    ],
)
def test_what_cannot_be_loaded_says_why(directory, options, reason):
    spec = WorkerSpec(**{"path": str(directory), "device": "cpu", **options})
    with pytest.raises(LoadFailed, match=reason):
        load_runner(spec, lambda _fraction, _stage: None)


def test_loading_tells_how_far_it_is(directory):
    told = []
    load_runner(
        WorkerSpec(path=str(directory), device="cpu"), lambda fraction, stage: told.append((stage, fraction))
    )
    assert ("weights", 1.0) == told[-1]
    assert told == sorted(told)


def test_a_worker_sets_its_threads(directory):
    before = torch.get_num_threads()
    try:
        load(directory, threads=1)
        assert 1 == torch.get_num_threads()
    finally:
        torch.set_num_threads(before)
