"""The part of the Kubernetes API that a lease needs, over HTTP: versions, conflicts, RBAC and failures."""

import json
import ssl
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from fairlead.base.config.lease import ClusterAccess

NAMESPACE = "team"
FOLDER = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases"
TOKEN = "a token of the service account"
VERBS = {"GET": "get", "POST": "create", "PUT": "update"}


class ClusterApi:
    """A server that keeps Lease objects. `faults` are those of the next requests, in their order.

    Like the real one, it refuses an update of another version than the last (409), and a second creation. A
    fault is a status that is answered instead; "cut": the request is executed, and the connection closed; a
    time: the answer takes so many seconds. `rules` are those of a Role; None: everything is allowed.
    """

    def __init__(self, folder: Path, *, certificate=None, rules=None) -> None:
        self.objects = {}
        self.faults = []
        self.requests = []
        self.token = TOKEN
        self._rules = rules
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
        self._server.handle_error = lambda *_: None  # clients that give a request up
        scheme = "http"
        if certificate is not None:
            scheme = "https"
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(*certificate)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        for name, text in (("token", TOKEN), ("namespace", NAMESPACE)):
            (folder / name).write_text(text + "\n")
        self.access = ClusterAccess(
            f"{scheme}://127.0.0.1:{self._server.server_port}",
            token_file=str(folder / "token"),
            ca_file=str(certificate[0]) if certificate else str(folder / "ca.crt"),
            namespace_file=str(folder / "namespace"),
        )

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def change(self, name: str, **spec) -> None:
        """Write an object as another contender does."""
        with self._lock:
            before = self.objects.get(name, {"metadata": {"name": name}})
            self._store(name, {**before, "spec": {**before.get("spec", {}), **spec}})

    def delete(self, name: str) -> None:
        """Remove an object, as `kubectl delete` does."""
        with self._lock:
            del self.objects[name]

    def _answer(self, handler: BaseHTTPRequestHandler, body) -> None:
        with self._lock:
            self.requests.append(handler.command)
            fault = self.faults.pop(0) if self.faults else None
            status, answer = self._handle(handler, body, fault)
        if fault == "cut":
            handler.close_connection = True
            return
        if isinstance(fault, float):
            time.sleep(fault)
        text = json.dumps(answer).encode()
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(text)))
        handler.end_headers()
        handler.wfile.write(text)

    def _handle(self, handler, body, fault):
        if handler.headers["Authorization"] != f"Bearer {self.token}":
            return 401, {"kind": "Status"}
        if isinstance(fault, int):
            return fault, {"kind": "Status"}
        folder, _, name = handler.path.partition(FOLDER)
        assert folder == ""
        name = name.removeprefix("/")
        if not self._allows(VERBS[handler.command], name):
            return 403, {"kind": "Status", "reason": "Forbidden"}
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

    def _allows(self, verb, name):
        """Return whether a rule allows this. A name is not known yet at a creation, as in Kubernetes."""
        return self._rules is None or any(
            "coordination.k8s.io" in rule["apiGroups"]
            and "leases" in rule["resources"]
            and verb in rule["verbs"]
            and (not rule.get("resourceNames") or name in rule["resourceNames"])
            for rule in self._rules
        )

    def _store(self, name, body):
        self._version += 1
        metadata = {**body["metadata"], "resourceVersion": str(self._version)}
        self.objects[name] = {**body, "metadata": metadata}
        return self.objects[name]
