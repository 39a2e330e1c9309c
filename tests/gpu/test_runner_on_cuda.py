"""The same model on a CPU and on a GPU: the same picks, and launches that do not wait for the device."""

import pytest
import torch
import transformers

from fairlead.job import Sampling
from models.tiny import SIZES, Driver, load, prompt_of, save

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

KINDS = [
    {"temperature": 0},
    {"temperature": 0, "logprobs": 2, "repetition_penalty": 1.4},
    {"temperature": 0, "presence_penalty": 0.8, "logit_bias": {5: 3.0}},
    {"temperature": 0.7, "top_k": 20, "frequency_penalty": 0.3},
    {"top_p": 0.9, "min_p": 0.01, "min_tokens": 40, "stop_token_ids": (7, 8, 9)},
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    save(transformers.Gemma3TextConfig(**SIZES, sliding_window=30, layer_types=kinds), directory)
    return directory


def driver_with_all_kinds(directory, *, device, ahead):
    driver = Driver(load(directory, device=device, kv_cache_bytes=4 << 20), ahead=ahead)
    for row in range(10):
        driver.add(prompt_of(3 + 9 * row), Sampling(**{"max_tokens": 24, **KINDS[row % 5]}), seed=row)
    return driver


@pytest.mark.parametrize("ahead", [False, True])
def test_greedy_texts_are_those_of_the_cpu(directory, ahead):
    outputs = []
    for device in ("cpu", "cuda"):
        driver = driver_with_all_kinds(directory, device=device, ahead=ahead)
        driver.run()
        outputs.append([text.output for row, text in enumerate(driver.texts) if row % 5 < 3])
    assert outputs[0] == outputs[1]


def test_a_launch_does_not_wait_for_the_device(directory):
    driver = driver_with_all_kinds(directory, device="cuda", ahead=True)
    for _ in range(8):  # the libraries have been loaded, and every row samples
        driver.step()
    assert driver.loaded.runner.overlaps
    torch.cuda.set_sync_debug_mode("error")
    try:
        driver._launch()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    driver.run()
    assert [24] * 10 == [len(text.output) for text in driver.texts]
