"""Reports the server's state to systemd (`Type=notify`), with one datagram to the socket that it names.

The protocol is sd_notify(3). Without NOTIFY_SOCKET in the environment nothing is sent. Errors are ignored: a
service manager that does not listen must not stop the server.
"""

import os
import socket
from contextlib import suppress


def notify(*words: str) -> None:
    """Send states, such as `READY=1` or `STATUS=…`."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address or not hasattr(socket, "AF_UNIX"):
        return
    if address.startswith("@"):  # Linux's abstract socket names
        address = "\0" + address[1:]
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to:
        to.connect(address)
        to.send("\n".join(words).encode())
