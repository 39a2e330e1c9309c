"""The order in which connections and requests are started when many arrive at once."""

import socket
from collections import Counter

import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from api.raw_http import get, serving
from fairlead.http import listener
from fairlead.http.accept_queue import AcceptedConnection, AcceptQueue, RequestTurns


def accepted(address: str, port: int) -> AcceptedConnection:
    return AcceptedConnection(socket.socket(), (address, port))


@given(addresses=st.lists(st.sampled_from("abc"), max_size=30))
def test_addresses_alternate_and_each_keeps_its_order(addresses):
    queue = AcceptQueue()
    connections = [accepted(address, port) for port, address in enumerate(addresses)]
    for each in connections:
        queue.add(each)
    assert len(connections) == len(queue)
    begun = [queue.pop().client for _ in connections]
    for each in connections:
        each.sock.close()
    assert (len(queue), sorted(begun)) == (0, sorted(each.client for each in connections))
    for address in set(addresses):
        own = [port for other, port in begun if other == address]
        assert sorted(own) == own
    turns: Counter[str] = Counter()
    for address, _ in begun:
        turns[address] += 1
        waiting = [other for other in set(addresses) if turns[other] < addresses.count(other)]
        assert all(turns[other] >= turns[address] - 1 for other in waiting)


def test_close_closes_all_queued_connections():
    queue = AcceptQueue()
    waiting = [accepted("a", 1), accepted("b", 2), accepted("a", 3)]
    for each in waiting:
        queue.add(each)
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
    addresses=st.lists(st.sampled_from("ab"), min_size=1, max_size=8),
    cancels=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 9)), max_size=6),
)
def test_cancelled_request_passes_its_turn_to_the_next(addresses, cancels):
    begun: list[int] = []

    async def request(turns: RequestTurns, number: int, scope: trio.CancelScope) -> None:
        with scope:
            await turns.wait(addresses[number])
            begun.append(number)

    async def main() -> None:
        turns = RequestTurns()
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
