"""The handshake of two processes: the right peer is accepted, and every other one refused in time."""

from functools import partial

import msgspec
import pytest
import trio
import trio.testing

from fairlead.base.config import ConfigError
from fairlead.base.frames import encode_frame
from fairlead.distributed.ipc.handshake import (
    HANDSHAKE_TIMEOUT_S,
    MAX_BYTES,
    HandshakeFailed,
    Hello,
    Proof,
    read_key,
    shake_hands,
)

KEY = b"a key of many bytes"


async def both(client_key, server_key):
    """Return what the client and the server get: the peer's name, or why it failed."""
    ours, theirs = trio.testing.memory_stream_pair()
    results = {}

    async def side(name, stream, key, *, is_client):
        try:
            results[name] = await shake_hands(stream, name=name, key=key, is_client=is_client)
        except HandshakeFailed as error:
            results[name] = error
            await stream.aclose()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(side, "front 1", ours, client_key, is_client=True))
        nursery.start_soon(partial(side, "dispatcher", theirs, server_key, is_client=False))
    return results["front 1"], results["dispatcher"]


@pytest.mark.parametrize("key", [None, KEY])
async def test_two_sides_with_the_same_key_learn_their_names(key, autojump_clock):
    assert await both(key, key) == ("dispatcher", "front 1")


@pytest.mark.parametrize(("client", "server"), [(KEY, b"another key, as long"), (None, KEY), (KEY, None)])
async def test_different_keys_are_refused_on_both_sides(client, server, autojump_clock):
    at_client, at_server = await both(client, server)
    assert str(at_client) == "refused: the keys differ"
    assert str(at_server) == "the keys differ"


async def shake_with(script):
    """Return why the handshake of a server with a key fails, with a client that runs the script."""
    ours, theirs = trio.testing.memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(script, ours)
        with pytest.raises(HandshakeFailed) as failure:
            await shake_hands(theirs, name="dispatcher", key=KEY, is_client=False)
        nursery.cancel_scope.cancel()
    return str(failure.value)


async def test_silent_peer_is_refused_in_bounded_time(autojump_clock):
    async def wait(_stream):
        await trio.sleep_forever()

    began = trio.current_time()
    assert "no handshake within" in await shake_with(wait)
    assert trio.current_time() - began == HANDSHAKE_TIMEOUT_S


async def test_peer_that_sends_slowly_is_refused_in_bounded_time(autojump_clock):
    async def drip(stream):
        for byte in encode_frame(Hello(1, "x", bytes(32))):
            await stream.send_all(bytes([byte]))
            await trio.sleep(1)

    assert "no handshake within" in await shake_with(drip)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "a frame of"),
        ((MAX_BYTES + 1).to_bytes(4, "little"), f"a frame of {MAX_BYTES + 1} bytes"),
        (b"\x03\0\0\0abc", "invalid message"),
        (encode_frame(Proof(b"")), "unexpected message"),
        (encode_frame(Hello(2, "x", bytes(32))), "protocol 2, and this process speaks 1"),
        (encode_frame(Hello(1, "x", bytes(31))), "invalid challenge or name"),
        (encode_frame(Hello(1, "", bytes(32))), "invalid challenge or name"),
        (encode_frame(Hello(1, "x" * 129, bytes(32))), "invalid challenge or name"),
        (encode_frame(Hello(1, "x", bytes(32))) + encode_frame(Proof(bytes(32))), "the keys differ"),
    ],
)
async def test_invalid_peer_is_refused_with_a_reason(data, reason, autojump_clock):
    async def send(stream):
        await stream.send_all(data)
        await trio.sleep_forever()

    assert reason in await shake_with(send)


async def test_peer_that_reflects_the_challenge_is_refused(autojump_clock):
    async def reflect(stream):
        while True:
            await stream.send_all(await stream.receive_some(1))

    assert await shake_with(reflect) == "the challenge was reflected"


async def test_proof_of_an_earlier_connection_is_not_valid_again(autojump_clock):
    ours, theirs = trio.testing.memory_stream_pair()
    recorded = bytearray()
    send_all = ours.send_all

    async def record(data):
        recorded.extend(data)
        await send_all(data)

    ours.send_all = record
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(shake_hands, ours, name="front 1", key=KEY, is_client=True))
        assert await shake_hands(theirs, name="dispatcher", key=KEY, is_client=False) == "front 1"

    async def replay(stream):
        await stream.send_all(bytes(recorded))
        await trio.sleep_forever()

    assert await shake_with(replay) == "the keys differ"


async def test_peer_that_leaves_is_reported(autojump_clock):
    assert await shake_with(lambda stream: stream.aclose()) == "the peer closed the connection"


async def test_handshake_reads_nothing_of_the_messages_after_it(autojump_clock):
    ours, theirs = trio.testing.memory_stream_pair()

    async def client():
        await shake_hands(ours, name="front 1", key=KEY, is_client=True)
        await ours.send_all(b"next")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(client)
        await shake_hands(theirs, name="dispatcher", key=KEY, is_client=False)
        assert await theirs.receive_some(100) == b"next"


def test_key_file_has_at_least_16_bytes(tmp_path):
    path = tmp_path / "key"
    with pytest.raises(ConfigError, match="No such file"):
        read_key(path)
    path.write_bytes(b"short\n")
    with pytest.raises(ConfigError, match="16 bytes or more"):
        read_key(path)
    path.write_bytes(KEY + b"\n")
    assert read_key(path) == KEY


def test_messages_have_no_field_for_the_key():
    fields = {name for kind in (Hello, Proof) for name in kind.__struct_fields__}
    assert fields == {"protocol", "name", "challenge", "mac"}
    assert msgspec.msgpack.encode(Hello(1, "x", b"")).find(KEY) == -1
