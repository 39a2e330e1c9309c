"""The scheduler, the eviction policy and the control of processes can be replaced without other changes."""

import os
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from e2e.real_server import START_S, configured, real_server
from fairlead.base.config import ConfigError, NamedSwap, QueueConfig
from fairlead.base.errors import LoadFailed, QueueFull
from fairlead.base.registry import Registry
from fairlead.generation.gateway import spec_of
from fairlead.nodes.model_process import ProcessOptions, make_process
from fairlead.router.dispatch import schedulers
from fairlead.router.dispatch.dispatcher import Dispatcher
from fairlead.router.dispatch.schedulers import SCHEDULERS, default_scheduler
from fairlead.router.dispatch.scheduling import SchedulingOptions
from fairlead.router.swap.policies import POLICIES, policy_for
from fake_nodes import LIMITS, job
from router.dispatch.recorded import RecordedEffects
from router.fleet.running_fleet import engine, question, running_fleet, sleeper
from server.configfile.conftest import ConfigFile

ENTRY_POINTS = """\
[fairlead.schedulers]
closed = acme:closed
broken = acme:missing
default = acme:closed

[fairlead.eviction_policies]
only = acme:Only
"""
ACME = '''\
from fairlead.router.dispatch.scheduler import Scheduler
from fairlead.base.errors import QueueFull
from fairlead.router.swap.policy import EvictionPolicy


class Closed(Scheduler):
    """Refuses every job."""

    def submit(self, ticket, *, too_long=None):
        self._tickets.refuse(ticket, QueueFull("closed"))


def closed(effects, options):
    return Closed(effects, capacity=options.queue.capacity, random=options.random)


class Only(EvictionPolicy):
    """Only the models of the settings stay when another is loaded."""

    def __init__(self, settings, memory_mb, gpus):
        if "stay" not in settings:
            raise ValueError("stay is missing")
        self.stay = frozenset(settings["stay"])

    def eviction_for(self, target, running):
        return frozenset(running) - self.stay
'''


