"""The part of the Kubernetes API that a lease needs, over HTTP: versions, conflicts and failures."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from fairlead.config.lease import ClusterAccess

FOLDER = "/apis/coordination.k8s.io/v1/namespaces/team/leases"
TOKEN = "a token of the service account"


class ClusterApi:
    """A server that keeps Lease objects. `statuses` are the next answers' statuses, instead of real ones.

    Like the real one, it refuses an update of another version than the last (409), and a second creation.
    """

    def __init__(self, folder: Path) -> None:
        self.objects = {}
        self.statuses = []
        self.requests = []
        self._lock = threading.Lock()
        self._version = 0
        api = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def do_GET(self):
                api._answer(self, None)

            def do_POST(self):
                api._answer(self, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            do_PUT = do_POST  # noqa: N815  the name is that of the method

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        for name, text in (("token", TOKEN), ("namespace", "team")):
            (folder / name).write_text(text + "\n")
        self.access = ClusterAccess(
            f"http://127.0.0.1:{self._server.server_port}",
            token_file=str(folder / "token"),
            namespace_file=str(folder / "namespace"),
        )

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def change(self, name: str, **spec) -> None:
        """Write an object as another contender does."""
        with self._lock:
            self._store(name, {"metadata": {"name": name}, "spec": spec})

    def _answer(self, handler: BaseHTTPRequestHandler, body) -> None:
        with self._lock:
            self.requests.append(handler.command)
            status, answer = self._handle(handler, body)
        text = json.dumps(answer).encode()
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(text)))
        handler.end_headers()
        handler.wfile.write(text)

    def _handle(self, handler, body):
        if handler.headers["Authorization"] != f"Bearer {TOKEN}":
            return 401, {"kind": "Status"}
        if self.statuses:
            return self.statuses.pop(0), {"kind": "Status"}
        folder, _, name = handler.path.partition(FOLDER)
        assert folder == ""
        name = name.removeprefix("/")
        if handler.command == "POST":
            assert name == ""
            name = body["metadata"]["name"]
            if name in self.objects:
                return 409, {"kind": "Status", "reason": "AlreadyExists"}
            return 201, self._store(name, body)
        if name not in self.objects:
            return 404, {"kind": "Status", "reason": "NotFound"}
        if handler.command == "PUT":
            if body["metadata"]["resourceVersion"] != self.objects[name]["metadata"]["resourceVersion"]:
                return 409, {"kind": "Status", "reason": "Conflict"}
            self._store(name, body)
        return 200, self.objects[name]

    def _store(self, name, body):
        self._version += 1
        metadata = {**body["metadata"], "resourceVersion": str(self._version)}
        self.objects[name] = {**body, "metadata": metadata}
        return self.objects[name]
