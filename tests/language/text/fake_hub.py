"""A fake model hub on the loopback interface, with the routes that `huggingface_hub` requests."""

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """Serve `files` ([repository][path] → bytes). `requests` has (method, path, authorization) of each.

    `private` repositories require a token; `gated` ones refuse every token. A GET of a `broken` file
    returns other content than its HEAD announced.
    """

    def __init__(self, files):
        self.files = files
        self.private, self.gated, self.broken = set(), set(), set()
        self.requests = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                hub.answer(self)

            def do_HEAD(self):
                hub.answer(self)

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def answer(self, request):
        path = request.path.split("?")[0]
        self.requests.append((request.command, request.path, request.headers.get("Authorization")))
        kind, repository, rest = self._route(path)
        if repository not in self.files:
            return self._send(request, 404, {"error": "no"}, {"X-Error-Code": "RepoNotFound"})
        if repository in self.gated:
            return self._send(request, 403, {"error": "no"}, {"X-Error-Code": "GatedRepo"})
        if repository in self.private and request.headers.get("Authorization") != "Bearer secret":
            return self._send(request, 401, {"error": "no"}, {"X-Error-Code": "RepoNotFound"})
        files = self.files[repository]
        if kind == "resolve":
            return self._file(request, files, rest.split("/", 1)[1])
        if rest.startswith("revision/") and rest.removeprefix("revision/") not in {"main", COMMIT}:
            return self._send(request, 404, {"error": "no"}, {"X-Error-Code": "RevisionNotFound"})
        if rest.startswith("tree/"):
            return self._send(request, 200, [entry(name, content) for name, content in files.items()])
        siblings = [{"rfilename": name, "size": len(content)} for name, content in files.items()]
        return self._send(request, 200, {"id": repository, "sha": COMMIT, "siblings": siblings})

    def _route(self, path):
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/?(.*)", path):
            return "api", *match.groups()
        if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/(.+)", path):
            return "resolve", *match.groups()
        return "", None, ""

    def _file(self, request, files, name):
        if name not in files:
            return self._send(request, 404, {"error": "no"}, {"X-Error-Code": "EntryNotFound"})
        content = files[name]
        headers = {"ETag": f'"{digest(content)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if name in self.broken and request.command == "GET":
            headers["ETag"], content = '"another"', b"no weights at all"
        return self._send(request, 200, content, headers)

    def _send(self, request, status, body, headers=None):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request.send_response(status)
        for name, value in (headers or {}).items():
            request.send_header(name, value)
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        if request.command == "GET":
            request.wfile.write(data)


def entry(name, content):
    return {"type": "file", "path": name, "size": len(content), "oid": digest(content)}


def digest(content):
    return hashlib.sha1(content).hexdigest()
