"""The order in which connections and requests are started when many arrive at once."""

import socket
from collections import Counter

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from fairlead.server.listener import listener
from fairlead.server.listener.accept_queue import AcceptedConnection, AcceptQueue, ReadingTurns, RequestTurns
from fairlead.server.listener.callers import Callers, Sender
from fairlead.server.listener.forwarded import TrustedProxies
from server.routes.raw_http import get, serving


def accepted(address: str, port: int) -> AcceptedConnection:
    return AcceptedConnection(socket.socket(), (address, port))


def assert_alternate(begun, arrived):
    """Check that no name had two turns while another one with fewer waited for its first in the meantime."""
    turns: Counter[str] = Counter()
    for name in begun:
        turns[name] += 1
        waiting = [other for other in set(arrived) if turns[other] < arrived.count(other)]
        assert all(turns[other] >= turns[name] - 1 for other in waiting)


callers = st.builds(Sender, st.sampled_from("abc"), st.sampled_from(["", "k", "l"]))


@given(arrived=st.lists(callers, max_size=30))
def test_addresses_alternate_as_do_the_lines_of_each_and_a_line_keeps_its_order(arrived):
    queue = AcceptQueue()
    for port, caller in enumerate(arrived):
        connection = accepted(caller.address, port)
        connection.sock.close()
        queue.add(connection, caller)
    assert len(queue) == len(arrived)
    ports = [queue.pop().client[1] for _ in arrived]
    assert (len(queue), sorted(ports)) == (0, list(range(len(arrived))))
    begun = [arrived[port] for port in ports]
    assert_alternate([caller.address for caller in begun], [caller.address for caller in arrived])
    for address in "abc":
        assert_alternate(
            [caller.line for caller in begun if caller.address == address],
            [caller.line for caller in arrived if caller.address == address],
        )
    for caller in set(arrived):
        own = [port for port in ports if arrived[port] == caller]
        assert sorted(own) == own


def test_close_closes_all_queued_connections():
    queue = AcceptQueue()
    waiting = [accepted("a", 1), accepted("b", 2), accepted("a", 3)]
    for each, line in zip(waiting, ["", "", "k"], strict=True):
        queue.add(each, Sender(each.client[0], line))
    queue.close()
    assert (len(queue), [each.sock.fileno() for each in waiting]) == (0, [-1, -1, -1])


