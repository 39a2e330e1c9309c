"""The socket file of a server: who may connect, when it is replaced, and when it is removed."""

import os
import socket
import stat
from contextlib import ExitStack
from functools import partial

import httpx
import pytest
import trio

from fairlead.base.config import Config, ConfigError, Limits
from fairlead.server.console.client import Client, NoServerError
from fairlead.server.listener.callers import Callers
from fairlead.server.listener.forwarded import TrustedProxies
from fairlead.server.listener.listener import address_of, bind, serve_http
from fairlead.server.load.client import LoadConnection
from fairlead.server.processes.supervisor import _reserve


@pytest.fixture
def path(tmp_path):
    return tmp_path / "server.sock"


def listen(path, **options):
    (sock,) = bind(f"unix:{path}", 8000, **options)
    return sock


def test_owner_and_group_may_connect_and_closing_removes_the_file(path):
    with listen(path) as sock:
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        assert address_of(sock) == (f"unix:{path}", 0)
    assert not path.exists()


@pytest.mark.parametrize("is_shared", [False, True])
def test_socket_of_a_server_that_runs_is_not_replaced(path, is_shared):
    with listen(path, is_shared=is_shared):
        with pytest.raises(OSError, match=rf"another server listens on {path}.*--host"):
            listen(path)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))


def test_socket_of_a_server_that_was_killed_is_replaced(path):
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
        killed.listen()
    with listen(path), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


def test_server_that_ends_leaves_the_socket_of_its_successor(path):
    first = listen(path)
    path.unlink()
    with listen(path):
        first.close()
        assert path.exists()


def test_file_of_another_kind_is_kept(path):
    path.write_text("kept")
    with pytest.raises(OSError, match="it is a file of another kind"):
        listen(path)
    assert path.read_text() == "kept"


def test_missing_folder_is_reported_with_the_path(tmp_path):
    with pytest.raises(OSError, match=f"cannot listen on {tmp_path}/no/s: No such file or directory"):
        listen(tmp_path / "no" / "s")


def test_copies_for_fronts_remove_nothing(path):
    with listen(path) as sock:
        copy, inherited = sock.dup(), socket.socket(fileno=os.dup(sock.fileno()))
        assert inherited.family == socket.AF_UNIX
        copy.close()
        inherited.close()
        assert path.exists()


def test_fronts_share_one_socket_which_the_supervisor_removes(path):
    with ExitStack() as resources:
        sockets = _reserve(resources, Config(models=(), host=f"unix:{path}", fronts=3))
        assert [len(of_front) for of_front in sockets] == [1, 1, 1]
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
            accepted, _ = sockets[2][0].accept()
            accepted.close()
        with pytest.raises(BlockingIOError):
            sockets[0][0].accept()
    assert not path.exists()


async def test_commands_reach_a_server_on_a_socket(path):
    async def app(scope, _receive, send):
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b'{"data": [{"id": "demo"}]}'})

    def models():
        with Client(f"unix:{path}") as client:
            return client.models()

    shutdown = trio.Event()
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(serve_http, app, [listen(path)], limits=Limits(), shutdown=shutdown))
        assert await trio.to_thread.run_sync(models) == ["demo"]
        connection = LoadConnection(f"unix:{path}")
        assert b"demo" in await connection.request("GET", "/v1/models")
        connection._upstream.close()
        nursery.cancel_scope.cancel()


def test_command_without_a_server_on_the_socket_says_so(path):
    with Client(f"unix:{path}") as client, pytest.raises(NoServerError, match=f"unix:{path}"):
        client.models()


@pytest.mark.parametrize("host", ["unix:", f"unix:/{'a' * 107}", "unix:/a\0b"])
def test_path_that_no_socket_can_have_is_a_configuration_error(host):
    with pytest.raises(ConfigError, match="host"):
        Config(models=(), host=host)


@pytest.mark.parametrize(
    ("proxies", "client"), [((), ["", 0]), (("unix",), ["192.0.2.9", 0])], ids=["alone", "trusted proxy"]
)
async def test_client_has_no_address_but_a_trusted_proxy_may_name_one(path, proxies, client):
    scopes = []

    async def app(scope, _receive, send):
        if scope["type"] == "http":
            scopes.append(scope)
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"hello"})

    shutdown, callers = trio.Event(), Callers(TrustedProxies(proxies))
    async with trio.open_nursery() as nursery:
        serve = partial(serve_http, app, [listen(path)], limits=Limits(), shutdown=shutdown, callers=callers)
        assert await nursery.start(serve) == [(f"unix:{path}", 0)]
        transport = httpx.AsyncHTTPTransport(uds=str(path))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            reply = await http.get("/", headers={"X-Forwarded-For": "192.0.2.9"})
        shutdown.set()
    assert reply.text == "hello"
    assert (list(scopes[0]["client"]), scopes[0]["server"]) == (client, (str(path), None))
    assert not path.exists()
