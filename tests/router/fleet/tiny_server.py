"""A server that starts at once: it imports little, and answers every request with the same text.

    python -IS tiny_server.py PORT

With `stream` in the body it streams. It is for tests that start hundreds of servers. For misbehavior, see
`stub_server`.
"""

import socket
import sys

TEXT = "tiny"
_CHOICE = '{"choices": [{"index": 0, "%s": {"content": "%s"}, "finish_reason": "stop"}]}'
_WHOLE = (_CHOICE % ("message", TEXT)).encode()
_STREAM = f"data: {_CHOICE % ('delta', TEXT)}\n\ndata: [DONE]\n\n".encode()


def main() -> None:
    listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
    while True:
        connection, _ = listener.accept()
        with connection:
            try:
                _answer(connection)
            except OSError:
                """The client did not wait for the response, which may be slow on a busy machine."""


def _answer(connection: socket.socket) -> None:
    request = b""
    while b"\r\n\r\n" not in request:
        data = connection.recv(1 << 16)
        if not data:
            return
        request += data
    head, _, body = request.partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0] or 0)
    while len(body) < length:
        data = connection.recv(1 << 16)
        if not data:
            return
        body += data
    streams = b'"stream":true' in body.replace(b" ", b"")
    answer = _STREAM if streams else _WHOLE
    kind = b"text/event-stream" if streams else b"application/json"
    connection.sendall(
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n%s"
        % (kind, len(answer), answer)
    )


if __name__ == "__main__":
    main()
