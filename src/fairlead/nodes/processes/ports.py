"""The TCP ports of commands' servers: which are free, which commands have them, and who listens on them.

Two servers must not be confused: a command's own and another program's, which has its port. So a port must be
free before the command starts, and the program that listens on it afterwards must not be a stranger.

The command's own server is usually in its process group. It need not be: `docker run` lets a daemon listen,
and a script may start a server in a session of its own. So a stranger is a process outside the group that ran
before the command was started and is no container runtime. Where the system does not name the owner of a
socket (another system than Linux, another user's process), a listener that came after the start counts as the
command's own.
"""

import errno
import os
import socket
import sys
from collections.abc import Iterable, Iterator, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import NamedTuple

from fairlead.nodes.processes import memory

LAST_PORT = 65535
LOOPBACK = ("127.0.0.1", "::1")
# Programs that listen for containers. Daemons among them run before any command.
_RUNTIMES = (b"docker", b"containerd", b"podman", b"conmon", b"rootless", b"slirp4netns", b"pasta", b"crio")
_LISTENING = b"0A"
_EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104  # a server may listen there, and the port must be free for it

Address = IPv4Address | IPv6Address


class _Listener(NamedTuple):
    address: Address
    inode: bytes


# The ports of this process's commands: from before a command starts until its processes are gone. A server
# binds its port only some time after its start.
_held: set[int] = set()


def hold(port: int, addresses: Iterable[str]) -> bool:
    """Reserve a port for a command; return False if another command or another program has it."""
    if port in _held or not _is_free(port, addresses):
        return False
    _held.add(port)
    return True


def hold_next(port: int) -> int | None:
    """Reserve a port, or the next one that is free on all addresses; return it, or None if there is none."""
    return next((each for each in range(port, LAST_PORT + 1) if hold(each, _EVERYWHERE)), None)


def release(port: int) -> None:
    """End the reservation of a port."""
    _held.discard(port)


def is_local(address: str) -> bool:
    """Return whether an address is one of this machine."""
    return _bind(address, 0) is None


def _is_free(port: int, addresses: Iterable[str]) -> bool:
    """Return whether nothing listens on a port at these addresses.

    Other errors say nothing about the port: there is no such address, no IPv6, or no permission.
    """
    return all(_bind(address, port) != errno.EADDRINUSE for address in addresses)


def _bind(address: str, port: int) -> int | None:
    """Bind a socket as a server would, and close it; return the number of the error, if there is one."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ended connections keep no port
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind((address, port))
    except OSError as error:
        return error.errno
    return None


class PortOwner:
    """Finds strangers on the port of the process group `group`, whose server is used at `addresses`."""

    def __init__(self, port: int, addresses: Sequence[str], group: int) -> None:
        self._port = port
        self._addresses = [ip_address(address) for address in addresses]
        self._group = group
        self._own: dict[str, str] = {}  # the links in /proc to the sockets of the group

    def is_unchanged(self) -> bool:
        """Return whether all sockets that `find_stranger` has found are still the group's. Costs little."""
        try:
            return bool(self._own) and all(
                str(Path(link).readlink()) == own for link, own in self._own.items()
            )
        except OSError:
            return False

    def find_stranger(self) -> int | None:
        """Return the process id of a stranger that listens on the port; None if there is none that is known.

        Reads what the system shows of sockets and processes, which takes some milliseconds.
        """
        self._own = {}
        if not sys.platform.startswith("linux") or not (inodes := self._inodes()):
            return None
        links = {f"socket:[{inode.decode()}]" for inode in inodes}
        members = memory.members(self._group)
        for pid in members:
            self._own |= {link: target for link, target in _sockets_of(pid) if target in links}
        others = links.difference(self._own.values())
        if not others or (began := memory.began_at(self._group)) is None:
            return None
        strangers = (pid for pid in memory.processes() if self._is_stranger(pid, began))
        return next(
            (pid for pid in strangers if any(target in others for _, target in _sockets_of(pid))), None
        )

    def _inodes(self) -> set[bytes]:
        """Return the sockets that connections to the addresses would reach."""
        listeners = list(_listeners(self._port))
        found: set[bytes] = set()
        for address in self._addresses:
            exact = {each.inode for each in listeners if each.address == address}
            same = {each.inode for each in listeners if _is_wildcard_of(each.address, address.version)}
            found |= exact or same or {each.inode for each in listeners if each.address == IPv6Address("::")}
        return found

    def _is_stranger(self, pid: int, began: int) -> bool:
        since = memory.began_at(pid)
        return since is not None and since < began and not memory.name_of(pid).startswith(_RUNTIMES)


def _is_wildcard_of(address: Address, version: int) -> bool:
    return address.version == version and address.is_unspecified


def _listeners(port: int) -> Iterator[_Listener]:
    for file in ("tcp", "tcp6"):
        try:
            lines = (memory.PROC / "self" / "net" / file).read_bytes().splitlines()[1:]
        except OSError:
            continue
        suffix = b":%04X" % port
        for line in lines:
            fields: list[bytes] = line.split() if suffix in line else []
            if len(fields) > 9 and fields[3] == _LISTENING and fields[1].endswith(suffix):
                yield _Listener(_address_of(fields[1].partition(b":")[0].decode()), fields[9])


def _address_of(text: str) -> Address:
    """Return an address as the kernel writes it: words of 32 bits in the machine's order of bytes."""
    raw = bytes.fromhex(text)
    words = (raw[start : start + 4] for start in range(0, len(raw), 4))
    packed = b"".join(word[::-1] if sys.byteorder == "little" else word for word in words)
    address: Address = IPv6Address(packed) if len(packed) == 16 else IPv4Address(packed)
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address


def _sockets_of(pid: int) -> Iterator[tuple[str, str]]:
    """Yield the link of each open socket of a process, and its target. Nothing if we may not see them."""
    folder = f"/proc/{pid}/fd"
    try:
        names = os.listdir(folder)  # noqa: PTH208  # called for each process of the machine
    except OSError:
        return
    for name in names:
        link = f"{folder}/{name}"
        try:
            target = str(Path(link).readlink())
        except OSError:  # closed meanwhile
            continue
        if target.startswith("socket:"):
            yield link, target
