"""Settings of the cluster and of replicas: what contradicts them, and what a replica's node gets."""

import json
from functools import partial
from pathlib import Path

import msgspec
import pytest

from distributed.supervisor.running_server import Announced
from fairlead.base.config import (
    ClusterConfig,
    Config,
    ConfigError,
    KvCacheConfig,
    ModelConfig,
    ReplicasConfig,
)
from fairlead.distributed.ray.orders import start_order
from fairlead.server.app import Composition
from fairlead.server.cli import main
from fairlead.server.configfile import ConfigFileError, read_config
from fairlead.server.processes.supervisor import supervise
from server.cli.test_serve import FakeApp


@pytest.fixture
def app(monkeypatch):
    app = FakeApp()
    monkeypatch.setattr("fairlead.server.app.run", app.run)
    return app


def model(**settings) -> ModelConfig:
    settings.setdefault("replicas", ReplicasConfig())
    return ModelConfig(path=Path("/models/qwen"), name="qwen", **settings)


def faults(make) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        make()
    return str(refused.value).splitlines()


def test_replicas_need_a_cluster():
    assert faults(lambda: Config(models=(model(),))) == [
        "models.qwen.replicas: needs cluster, which says where they run"
    ]


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"device": "cuda:1"}, "device: must be auto, cpu or cuda with replicas: Ray chooses the GPU"),
        (
            {"device": "cpu", "replicas": ReplicasConfig(gpus=1)},
            "replicas.gpus: must be 0, because device is cpu",
        ),
        (
            {"device": "cuda", "replicas": ReplicasConfig(gpus=0)},
            "replicas.gpus: must be above 0, because device is cuda",
        ),
        ({"replicas": ReplicasConfig(min=3, max=2)}, "replicas.max: must be at least min, which is 3"),
    ],
)
def test_contradictions_name_the_setting(settings, fault):
    assert faults(lambda: model(**settings)) == [f"models.qwen.{fault}"]


@pytest.mark.parametrize("address", ["10.0.0.1", "ray://10.0.0.1:10001", "http://10.0.0.1:6379", ""])
def test_address_of_the_cluster_is_checked(address):
    with pytest.raises(ConfigError, match=r"cluster\.ray: must be HOST:PORT"):
        Config(models=(), cluster=ClusterConfig(ray=address))


@pytest.mark.parametrize("fronts", [1, 2])
async def test_server_does_not_start_without_ray(monkeypatch, fronts):
    monkeypatch.setattr("fairlead.distributed.ray.launcher_process.find_spec", lambda _name: None)
    config = Config(models=(model(),), cluster=ClusterConfig(), fronts=fronts)
    start = (
        Composition(config, Announced()).prepare if fronts == 1 else partial(supervise, config, Announced())
    )
    with pytest.raises(ConfigError, match=r"cluster: needs the extra ray"):
        await start()


def test_command_cannot_have_replicas(tmp_path):
    file = tmp_path / "fairlead.yaml"
    file.write_text("cluster: {}\nmodels: {a: {cmd: server, replicas: {max: 2}}}")
    with pytest.raises(ConfigFileError, match=r"models\.a\.replicas: is for models with path"):
        read_config(file, {})


def test_folder_of_a_model_on_the_cluster_need_not_be_on_this_machine(tmp_path):
    file = tmp_path / "fairlead.yaml"
    file.write_text("cluster: {}\nmodels: {a: {path: /nowhere/qwen, replicas: {max: 2}}}")
    (found,) = read_config(file, {}).config.models
    assert found.path == Path("/nowhere/qwen")


def test_model_of_the_command_line_runs_on_the_cluster(app, tmp_path):
    assert main(["serve", str(tmp_path), "--ray", "10.0.0.1:6379"]) == 0
    config = app.configs[-1]
    assert config.cluster == ClusterConfig(ray="10.0.0.1:6379")
    assert config.models[0].replicas == ReplicasConfig()


def test_address_of_the_command_line_overrides_that_of_the_file(app, tmp_path):
    file = tmp_path / "fairlead.yaml"
    file.write_text("cluster: {targetWait: 9s}\nmodels: {a: {path: /nowhere/qwen, replicas: {max: 2}}}")
    assert main(["serve", "--config", str(file), "--ray", "10.0.0.1:6379"]) == 0
    config = app.configs[-1]
    assert config.cluster == ClusterConfig(ray="10.0.0.1:6379", target_wait_s=9.0)
    assert config.models[0].replicas == ReplicasConfig(max=2)


def test_node_has_the_models_of_its_file_and_no_queue(app, tmp_path):
    file = tmp_path / "fairlead.yaml"
    file.write_text(f"models: {{a: {{path: {tmp_path}}}}}")
    assert main(["node", "--config", str(file)]) == 0
    config = app.configs[-1]
    assert [each.name for each in config.models] == ["a"]
    assert config.queue.capacity == 0
    assert main(["node", "--config", str(file), "--ray", "auto"]) == 2


def test_file_of_a_replica_has_all_settings_of_its_model(tmp_path):
    configured = model(
        slots=4,
        max_model_len=100,
        special_tokens="parse",
        kv_cache=KvCacheConfig(max_memory_mb=64, isolate_tenants=True),
        watchdog_s=7.0,
        wire_format="hermes",
        aliases=("q",),
        ttl_s=60.0,
        replicas=ReplicasConfig(max=3, cpus=2.5),
    )
    order = start_order(configured, configured.replicas, 4)
    file = tmp_path / "fairlead.yaml"
    (tmp_path / "qwen").mkdir()
    file.write_bytes(order.config.replace(b"/models/qwen", str(tmp_path / "qwen").encode()))
    (found,) = read_config(file, {}).config.models
    here = msgspec.structs.replace(
        configured,
        path=tmp_path / "qwen",
        aliases=(),
        replicas=None,
        ttl_s=0.0,
        threads=2,
        preload=True,
    )
    assert found == here
    assert (order.id, order.cpus, order.gpus) == ("ray:qwen:4", 2.5, 0.0)


def test_replicas_are_equal_unless_their_node_or_their_resources_differ():
    before = start_order(model(), ReplicasConfig(), 1)
    assert start_order(model(), ReplicasConfig(min=2, max=5), 2).digest == before.digest
    assert start_order(model(slots=2), ReplicasConfig(), 1).digest != before.digest
    assert start_order(model(), ReplicasConfig(cpus=2), 1).digest != before.digest


def test_every_rank_of_a_model_has_a_gpu_of_its_own():
    assert start_order(model(device="cuda", parallel=4), ReplicasConfig(), 1).gpus == 4.0
    assert start_order(model(device="cpu", parallel=4), ReplicasConfig(), 1).gpus == 0.0


def test_gpu_is_reserved_for_a_model_on_a_gpu():
    order = start_order(model(device="cuda", threads=3), ReplicasConfig(memory_mb=10), 1)
    assert (order.cpus, order.gpus, order.memory_bytes) == (3.0, 1.0, 10 * 1024 * 1024)
    assert json.loads(order.config)["models"]["qwen"]["device"] == "cuda"
