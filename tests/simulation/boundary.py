"""Replaces the parts of the operating system and of Trio that the server calls.

This patches the standard library and Trio (`socket.socket`, `trio.lowlevel.wait_readable`). In the product
it patches only `PROC` and `ProcessCollector`. All are restored when the context exits.
"""

import os
import pathlib
import select
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import trio

from simulation import sockets
from simulation.disk import Log, Proc
from simulation.machine import FIRST_DESCRIPTOR, Machine
from simulation.network import Network
from simulation.processes import Processes
from simulation.sockets import Epoll, FakeSocket, Poll

THREAD_S = 0.001


class Signals:
    """Delivers signals to `trio.open_signal_receiver`."""

    def __init__(self) -> None:
        self._receivers: list[tuple[frozenset[int], trio.MemorySendChannel[int]]] = []

    @contextmanager
    def receiver(self, *numbers: int) -> Iterator[AsyncIterator[int]]:
        """Replace `trio.open_signal_receiver`."""
        send, receive = trio.open_memory_channel[int](100)
        entry = (frozenset(numbers), send)
        self._receivers.append(entry)
        try:
            yield receive
        finally:
            self._receivers.remove(entry)

    def send(self, number: signal.Signals) -> None:
        """Send the server a signal."""
        for numbers, channel in self._receivers:
            if number in numbers:
                channel.send_nowait(number)


class System:
    """One simulated operating system."""

    def __init__(self, seed: int) -> None:
        self.machine = Machine(seed)
        self.network = Network(self.machine)
        self.processes = Processes(self.machine)
        self.signals = Signals()
        self.log = Log(self.machine)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Replace the real system with this one. Trio must be running already."""
        waits = _Waits(self.machine)
        FakeSocket.network = self.network
        with ExitStack() as stack:
            for owner, name, replacement in (
                (socket, "socket", FakeSocket),
                (socket, "socketpair", sockets.socketpair),
                (socket, "getaddrinfo", self._look_up),
                (select, "epoll", lambda: Epoll(self.machine)),
                (select, "poll", lambda: Poll(self.machine)),
                (os, "killpg", self.processes.send_signal_to_group),
                (sys, "stderr", self.log),
                (trio.lowlevel, "open_process", self.processes.open),
                (trio.to_thread, "run_sync", self._run_in_thread),
                (trio, "open_signal_receiver", self.signals.receiver),
                (pathlib.Path, "read_text", _checked(self.machine, pathlib.Path.read_text)),
                (sys.modules["fairlead.nodes.processes.memory"], "PROC", Proc(self.processes)),
                (sys.modules["fairlead.generation.metrics.metrics"], "ProcessCollector", _NoProcess),
            ):
                stack.enter_context(patch.object(owner, name, replacement))
            waiting = {name: waits.of(name) for name in ("wait_readable", "wait_writable", "notify_closing")}
            for name, replacement in waiting.items():
                stack.enter_context(patch.object(trio.lowlevel, name, replacement))
                stack.enter_context(patch.object(trio._core, name, replacement))
            for name, wait in (
                ("_accept", "wait_readable"),
                ("recv", "wait_readable"),
                ("recv_into", "wait_readable"),
                ("send", "wait_writable"),
            ):
                method = _socket_method(name.removeprefix("_"), waiting[wait])
                stack.enter_context(patch.object(trio._socket._SocketType, name, method))
            yield

    def _look_up(
        self,
        host: str | bytes | None,
        port: Any,
        family: int = 0,
        type: int = 0,  # noqa: A002
        proto: int = 0,
        flags: int = 0,
    ) -> list[tuple[Any, ...]]:
        name = host.decode() if isinstance(host, bytes) else host
        return self.network.look_up(name, port, family, flags)

    async def _run_in_thread(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        thread_name: str | None = None,
        abandon_on_cancel: bool = False,
        limiter: trio.CapacityLimiter | None = None,
    ) -> Any:
        """Replace `trio.to_thread.run_sync`: call the function in this thread, after `THREAD_S`."""
        await trio.lowlevel.checkpoint_if_cancelled()
        limiter = limiter or trio.to_thread.current_default_thread_limiter()
        borrower = object()
        await limiter.acquire_on_behalf_of(borrower)
        try:
            self.machine.call("thread")
            with trio.CancelScope(shield=not abandon_on_cancel):
                await trio.sleep(THREAD_S)
            return function(*arguments)
        finally:
            limiter.release_on_behalf_of(borrower)


class _Waits:
    """Trio's functions that wait for descriptors, for simulated and for real ones."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def of(self, name: str) -> Callable[[Any], Any]:
        real = getattr(trio.lowlevel, name)
        ours = getattr(self, name)

        def chosen(fd: Any) -> Any:
            is_ours = isinstance(fd, FakeSocket | Epoll) or sockets.number_of(fd) >= FIRST_DESCRIPTOR
            return ours(fd) if is_ours else real(fd)

        return chosen

    async def wait_readable(self, fd: Any) -> None:
        await self._machine.opened(sockets.number_of(fd)).wait("read")

    async def wait_writable(self, fd: Any) -> None:
        await self._machine.opened(sockets.number_of(fd)).wait("write")

    def notify_closing(self, fd: Any) -> None:
        self._machine.opened(sockets.number_of(fd)).closing()


def _socket_method(name: str, wait: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return a method for Trio's sockets, which otherwise call the real class's function of this name."""

    async def method(self: Any, *arguments: Any, **options: Any) -> Any:
        def call(sock: socket.socket, *arguments: Any, **options: Any) -> Any:
            return getattr(sock, name)(*arguments, **options)

        return await self._nonblocking_helper(wait, call, *arguments, **options)

    return method


class _NoProcess:
    """Replaces the metrics of the real process, which differ from run to run."""

    def __init__(self, **_: Any) -> None:
        pass

    def collect(self) -> list[Any]:
        return []


def _checked(machine: Machine, read: Callable[..., str]) -> Callable[..., str]:
    """Return `Path.read_text` with injected faults."""

    def checked(path: Path, *arguments: Any, **options: Any) -> str:
        machine.call("read_file")
        return read(path, *arguments, **options)

    return checked
