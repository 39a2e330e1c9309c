"""An HTTP server that echoes requests, and misbehaves on some paths.

    python -I echo_server.py PORT

/health   200                                /page    a page, with headers that affect the whole origin
/status/N a response with status N           /cut     closes the connection in the middle of a body
/hang     sends part of a body, then nothing
/big      2 MB, in chunks                    others   method, path, headers and body of the request, as JSON
"""

import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

BIG = bytes(range(256)) * 8000


class Echo(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        path = self.path.partition("?")[0]
        if path == "/health":
            self.send(200, b"{}")
        elif path == "/page":
            headers = {
                "Content-Type": "text/html; charset=utf-8",
                "Set-Cookie": "a=b",
                "Access-Control-Allow-Origin": "*",
                "X-Custom": "kept",
                "Connection": "X-Hop",
                "X-Hop": "dropped",
                "ETag": '"1"',
            }
            self.send(200, b"<h1>hello</h1>", headers)
        elif path.startswith("/status/"):
            self.send(int(path.rpartition("/")[2]), b'{"theirs": true}')
        elif path == "/cut":
            self.send_response(200)
            self.send_header("Content-Length", "100")
            self.end_headers()
            self.wfile.write(b"half")
            self.close_connection = True
        elif path == "/hang":
            self.send_response(200)
            self.send_header("Content-Length", "100")
            self.end_headers()
            self.wfile.write(b"begun")
            time.sleep(600)
        elif path == "/big":
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for start in range(0, len(BIG), 65536):
                piece = BIG[start : start + 65536]
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            self.wfile.write(b"0\r\n\r\n")
        else:
            response = {
                "method": self.command,
                "path": self.path,
                "headers": {name.lower(): value for name, value in self.headers.items()},
                "body": body.decode("latin-1"),
            }
            self.send(200, json.dumps(response).encode())

    def send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {"Content-Type": "application/json"}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_arguments: object) -> None:
        """Log nothing."""


for method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"):
    setattr(Echo, f"do_{method}", Echo.answer)

if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Echo).serve_forever()
