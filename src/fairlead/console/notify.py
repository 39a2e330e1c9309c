"""Tells systemd how the server is (`Type=notify`): one datagram to the socket that it names, nothing else.

The protocol is sd_notify(3). Without NOTIFY_SOCKET in the environment nothing happens; a manager that does
not listen must not stop the server either.
"""

import os
import socket
from contextlib import suppress


def notify(*words: str) -> None:
    """Send states, as `READY=1` or `STATUS=…`."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address or not hasattr(socket, "AF_UNIX"):
        return
    if address.startswith("@"):  # Linux's abstract names
        address = "\0" + address[1:]
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to:
        to.connect(address)
        to.send("\n".join(words).encode())
