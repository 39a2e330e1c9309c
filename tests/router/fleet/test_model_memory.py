"""The memory that models take, as configured or as measured."""

from pathlib import Path

from fairlead.base.config import CommandConfig, ModelConfig
from fairlead.nodes.node import GpuUse
from fairlead.router.fleet.model_memory import MIB, ModelMemory

GPU = GpuUse("cuda", taken_bytes=3000 * MIB, total_bytes=10_000 * MIB)


def model(name: str, **settings: object) -> ModelConfig:
    return ModelConfig(path=Path("/m"), name=name, **settings)


def memory_of(*models: ModelConfig | CommandConfig) -> ModelMemory:
    memory = ModelMemory()
    memory.configure(models)
    return memory


def test_measured_memory_is_the_peak():
    memory = memory_of(model("m"))
    for taken_mb in (5, 9, 7):
        memory.measured("m", taken_mb * MIB)
    assert memory.memory_mb == {"m": 9.0}


def test_configured_memory_is_not_measured():
    memory = memory_of(
        model("m", memory_mb=8), CommandConfig(name="c", cmd=("x",), proxy="http://h", memory_mb=3)
    )
    memory.measured("m", 100 * MIB)
    memory.measured("c", 100 * MIB)
    assert memory.memory_mb == {"m": 8, "c": 3}


def test_share_of_a_gpu_is_known_once_a_model_was_loaded_there():
    memory = memory_of(model("x", gpu_memory=0.4, device="cuda"), model("y", gpu_memory=0.3))
    assert memory.memory_mb == {}
    memory.loaded("x", GPU)
    assert memory.memory_mb == {"x": 4000, "y": 3000}
    assert memory.gpus.total_mb == {"cuda:0": 10_000}


def test_share_in_mib_is_known_at_once():
    assert memory_of(model("x", gpu_memory=4000)).memory_mb == {"x": 4000}


def test_declared_memory_overrides_the_share():
    memory = memory_of(model("x", gpu_memory=0.4, memory_mb=5000))
    memory.loaded("x", GPU)
    assert memory.memory_mb == {"x": 5000}


def test_models_on_any_device_use_the_gpu_of_the_first_load():
    memory = memory_of(model("x"), model("y"), model("cpu", device="cpu"), model("far", device="cuda:1"))
    assert memory.gpus.gpus_of == {"far": ("cuda:1",)}
    memory.loaded("x", GPU)
    assert memory.gpus.gpus_of == {"x": ("cuda:0",), "y": ("cuda:0",), "far": ("cuda:1",)}


def test_divided_model_uses_its_gpu_and_those_after_it():
    memory = memory_of(model("x", parallel=2), model("far", device="cuda:1", parallel=3, gpu_memory=4000))
    memory.loaded("x", GPU)
    assert memory.gpus.gpus_of == {"x": ("cuda:0", "cuda:1"), "far": ("cuda:1", "cuda:2", "cuda:3")}
    assert memory.memory_mb == {"far": 4000}


def test_share_has_no_effect_where_there_is_no_gpu():
    memory = memory_of(model("x", gpu_memory=4000))
    assert memory.gpus.gpus_of == {"x": ("cuda:0",)}
    memory.loaded("x", None)
    memory.measured("x", 7 * MIB)
    assert memory.gpus.gpus_of == {}
    assert memory.memory_mb == {"x": 7.0}


def test_measured_memory_is_forgotten_when_the_configuration_changes():
    memory = memory_of(model("x"), model("y"))
    memory.measured("x", 7 * MIB)
    memory.measured("y", 7 * MIB)
    memory.configure([model("x", slots=3), model("y")])
    assert memory.memory_mb == {"y": 7.0}
