"""The runner returns the memory of empty blocks, and only of those, to the system."""

import mmap
from pathlib import Path

import pytest

from engine.models.tiny import Driver, generate, load, prompt_of, save
from engine.test_cpu_step import CONFIGS, GREEDY
from fairlead.base.job import Sampling
from fairlead.engine.cpu_step import CpuStep

CACHE_BYTES = 32 << 20
ONE_TOKEN = Sampling(max_tokens=1, temperature=0)


@pytest.fixture(params=["llama", "gemma3"])
def directory(request, tmp_path):
    save(CONFIGS[request.param], tmp_path)
    return tmp_path


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system does not say what is resident")
@pytest.mark.parametrize("compiled", [True, False])
def test_memory_of_a_used_cache_is_returned_to_the_system(tmp_path, compiled):
    save(CONFIGS["llama"], tmp_path)
    loaded = load(tmp_path, dtype="float32", kv_cache_bytes=CACHE_BYTES, compiled=compiled)
    assert isinstance(loaded.runner.forward, CpuStep) is compiled
    driver = Driver(loaded, max_batched_tokens=512)
    empty = resident_bytes()
    while len(driver.free[0]) >= 8 * Driver.SLOTS:
        for _ in range(Driver.SLOTS):
            driver.add(prompt_of(96), ONE_TOKEN)
        driver.run()
    used = resident_bytes() - empty
    assert used > CACHE_BYTES / 4
    loaded.runner.release([list(range(blocks)) for blocks in loaded.blocks_total])
    assert resident_bytes() - empty < used / 4


@pytest.mark.parametrize("compiled", [True, False])
def test_release_of_free_blocks_does_not_change_running_sequences(directory, compiled):
    loaded = load(directory, dtype="float32", kv_cache_bytes=4 << 20, compiled=compiled)
    (expected,) = generate(loaded, [prompt_of(90)], GREEDY)
    driver = Driver(loaded, max_batched_tokens=64)
    text = driver.add(prompt_of(90), GREEDY)
    for _ in range(10):
        driver.step()
        loaded.runner.release([sorted(free) for free in driver.free])
    driver.run()
    assert text.output == expected