@pytest.fixture
def acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of an installed package that provides a scheduler and an eviction policy."""
    folder = tmp_path / "site"
    information = folder / "acme-1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(ENTRY_POINTS)
    (folder / "acme.py").write_text(ACME)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "acme", raising=False)
    return folder


# Names ----------------------------------------------------------------------------------------------


def test_implementation_is_found_by_its_name():
    assert SCHEDULERS.find("default") is default_scheduler
    assert SCHEDULERS.names() == ["default"]
    assert POLICIES.names() == ["group", "keep", "lru", "matrix"]


def test_error_for_an_unknown_name_has_the_setting_and_all_names(acme):
    with pytest.raises(ConfigError) as refused:
        SCHEDULERS.find("fifo", "scheduler")
    assert str(refused.value) == ("scheduler: there is no scheduler 'fifo'; known: broken, closed, default")
    assert [fault.path for fault in refused.value.faults] == [("scheduler",)]


def test_implementation_of_another_package_that_cannot_be_imported_is_an_error(acme):
    with pytest.raises(ConfigError, match=r"the scheduler 'broken' cannot be imported: .*missing"):
        SCHEDULERS.find("broken", "scheduler")


def test_another_package_cannot_replace_a_built_in_implementation(acme):
    assert SCHEDULERS.find("default") is default_scheduler


def test_empty_registry_has_no_name():
    empty: Registry[object] = Registry("thing", "fairlead.nothing", {})
    with pytest.raises(ConfigError, match=r"there is no thing 'x'; known: $"):
        empty.find("x")


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("dispatch", ["JobScheduler", "SchedulerFactory", "SCHEDULERS", "fairlead.schedulers"]),
        ("swap", ["eviction_for", "reason_for", "POLICIES", "fairlead.eviction_policies"]),
        ("dispatch", ["ModelProcess", "ProcessFactory", "make_process"]),
    ],
)
def test_pages_for_developers_name_the_interface_and_the_registry_of_each_part(page, names):
    text = (Path(schedulers.__file__).parents[1] / page / "design.md").read_text(encoding="utf-8")
    assert [name for name in names if f"`{name}`" not in text] == []


# Settings -------------------------------------------------------------------------------------------


def test_file_with_unknown_names_is_refused_with_their_lines(tmp_path):
    file = ConfigFile(tmp_path)
    text = """\
        scheduler: fifo
        models: {qwen: {path: small}}
        """
    assert file.faults(text) == ["fairlead.yaml:1: scheduler: there is no scheduler 'fifo'; known: default"]
    text = """\
        models: {qwen: {path: small}}
        routing:
          router: {use: none}
        """
    known = "group, keep, lru, matrix"
    assert file.faults(text) == [
        f"fairlead.yaml:3: routing.router.use: there is no eviction policy 'none'; known: {known}"
    ]


def test_file_selects_implementations_of_another_package_with_their_settings(acme, tmp_path):
    text = """\
        scheduler: closed
        models: {qwen: {path: small}}
        routing: {router: {use: only, settings: {policy: {stay: [a]}}}}
        """
    reading = ConfigFile(tmp_path).reading(text)
    assert reading.config.scheduler == "closed"
    assert reading.config.swap == NamedSwap("only", {"stay": ["a"]})
    assert reading.without_effect == ()


def test_settings_that_a_policy_of_another_package_refuses_are_a_fault_of_the_file(acme, tmp_path):
    text = """\
        models: {qwen: {path: small}}
        routing: {router: {use: only}}
        """
    assert ConfigFile(tmp_path).faults(text) == [
        "fairlead.yaml:2: routing.router.settings.policy: stay is missing"
    ]


def test_settings_of_a_policy_that_is_not_in_use_are_named(tmp_path):
    text = """\
        models: {qwen: {path: small}}
        routing: {router: {use: keep, settings: {policy: {stay: [a]}}}}
        """
    reading = ConfigFile(tmp_path).reading(text)
    assert reading.without_effect == ("routing.router.settings.policy",)


# Behavior -------------------------------------------------------------------------------------------


async def test_dispatcher_uses_the_named_scheduler(acme, autojump_clock):
    dispatcher = Dispatcher(QueueConfig(), scheduler="closed")
    dispatcher.scheduler.node_up("node", frozenset("m"), LIMITS)
    with pytest.raises(QueueFull, match="closed"):
        async with dispatcher.seat(spec_of(job())):
            pass


def test_dispatcher_refuses_an_unknown_scheduler():
    with pytest.raises(ConfigError, match="there is no scheduler 'fifo'; known: default"):
        Dispatcher(QueueConfig(), scheduler="fifo")


def test_default_scheduler_receives_every_setting_of_the_queue(monkeypatch):
    monkeypatch.setattr(schedulers, "Scheduler", lambda _effects, **options: options)
    random = Random(0)
    queue = QueueConfig(
        capacity=7, fairness="tokens", min_share=0.25, tenant_weights={"a": 2.0}, waiting_bytes=9
    )
    assert default_scheduler(RecordedEffects(), SchedulingOptions(queue, random, rejects_loading=True)) == {
        "capacity": 7,
        "random": random,
        "fairness": "tokens",
        "min_share": 0.25,
        "tenant_weights": {"a": 2.0},
        "rejects_loading": True,
        "waiting_bytes": 9,
        "suspends": True,
        "preempting": [],
    }


async def test_named_policy_decides_evictions(acme):
    swap = NamedSwap("only", {"stay": ["a"]})
    async with running_fleet(sleeper("a"), sleeper("b"), sleeper("c"), swap=swap) as opened:
        for name in "abc":
            await opened.fleet.load(name)
        assert [status.state for status in opened.fleet.models()] == ["ready", "stopped", "ready"]


def test_policy_of_another_package_gives_its_reasons(acme):
    policy = policy_for(NamedSwap("only", {"stay": ["a"]}), {})
    assert policy.reason_for("c", ["a", "b"]).chosen == ("a", "c")


class RefusingFactory:
    """Records the models; refuses the first run and every second one after it."""

    def __init__(self) -> None:
        self.models: list[str] = []

    def __call__(self, options: ProcessOptions):
        self.models.append(options.config.name)
        if len(self.models) % 2:
            raise LoadFailed(f"{options.config.name}: no container is free")
        return make_process(options)


async def test_models_run_in_the_processes_that_the_factory_makes():
    process = RefusingFactory()
    async with running_fleet(engine("x"), make_process=process) as opened:
        with pytest.raises(LoadFailed, match="x: no container is free"):
            await opened.fleet.load("x")
        assert opened.status("x").state == "failed"
        assert await opened.run_job(question("x"))
        await opened.fleet.unload("x")
    assert process.models == ["x", "x"]


def test_configuration_file_selects_the_scheduler(acme, tmp_path):
    environment = {
        "PYTHONPATH": os.pathsep.join([str(acme), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    }
    arguments = configured(tmp_path, {"preload": False}, scheduler="closed")
    with real_server(*arguments, environment=environment) as server:
        refused = server.http.post("/v1/completions", json={"prompt": "Hello"})
        assert refused.status_code == 429
        assert refused.json()["error"]["message"].startswith("closed")


def test_server_with_an_unknown_scheduler_does_not_start(tmp_path):
    arguments = configured(tmp_path, {}, scheduler="fifo")
    command = [sys.executable, "-m", "fairlead", "serve", "--port", "0", *arguments]
    process = subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=False)
    assert process.returncode == 2
    assert "scheduler: there is no scheduler 'fifo'; known: default" in process.stderr
