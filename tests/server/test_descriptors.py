"""The number of connections for the available descriptors, and how the limit of descriptors is raised."""

import resource
import sys

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from fairlead.base.config import Config, Limits, NodeConfig
from fairlead.server import descriptors
from router.fleet.running_fleet import engine, sleeper

UNLIMITED = resource.RLIM_INFINITY


class FakeSystem:
    """A limit of descriptors that cannot be raised beyond `largest`."""

    def __init__(self, soft: int, hard: int, largest: int = 1 << 30) -> None:
        self.soft, self.hard, self.largest = soft, hard, largest

    def getrlimit(self, _which):
        return self.soft, self.hard

    def setrlimit(self, _which, limits):
        soft, hard = limits
        assert hard == self.hard, "the hard limit cannot be raised again"
        if soft > self.largest:
            raise ValueError("current limit exceeds maximum limit")
        self.soft = soft


@pytest.fixture
def raised(monkeypatch):
    """Raise the limit of a system; return the new soft limit and the log."""

    def raise_limit(system: FakeSystem, platform: str = "linux") -> tuple[int, list]:
        monkeypatch.setattr(resource, "getrlimit", system.getrlimit)
        monkeypatch.setattr(resource, "setrlimit", system.setrlimit)
        monkeypatch.setattr(sys, "platform", platform)
        with structlog.testing.capture_logs() as logs:
            descriptors.raise_limit()
        return system.soft, logs

    return raise_limit


def test_soft_limit_is_raised_to_the_hard_limit(raised):
    assert raised(FakeSystem(1024, 20_000)) == (20_000, [])
    assert raised(FakeSystem(100, 256)) == (256, [])


def test_unlimited_or_huge_hard_limit_is_not_adopted(raised):
    assert raised(FakeSystem(1024, UNLIMITED)) == (1 << 20, [])
    assert raised(FakeSystem(1024, 1_073_741_816)) == (1 << 20, [])


def test_high_limit_is_not_changed(raised):
    assert raised(FakeSystem(UNLIMITED, UNLIMITED)) == (UNLIMITED, [])
    assert raised(FakeSystem(2 << 20, 2 << 20)) == (2 << 20, [])
    assert raised(FakeSystem(1024, 1024, largest=0)) == (1024, [])


def test_limit_on_macos_is_that_of_the_kernel(raised):
    assert raised(FakeSystem(256, UNLIMITED, largest=10_240), "darwin") == (10_240, [])


def test_lower_bound_of_the_kernel_gives_a_lower_limit(raised):
    soft, logs = raised(FakeSystem(1024, UNLIMITED, largest=65_536))
    assert soft == 10_240
    assert [line["event"] for line in logs] == ["descriptor limit not raised"]


def test_refusal_by_the_system_is_only_logged(raised):
    soft, logs = raised(FakeSystem(1024, 4096, largest=1024))
    assert soft == 1024
    assert {line["log_level"] for line in logs} == {"warning"}


def config(*, models: int = 1, commands: int = 0, nodes: int = 0, connections: int = 4096) -> Config:
    return Config(
        models=(
            *(engine(f"m{number}") for number in range(models)),
            *(sleeper(f"c{number}") for number in range(commands)),
        ),
        nodes=tuple(NodeConfig(id=f"n{number}", url="http://127.0.0.1:1") for number in range(nodes)),
        limits=Limits(connections=connections),
    )


def test_configured_number_of_connections_is_used_if_descriptors_suffice():
    assert descriptors.share(config(), descriptors=20_000, in_use=12).connections == 4096
    assert descriptors.share(config(connections=7), descriptors=256, in_use=12).connections == 7


def test_connections_share_the_descriptors_beyond_the_reserve():
    share = descriptors.share(config(), descriptors=1024, in_use=12)
    assert share == descriptors.Share(connections=372, descriptors=1024, reserved=280)


def test_models_and_nodes_add_to_the_reserve():
    def reserved(**counts: int) -> int:
        return descriptors.share(config(**counts), descriptors=4096, in_use=12).reserved

    plain = reserved()
    assert reserved(models=2) - plain == descriptors.PER_MODEL
    assert reserved(nodes=1) - plain == descriptors.PER_NODE
    assert reserved(commands=1) - plain == descriptors.PER_MODEL + descriptors.PER_NODE


@given(
    st.integers(2, 1 << 21),
    st.integers(0, 500),
    st.integers(0, 100),
    st.integers(0, 100),
    st.integers(1, 100_000),
)
def test_connections_and_reserve_never_exceed_the_descriptors(limit, in_use, models, nodes, connections):
    settings = config(models=models, nodes=nodes, connections=connections)
    share = descriptors.share(settings, descriptors=limit, in_use=in_use)
    assert 1 <= share.connections <= connections
    assert share.reserved <= limit / 2
    if share.connections > 1:
        assert share.connections * descriptors.PER_CONNECTION + share.reserved <= limit
