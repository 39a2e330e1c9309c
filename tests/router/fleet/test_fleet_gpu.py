"""Engines that share a GPU: their models fit, or `lru` evicts one. The GPU is a fake that counts memory."""

import msgspec
import pytest

from engine.worker.fake_gpu import MIB, FakeGpu
from fairlead.base.config import LruSwap, ModelConfig
from fairlead.base.errors import LoadFailed
from router.fleet.running_fleet import RunningFleet, engine, question, running_fleet

LRU = LruSwap()
TOTAL_MB = 10_000


@pytest.fixture
def gpu(tmp_path) -> FakeGpu:
    return FakeGpu.make(tmp_path / "gpu", TOTAL_MB)


def on_gpu(name: str, gpu: FakeGpu, *, weights_mb: int = 1000, **settings: object) -> ModelConfig:
    """Return a model with weights on the fake GPU; its path contains the GPU's file."""
    return engine(name, f"weights_mb={weights_mb};{gpu._file}", **settings)


def states(opened: RunningFleet) -> dict[str, str]:
    return {status.model: status.state for status in opened.fleet.models()}


async def test_memory_of_a_model_on_a_gpu_is_its_gpu_memory(gpu):
    async with running_fleet(on_gpu("m", gpu, gpu_memory=0.4), swap=LRU) as opened:
        assert await opened.run_job(question())
        await opened.until(lambda: opened.status().memory_bytes > 0)
        # 1000 MiB of weights, and nine tenths of the remaining 3000 MiB.
        assert opened.status().memory_bytes == 3700 * MIB
        assert gpu.free_and_total()[0] == (TOTAL_MB - 3700) * MIB


async def test_memory_without_a_configured_limit_is_measured_for_the_next_swap(gpu):
    async with running_fleet(on_gpu("m", gpu), swap=LRU) as opened:
        assert await opened.run_job(question())
        await opened.until(lambda: "m" in opened.fleet._local._memory.memory_mb)
        assert opened.fleet._local._memory.memory_mb["m"] == 1000 + 0.9 * 9000


@pytest.mark.parametrize("device", ["auto", "cuda"])
@pytest.mark.parametrize("share", [0.4, 4000])
async def test_two_models_with_shares_that_fit_stay_loaded_on_one_gpu(gpu, device, share):
    models = [on_gpu(name, gpu, gpu_memory=share, device=device) for name in "xy"]
    async with running_fleet(*models, swap=LRU) as opened:
        for name in "xyxy":
            assert await opened.run_job(question(name))
        assert states(opened) == {"x": "ready", "y": "ready"}
        assert [status.counts.loads for status in opened.fleet.models()] == [1, 1]
    assert (gpu.most_processes, gpu.refused) == (2, 0)


@pytest.mark.parametrize(
    "settings",
    [
        {"gpu_memory": 0.6},
        {"gpu_memory": 6000},
        {"device": "cuda:0"},
        {},
        {"memory_mb": 6000, "gpu_memory": 0.6},
    ],
    ids=["shares", "MiB", "all that is free, on a device", "all that is free, on any device", "declared"],
)
async def test_two_models_that_do_not_fit_take_turns_by_lru(gpu, settings):
    models = [on_gpu(name, gpu, **settings) for name in "xy"]
    async with running_fleet(*models, swap=LRU) as opened:
        for name in "xyxy":
            assert await opened.run_job(question(name))
            assert states(opened)[name] == "ready"
            assert list(states(opened).values()).count("ready") == 1
        assert [status.counts.evictions for status in opened.fleet.models()] == [2, 1]
    assert (gpu.most_processes, gpu.refused) == (1, 0)


async def test_least_recently_used_of_three_models_is_evicted_from_the_gpu(gpu):
    models = [on_gpu(name, gpu, gpu_memory=0.4) for name in "xyz"]
    async with running_fleet(*models, swap=LRU) as opened:
        for name in "xyxz":
            assert await opened.run_job(question(name))
        assert states(opened) == {"x": "ready", "y": "stopped", "z": "ready"}
    assert (gpu.most_processes, gpu.refused) == (2, 0)


async def test_model_that_is_not_on_the_gpu_is_not_evicted_for_its_memory(gpu):
    models = [engine("cpu"), *(on_gpu(name, gpu, gpu_memory=0.6, device="cuda") for name in "xy")]
    async with running_fleet(*models, swap=LRU) as opened:
        for name in ("cpu", "x", "y"):
            assert await opened.run_job(question(name))
        assert states(opened) == {"cpu": "ready", "x": "stopped", "y": "ready"}


async def test_without_lru_the_second_model_is_out_of_memory(gpu):
    """The failure that `lru` prevents above: the fake GPU refuses more than it has."""
    models = [on_gpu(name, gpu, gpu_memory=0.6) for name in "xy"]
    async with running_fleet(*models) as opened:
        assert await opened.run_job(question("x"))
        with pytest.raises(LoadFailed, match="gpuMemory: 5000 MiB more are needed, and only 3500 MiB"):
            await opened.run_job(question("y"))


async def test_share_that_the_weights_exceed_fails_the_load_with_the_reason(gpu):
    async with running_fleet(on_gpu("m", gpu, weights_mb=5000, gpu_memory=0.5)) as opened:
        with pytest.raises(LoadFailed, match="gpuMemory: 5000 MiB are too few: 5000 MiB are taken"):
            await opened.run_job(question())


async def test_changed_share_applies_after_the_reload(gpu):
    models = [on_gpu(name, gpu, gpu_memory=0.6) for name in "xy"]
    async with running_fleet(*models, swap=LRU) as opened:
        assert await opened.run_job(question("x"))
        smaller = [on_gpu(name, gpu, gpu_memory=0.4) for name in "xy"]
        config = opened.fleet.catalog.config
        await opened.fleet.reload(msgspec.structs.replace(config, models=tuple(smaller)))
        await opened.state("x", "stopped")
        for name in "xy":
            assert await opened.run_job(question(name))
        assert states(opened) == {"x": "ready", "y": "ready"}
