"""Ports of commands: one that another program has is not used, and a stranger on it is found."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from fairlead.nodes.processes import memory, ports
from fairlead.nodes.processes.ports import LOOPBACK, PortOwner, hold, hold_next, release
from router.fleet.running_fleet import free_port

LISTEN = """
import os, socket, sys, time
if {forks}:
    if os.fork(): time.sleep(1000)
    os.setsid()
sock = socket.socket(socket.AF_INET6 if ':' in {address!r} else socket.AF_INET)
sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
sock.bind(({address!r}, {port}))
sock.listen()
print(os.getpid(), flush=True)
time.sleep(1000)
"""


@contextmanager
def listening(port: int, address: str = "127.0.0.1") -> Iterator[None]:
    """Listen on a port in this process, which began before all that a test starts."""
    with socket.create_server((address, port), family=_family(address)):
        yield


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


@contextmanager
def program(port: int, address: str = "127.0.0.1", *, forks: bool = False) -> Iterator[int]:
    """Run a program in a group of its own that listens on a port; yield the id of the group."""
    script = LISTEN.format(port=port, address=address, forks=forks)
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    listener = int(process.stdout.readline())
    try:
        yield process.pid
    finally:
        for pid in {listener, process.pid}:
            os.kill(pid, 9)
        process.wait()
        process.stdout.close()


def has_ipv6() -> bool:
    with socket.socket(socket.AF_INET6) as sock:
        try:
            sock.bind(("::1", 0))
        except OSError:
            return False
    return True


ADDRESSES = ["127.0.0.1", "0.0.0.0", *(["::1", "::"] if has_ipv6() else [])]


@pytest.mark.parametrize("address", ADDRESSES)
def test_port_on_which_another_program_listens_cannot_be_held(address):
    port = free_port(2)
    with listening(port, address):
        assert not hold(port, LOOPBACK)
        assert hold_next(port) == port + 1
    release(port + 1)
    assert hold(port, LOOPBACK)
    release(port)


def test_port_that_a_command_will_bind_is_not_given_to_another():
    port = free_port(3)
    try:
        assert [hold_next(port), hold_next(port), hold(port, LOOPBACK)] == [port, port + 1, False]
    finally:
        release(port)
        release(port + 1)


def test_port_of_connections_that_have_ended_is_free():
    port = free_port()
    server = socket.create_server(("127.0.0.1", port))
    with server, socket.create_connection(("127.0.0.1", port)):
        accepted, _ = server.accept()
        accepted.close()  # first, so that it is this side that waits
    assert hold(port, LOOPBACK)
    release(port)


def test_address_of_another_machine_says_nothing():
    assert not ports.is_local("192.0.2.1")
    assert ports.is_local("127.0.0.1")


@pytest.mark.parametrize("address", ADDRESSES)
def test_listener_of_the_group_is_no_stranger_and_is_remembered(address):
    port = free_port()
    with program(port, address) as group:
        owner = PortOwner(port, LOOPBACK, group)
        assert not owner.is_unchanged()
        assert owner.find_stranger() is None
        assert owner.is_unchanged()
    assert not owner.is_unchanged()


def test_server_in_a_session_of_its_own_that_the_command_has_started_is_no_stranger():
    port = free_port()
    with program(port, forks=True) as group:
        assert PortOwner(port, LOOPBACK, group).find_stranger() is None


@pytest.mark.parametrize("address", ADDRESSES)
def test_program_that_ran_before_the_command_is_a_stranger(address):
    port = free_port(2)
    with listening(port, address), program(port + 1) as group:
        assert PortOwner(port, LOOPBACK, group).find_stranger() == os.getpid()


@pytest.mark.skipif(not has_ipv6(), reason="needs IPv6")
def test_stranger_on_one_of_the_addresses_is_enough():
    port = free_port()
    with listening(port, "::1"), program(port) as group:
        assert PortOwner(port, LOOPBACK, group).find_stranger() == os.getpid()
        assert PortOwner(port, ["127.0.0.1"], group).find_stranger() is None


@pytest.mark.parametrize("name", [b"dockerd", b"docker-proxy", b"rootlessport"])
def test_container_runtime_is_no_stranger(name, monkeypatch):
    monkeypatch.setattr(memory, "name_of", lambda _pid: name)
    port = free_port(2)
    with listening(port), program(port + 1) as group:
        assert PortOwner(port, LOOPBACK, group).find_stranger() is None


def test_nothing_is_known_where_the_system_does_not_tell(monkeypatch, tmp_path):
    port = free_port(2)
    with listening(port), program(port + 1) as group:
        monkeypatch.setattr(memory, "PROC", tmp_path)
        assert PortOwner(port, LOOPBACK, group).find_stranger() is None
