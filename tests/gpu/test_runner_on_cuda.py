"""Whole models on CPU and GPU: the same logits and tokens, with or without CUDA graphs and step overlap."""

import gc
import warnings

import pytest
import torch

from engine.models.cuda_models import FAMILIES, ROOM, on_cuda, outputs_of
from engine.models.tiny import Driver, Kept, load, prompt_of, save
from fairlead.base.job import Sampling
from fairlead.base.messages import WorkerSpec
from fairlead.engine.graphs import Graphs
from fairlead.engine.loading import load_runner
from fairlead.engine.models.quantization.float8 import multiplies_float8

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

KINDS = [
    {"temperature": 0},
    {"temperature": 0, "logprobs": 2, "repetition_penalty": 1.4, "repeat_last_n": 6},
    {"temperature": 0, "presence_penalty": 0.8, "logit_bias": {5: 3.0}, "allowed_token_ids": (5, 6, 7)},
    {"temperature": 0.7, "top_k": 20, "frequency_penalty": 0.3},
    {"top_p": 0.9, "min_p": 0.01, "min_tokens": 40, "stop_token_ids": (7, 8, 9)},
]
DENSE = {"llama", "mistral", "qwen2", "qwen3", "gemma3"}


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    made = {}

    def directory(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            save(FAMILIES[name], made[name])
        return made[name]

    return directory


@pytest.mark.parametrize("name", FAMILIES)
def test_in_float32_texts_and_logits_equal_those_of_the_cpu(directories, name):
    expected_texts, expected = outputs_of(load(directories(name), kv_cache_bytes=4 << 20, compiled=False))
    loaded = on_cuda(directories(name))
    assert ("triton with CUDA graphs" if name in DENSE else "triton") == loaded.kernel
    texts, found = outputs_of(loaded)
    assert expected_texts == texts
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3 * float(theirs.abs().max() or 1))


@pytest.mark.parametrize("name", sorted(DENSE))
def test_in_bfloat16_logits_of_a_prompt_are_near_float32(directories, name):
    logits = []
    for device, dtype in (("cpu", "float32"), ("cuda", "bfloat16")):
        loaded = load(directories(name), device=device, dtype=dtype, compiled=device == "cuda", **ROOM)
        kept = loaded.runner.forward = Kept(loaded.runner.forward)
        driver = Driver(loaded, max_batched_tokens=200)
        for row in range(5):
            driver.add(prompt_of(3 + 20 * row), Sampling(max_tokens=1, temperature=0))
        driver.run()
        logits.append(torch.cat(kept.logits))
    error = (logits[1] - logits[0]).norm() / logits[0].norm()
    assert error < 0.06


def test_cuda_graphs_do_not_change_texts_or_logits(directories, monkeypatch):
    loaded = on_cuda(directories("gemma3"))
    played = []
    play = Graphs.play
    monkeypatch.setattr(Graphs, "play", lambda self, rows: played.append(rows) or play(self, rows))
    by_graphs = outputs_of(loaded)
    assert len(played) > 10
    monkeypatch.setattr(Graphs, "play", lambda _self, _rows: False)
    without = outputs_of(loaded)
    assert without[0] == by_graphs[0]
    for one, other in zip(without[1], by_graphs[1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("ahead", [False, True])
def test_seeded_and_greedy_texts_equal_those_of_the_cpu(directories, ahead):
    loaded = load(directories("gemma3"), kv_cache_bytes=4 << 20, compiled=False)
    expected, _ = outputs_of(loaded, kinds=KINDS, rows=10)
    found, _ = outputs_of(on_cuda(directories("gemma3")), kinds=KINDS, rows=10, ahead=ahead)
    assert expected == found


def test_launching_a_step_ahead_does_not_change_the_tokens(directories):
    loaded = on_cuda(directories("qwen3"))
    assert (
        outputs_of(loaded, kinds=KINDS, rows=10)[0] == outputs_of(loaded, kinds=KINDS, rows=10, ahead=True)[0]
    )


def test_launch_does_not_wait_for_the_device(directories):
    loaded = on_cuda(directories("gemma3"))
    driver = Driver(loaded, ahead=True)
    for row in range(10):
        driver.add(prompt_of(3 + 9 * row), Sampling(**{"max_tokens": 24, **KINDS[row % 5]}), seed=row)
    for _ in range(8):  # every row samples
        driver.step()
    assert loaded.runner.overlaps
    with warnings.catch_warnings(action="ignore"):  # it warns that it does not find every wait
        torch.cuda.set_sync_debug_mode("error")
    try:
        driver._launch()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    driver._commit()
    driver.run()
    assert [len(text.output) for text in driver.sequences] == [24] * 10


def test_deleted_model_frees_its_gpu_memory(directories):
    outputs_of(on_cuda(directories("qwen2")))  # libraries have now allocated what they keep
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    loaded = on_cuda(directories("qwen2"), kv_cache_bytes=64 << 20)
    outputs_of(loaded)
    assert torch.cuda.memory_allocated() > before + (60 << 20)
    del loaded
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() < before + (4 << 20)


def test_loading_reports_its_weights_and_its_graphs(directories):
    reports = []
    spec = WorkerSpec(path=str(directories("llama")), device="cuda", dtype="bfloat16", **ROOM)
    load_runner(spec, lambda fraction, stage: reports.append((stage, fraction)))
    for stage in ("weights", "graphs"):
        fractions = [fraction for one, fraction in reports if one == stage]
        assert sorted(fractions) == fractions
        assert fractions[-1] == 1


@pytest.mark.skipif(
    torch.cuda.is_available() and not multiplies_float8(torch.device("cuda")),
    reason="this GPU does not multiply 8-bit floats",
)
def test_8_bit_weights_take_less_memory_and_give_similar_logits(directories):
    exact = on_cuda(directories("llama"), dtype="bfloat16")
    narrow = on_cuda(directories("llama"), dtype="bfloat16", quantization="fp8")
    assert narrow.weight_bytes < 0.85 * exact.weight_bytes
    logits = []
    for loaded in (exact, narrow):
        kept = loaded.runner.forward = Kept(loaded.runner.forward)
        driver = Driver(loaded, max_batched_tokens=100)
        driver.add(prompt_of(60), Sampling(max_tokens=1, temperature=0))
        driver.run()
        logits.append(kept.logits[0])
    assert 0 < (logits[1] - logits[0]).norm() / logits[0].norm() < 0.3
