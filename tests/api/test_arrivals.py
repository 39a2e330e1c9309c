"""Whose connection is begun next, when many have come at once."""

import socket
from collections import Counter

import trio
from hypothesis import given
from hypothesis import strategies as st

from api.raw_http import get, serving
from fairlead.api import server as listener
from fairlead.api.arrivals import Arrival, Arrivals


def arrival(address: str, port: int) -> Arrival:
    return Arrival(socket.socket(), (address, port))


@given(addresses=st.lists(st.sampled_from("abc"), max_size=30))
def test_addresses_take_turns_and_each_keeps_its_order(addresses):
    arrivals = Arrivals()
    came = [arrival(address, port) for port, address in enumerate(addresses)]
    for each in came:
        arrivals.add(each)
    assert len(came) == len(arrivals)
    begun = [arrivals.pop().client for _ in came]
    for each in came:
        each.sock.close()
    assert (0, sorted(each.client for each in came)) == (len(arrivals), sorted(begun))
    for address in set(addresses):
        own = [port for other, port in begun if other == address]
        assert sorted(own) == own
    turns: Counter[str] = Counter()
    for address, _ in begun:
        turns[address] += 1
        waiting = [other for other in set(addresses) if turns[other] < addresses.count(other)]
        assert all(turns[other] >= turns[address] - 1 for other in waiting)


def test_closing_closes_on_all_who_wait():
    arrivals = Arrivals()
    waiting = [arrival("a", 1), arrival("b", 2), arrival("a", 3)]
    for each in waiting:
        arrivals.add(each)
    arrivals.close()
    assert (0, [-1, -1, -1]) == (len(arrivals), [each.sock.fileno() for each in waiting])


async def test_a_newcomer_need_not_wait_for_all_of_a_crowd_that_came_before(monkeypatch):
    monkeypatch.setattr(listener, "BEGINNINGS_A_TURN", 1)
    served: list[str] = []

    async def app(scope, receive, send):
        if scope["type"] == "lifespan":
            return
        served.append(scope["client"][0])
        headers = [(b"content-length", b"0"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async with serving(app) as server:
        crowd = []
        for address in ["127.0.0.1"] * 60 + ["127.0.0.9"]:
            # Blocking, so that the listener has no turn before the last of them is there.
            client = socket.create_connection(server.address, source_address=(address, 0))
            client.sendall(get())
            crowd.append(client)
        while len(served) < len(crowd):
            await trio.testing.wait_all_tasks_blocked()
        for client in crowd:
            client.close()
    assert ["127.0.0.9"] == [address for address in served[:40] if address != "127.0.0.1"]
