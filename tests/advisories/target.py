"""The server that the tests attack, and checks that it works as before."""

import contextlib
import json
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from e2e.real_server import RealServer

# No test measures elapsed time. This bound only turns a hang into a failure.
HANG_S = 30

MODEL = "fairlead-demo"
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
# The part of a raw request between its path and its own headers.
HEAD = "HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
CANARY = {"prompt": "The owl and the fox", "max_tokens": 24, "temperature": 0, "ignore_eos": True}

# An answer must not contain addresses of objects, installed files or tracebacks.
_LEAKS = re.compile(r"0x[0-9a-f]{6,}|object at|Traceback|site-packages|\w+\.py\b|File \"", re.IGNORECASE)
_LISTENING = "0A"


def chat(*, content: Any = "hello", **fields: Any) -> dict[str, Any]:
    """Return the body of a short chat request."""
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 4, "temperature": 0, **fields}


def completion(**fields: Any) -> dict[str, Any]:
    """Return the body of a short completion request."""
    return {"prompt": "hello", "max_tokens": 4, "temperature": 0, **fields}


class Answer(NamedTuple):
    """The answer on a raw connection."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        """The error in OpenAI's form."""
        return json.loads(self.body)["error"]


class Target:
    """A running server and the text of its canary request."""

    def __init__(self, running: RealServer, key: str | None = None) -> None:
        self.running = running
        self.headers = {"Authorization": f"Bearer {key}"} if key is not None else {}
        self.http = httpx.Client(base_url=running.url, timeout=HANG_S, headers=self.headers)
        # `RealServer` sends requests to check that nothing is left; they also need the key.
        running.http.headers.update(self.headers)
        self.canary_text = self.canary()

    def canary(self) -> str:
        """Return the text of the canary request, which is greedy and always the same."""
        answer = self.http.post(COMPLETIONS, json=CANARY)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        """Send a body, encoded as JSON unless it is bytes, and return the checked response."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return checked(self.http.post(path, content=content, **options))

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Send any other request and return the checked response."""
        return checked(self.http.request(method, path, **options))

    def text(self, body: dict[str, Any]) -> str:
        """Return the text of the answer to a completion request."""
        answer = self.post(COMPLETIONS, body)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]

    def refuses(self, path: str, body: Any, param: str | None, **options: Any) -> httpx.Response:
        """Check that a request is answered by a 400 that names this parameter (None: any)."""
        answer = self.post(path, body, **options)
        assert answer.status_code == 400, (answer.status_code, answer.text[:300])
        if param is not None:
            assert (answer.json()["error"]["param"] or "").startswith(param), answer.text[:300]
        return answer

    def refuses_everywhere(self, field: str, value: Any) -> None:
        """Check that both generating routes refuse this field by name."""
        self.refuses(COMPLETIONS, completion(**{field: value}), field)
        self.refuses(CHAT, chat(**{field: value}), field)

    def refuses_or_serves(self, **fields: Any) -> None:
        """Check that both generating routes answer these fields, or refuse them with a 400."""
        for path, body in ((COMPLETIONS, completion(**fields)), (CHAT, chat(**fields))):
            answer = self.post(path, body)
            assert answer.status_code in {200, 400}, (answer.status_code, answer.text[:300])

    def refuses_or_ignores(self, **fields: Any) -> None:
        """Check that these fields are refused by name or do not change the completion."""
        answer = self.post(COMPLETIONS, completion(**fields))
        if answer.status_code == 400:
            assert re.split(r"[.\[]", answer.json()["error"]["param"])[0] in fields, answer.text[:300]
        else:
            assert answer.json()["choices"][0]["text"] == self.text(completion())

    @contextlib.contextmanager
    def connection(self) -> Iterator[socket.socket]:
        """Open a connection for bytes that no client library would send."""
        with socket.create_connection(self.running.address, timeout=HANG_S) as sock:
            yield sock

    def raw(self, data: bytes) -> Answer:
        """Send bytes; return the first answer, read to its end or to the end of the connection."""
        with self.connection() as sock:
            with contextlib.suppress(ConnectionError):  # the server may refuse before it has read everything
                sock.sendall(data)
            return read_answer(sock)

    def pids(self) -> set[int]:
        """Return the process ids of the server and of its models."""
        return {self.running.process.pid, *self.running.child_pids()}

    def listening_ports(self) -> set[int]:
        """Return the TCP ports on which the server and its models listen, on any address."""
        inodes = {inode for pid in self.pids() for inode in _socket_inodes(pid)}
        return {
            int(local.rpartition(":")[2], 16)
            for table in ("tcp", "tcp6")
            for local, state, inode in _connections(table)
            if state == _LISTENING and inode in inodes
        }

    def peak_memory_bytes(self) -> int:
        """Return the peak memory of the server's own process so far."""
        status = Path(f"/proc/{self.running.process.pid}/status").read_text()
        (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024

    def cpu_s(self) -> float:
        """Return the processor time that the server's own process has used so far."""
        fields = Path(f"/proc/{self.running.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def assert_unharmed(self, log_lines: int) -> None:
        """Check that the canary has the same text, nothing is left, and no error was logged.

        `log_lines`: the number of lines in the log before the attack.
        """
        assert self.running.process.poll() is None, "".join(self.running.log)
        assert self.canary() == self.canary_text
        assert not any(self.running.wait_until_at_rest().values())
        assert self.http.get("/health").status_code == 200
        new_lines = "".join(self.running.log[log_lines:])
        assert "Traceback" not in new_lines, new_lines
        assert "[error" not in new_lines, new_lines


def checked(answer: httpx.Response) -> httpx.Response:
    """Check that a response is no 5xx and discloses nothing about the process or its files; return it."""
    assert answer.status_code < 500, (answer.status_code, answer.text[:500])
    if answer.headers.get("content-type", "").startswith("application/json"):
        assert _LEAKS.search(answer.text) is None, answer.text[:500]
    return answer


def read_answer(sock: socket.socket) -> Answer:
    """Read one answer that has a length, or one that ends with the connection."""
    received = b""
    while b"\r\n\r\n" not in received:
        data = _received(sock)
        assert data, f"the connection ended in the head of an answer: {received!r}"
        received += data
    head, _, body = received.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    length = int(headers["content-length"]) if "content-length" in headers else None
    while (length is None or len(body) < length) and (data := _received(sock)):
        body += data
    return Answer(int(first.split(" ")[1]), headers, body)


def read_all(sock: socket.socket) -> bytes:
    """Read until the server closes or resets the connection."""
    received = b""
    while data := _received(sock):
        received += data
    return received


def _received(sock: socket.socket) -> bytes:
    try:
        return sock.recv(65536)
    except ConnectionError:
        return b""


def _socket_inodes(pid: int) -> Iterator[str]:
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # it has just been closed
            if (name := link.readlink().name).startswith("socket:["):
                yield name.removeprefix("socket:[").removesuffix("]")


def _connections(table: str) -> Iterator[tuple[str, str, str]]:
    """Yield local address, state and inode of every TCP socket of the machine."""
    for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
        fields = line.split()
        yield fields[1], fields[3], fields[9]