async def test_connection_of_a_new_address_starts_before_older_ones_of_another(monkeypatch):
    monkeypatch.setattr(listener, "STARTS_PER_TURN", 1)
    served: list[str] = []

    async def app(scope, receive, send):
        if scope["type"] == "lifespan":
            return
        served.append(scope["client"][0])
        headers = [(b"content-length", b"0"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async with serving(app) as server:
        clients = []
        for address in ["127.0.0.1"] * 60 + ["127.0.0.9"]:
            # Blocking, so that the listener does not run before all clients have connected.
            client = socket.create_connection(server.address, source_address=(address, 0))
            client.sendall(get())
            clients.append(client)
        while len(served) < len(clients):
            await trio.testing.wait_all_tasks_blocked()
        for client in clients:
            client.close()
    assert [address for address in served[:40] if address != "127.0.0.1"] == ["127.0.0.9"]


def key_of(_address, headers):
    return dict(headers).get(b"x-key", b"").decode()


async def test_connection_of_another_key_starts_before_older_ones_of_its_address(monkeypatch):
    monkeypatch.setattr(listener, "STARTS_PER_TURN", 1)
    served: list[str] = []

    async def app(scope, receive, send):
        if scope["type"] != "lifespan":
            served.append(key_of(None, scope["headers"]))

    async with serving(app, callers=Callers(line_of=key_of)) as server:
        clients = []
        for key in ["a"] * 60 + ["b"]:
            client = socket.create_connection(server.address)
            client.sendall(get("/", f"X-Key: {key}"))
            clients.append(client)
        while len(served) < len(clients):
            await trio.testing.wait_all_tasks_blocked()
        for client in clients:
            client.close()
    assert served.index("b") < 40


async def test_request_of_another_key_starts_before_older_ones_on_connections_of_its_address():
    served: list[str] = []

    async def app(scope, receive, send):
        if scope["type"] == "lifespan":
            return
        served.append(key_of(None, scope["headers"]))
        headers = [(b"content-length", b"0")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async with serving(app, callers=Callers(line_of=key_of)) as server:
        clients = [await server.connect() for _ in range(41)]
        for client in clients:
            await client.fetch(get())
        served.clear()
        for client, key in zip(clients, ["a"] * 40 + ["b"], strict=True):
            socket.socket.send(client.socket._sock, get("/", f"X-Key: {key}"))  # without a pass of the loop
        for client in clients:
            await client.answer()
    assert served.index("b") < 20


async def test_request_of_another_line_starts_next():
    turns = RequestTurns()
    begun: list[str] = []

    async def request(line: str) -> None:
        await turns.wait("address", lambda: line)
        begun.append(line)

    async with trio.open_nursery() as nursery:
        for line in ["a"] * 6 + ["b", "c", "b"]:
            nursery.start_soon(request, line)
    assert turns.idle
    assert {"b", "c"} <= set(begun[:5])
    assert begun.count("a") == 6


@pytest.mark.parametrize(
    ("received", "expected"),
    [
        (b"", Sender("10.0.0.1")),
        (b"GET / HTT", Sender("10.0.0.1")),
        (b"GET / HTTP/1.1\r\nHost: a\r\nx-KEY:  k \r\n\r\n", Sender("10.0.0.1", "k")),
        (b"GET / HTTP/1.1\r\nX-Key: k\r\nX-Other: un", Sender("10.0.0.1", "k")),
        (b"GET / HTTP/1.1\r\nX-Key: incompl", Sender("10.0.0.1")),
        (b"POST / HTTP/1.1\r\n\r\nX-Key: k\r\n", Sender("10.0.0.1")),
        (b"GET / HTTP/1.1\r\nX-Forwarded-For: 192.0.2.1\r\nX-Key: k\r\n\r\n", Sender("192.0.2.1", "k")),
        (b"GET / HTTP/1.1\r\nX-Forwarded-For: unknown\r\n\r\n", Sender("")),
        (b"\r\n" * 3000, Sender("10.0.0.1")),
        (b"\0\xff:" * 2000, Sender("10.0.0.1")),
    ],
)
def test_caller_is_found_in_what_has_arrived_which_remains_to_be_read(received, expected):
    callers = Callers(TrustedProxies(["10.0.0.0/8"]), key_of)
    one, other = socket.socketpair()
    with one, other:
        one.setblocking(False)
        other.sendall(received)
        assert callers.peek(one, "10.0.0.1") == expected
        if received:
            assert one.recv(1 << 16) == received
        other.close()
        assert callers.peek(one, "10.0.0.1") == Sender("10.0.0.1")


async def test_requests_of_one_address_start_in_order_one_per_pass():
    turns = RequestTurns()
    requested, begun = [], []

    async def request(address: str, number: int) -> None:
        requested.append((address, number))
        await turns.wait(address)
        begun.append((address, number))

    async with trio.open_nursery() as nursery:
        for number in range(10):
            nursery.start_soon(request, "busy", number)
        nursery.start_soon(request, "new", 0)
        for passes in range(1, 12):
            await trio.lowlevel.checkpoint()
            assert sum(address == "busy" for address, _ in begun) <= passes
    assert ("new", 0) in begun[:2]
    assert [each for each in begun if each[0] == "busy"] == [each for each in requested if each[0] == "busy"]


@given(
    addresses=st.lists(st.sampled_from(["a", "b", "a k"]), min_size=1, max_size=8),
    cancels=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 9)), max_size=6),
)
@pytest.mark.parametrize("new_turns", [RequestTurns, ReadingTurns])
def test_cancelled_turn_passes_to_the_next(new_turns, addresses, cancels):
    begun: list[int] = []

    async def request(turns: RequestTurns | ReadingTurns, number: int, scope: trio.CancelScope) -> None:
        with scope:
            address, _, line = addresses[number].partition(" ")
            await turns.wait(address, lambda: line)
            begun.append(number)

    async def main() -> None:
        turns = new_turns()
        scopes = [trio.CancelScope() for _ in addresses]
        with trio.fail_after(10):
            async with trio.open_nursery() as nursery:
                for number, scope in enumerate(scopes):
                    nursery.start_soon(request, turns, number, scope)
                for passes in range(10):
                    for number, at in cancels:
                        if at == passes and number < len(scopes):
                            scopes[number].cancel()
                    await trio.lowlevel.checkpoint()
        uncancelled = set(range(len(addresses))) - {number for number, _ in cancels}
        assert uncancelled <= set(begun)
        assert len(begun) == len(set(begun))
        assert turns.idle

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


async def test_few_pieces_are_read_per_pass_in_turns_of_addresses_and_of_their_lines():
    turns = ReadingTurns(2)
    read: list[str] = []

    async def body(address: str, line: str, pieces: int) -> None:
        for _ in range(pieces):
            await turns.wait(address, lambda: line)
            read.append(address + line)

    senders = ["a "] * 20 + ["a k"] * 2 + ["b "] * 2
    async with trio.open_nursery() as nursery:
        for sender in senders:
            nursery.start_soon(body, *sender.split(" "), 3)
        passes = 0
        while len(read) < 3 * len(senders):
            await trio.lowlevel.checkpoint()
            passes += 1
            assert len(read) <= 2 * (passes + 1)  # this task may be the last of its pass
    assert turns.idle
    first = read[:30]  # of 72; which ones come first of all is chance
    assert (first.count("b"), first.count("ak")) == (6, 6)


async def test_piece_of_a_body_waits_for_one_pass_only_where_nobody_else_sends():
    turns = ReadingTurns()
    for _ in range(20):
        await turns.wait("a", lambda: pytest.fail("there is no need to know who it is"))
    assert turns.idle


async def test_large_bodies_of_one_key_do_not_delay_the_body_of_another_at_its_address(monkeypatch):
    pieces, ended = 40, []

    async def app(scope, receive, send):
        if scope["type"] == "lifespan":
            return
        while (await receive())["more_body"]:
            pass
        ended.append(key_of(None, scope["headers"]))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    body = b"x" * (16 * 1024 * pieces)
    async with serving(app, callers=Callers(line_of=key_of)) as server:
        clients = [await server.connect() for _ in range(21)]
        async with trio.open_nursery() as nursery:
            for client, key in zip(clients, ["a"] * 20 + ["b"], strict=True):
                head = get("/", f"X-Key: {key}", f"Content-Length: {len(body)}")
                nursery.start_soon(client.fetch, head + body)
    assert ended.index("b") <= 4
    assert sorted(ended) == ["a"] * 20 + ["b"]
