"""A connection between processes: order, bounds, and how it ends."""

import shutil
import ssl
import subprocess
from functools import partial

import msgspec
import pytest
import trio
import trio.testing

from fairlead.base.config import ConfigError
from fairlead.base.frame_link import FrameLink
from fairlead.base.frames import encode_frame
from fairlead.distributed.ipc.address import LinkAddress, connect, listen


class Note(msgspec.Struct, frozen=True, tag="note"):
    text: str


decoder = msgspec.msgpack.Decoder(Note)


def pair(**options):
    ours, theirs = trio.testing.memory_stream_pair()
    return FrameLink(ours, decoder, **options), theirs


async def test_messages_arrive_in_their_order(autojump_clock):
    ours, theirs = trio.testing.memory_stream_pair()
    link, peer, received = FrameLink(ours, decoder), FrameLink(theirs, decoder), []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(link.run, received.append)
        nursery.start_soon(peer.run, received.append)
        for number in range(1000):
            peer.send(Note(str(number)))
        await trio.testing.wait_all_tasks_blocked()
        link.close()
    assert received == [Note(str(number)) for number in range(1000)]


async def test_messages_of_one_moment_are_written_together(autojump_clock):
    link, theirs = pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(link.run, lambda _message: None)
        for text in "abc":
            link.send(Note(text))
        await trio.testing.wait_all_tasks_blocked()
        assert await theirs.receive_some(1000) == b"".join(encode_frame(Note(text)) for text in "abc")
        link.close()


async def test_peer_that_does_not_read_ends_the_connection_at_the_bound():
    ours, theirs = trio.testing.lockstep_stream_pair()
    link = FrameLink(ours, decoder, unsent_bytes=1000)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(link.run, lambda _message: None)
        link.send(Note("first"))
        await trio.testing.wait_all_tasks_blocked()  # being written, for as long as nothing reads
        while not link.is_closed:
            link.send(Note("x" * 100))
    link.send(Note("dropped"))
    await theirs.aclose()


async def test_nothing_is_written_once_it_may_not_send(autojump_clock):
    may_send = True
    link, theirs = pair(may_send=lambda: may_send)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(link.run, lambda _message: None)
        link.send(Note("a"))
        await trio.testing.wait_all_tasks_blocked()
        may_send = False
        link.send(Note("b"))
    assert await theirs.receive_some(1000) == encode_frame(Note("a"))
    assert await theirs.receive_some(1000) == b""


@pytest.mark.parametrize(
    "data", [b"\xff\xff\xff\xff", b"\x01\0\0\0\xc1", encode_frame(Note("")) + b"\x04\0\0\0abcd"]
)
async def test_invalid_frame_ends_the_connection(data, autojump_clock):
    link, theirs = pair()
    await theirs.send_all(data)
    with trio.fail_after(1):
        await link.run(lambda _message: None)
    assert link.is_closed


async def test_peer_that_closes_ends_the_connection(autojump_clock):
    link, theirs = pair()
    await theirs.aclose()
    with trio.fail_after(1):
        await link.run(lambda _message: None)


async def test_handler_that_closes_gets_no_further_message(autojump_clock):
    link, theirs = pair()
    received = []

    def handle(message):
        received.append(message)
        link.close()

    await theirs.send_all(encode_frame(Note("a")) + encode_frame(Note("b")))
    await link.run(handle)
    assert received == [Note("a")]


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("unix:/run/x.sock", LinkAddress(path="/run/x.sock")),
        ("tcp://10.0.0.1:7000", LinkAddress(host="10.0.0.1", port=7000)),
        ("tcp://[::1]:7000", LinkAddress(host="::1", port=7000)),
    ],
)
def test_address_is_read_and_written(text, address):
    assert LinkAddress.parse(text) == address
    assert str(address) == text


@pytest.mark.parametrize(
    "text", ["", "unix:", "tcp://", "tcp://host", "tcp://host:x", "tcp://h:70000", "h:1"]
)
def test_invalid_address_is_refused(text):
    with pytest.raises(ConfigError, match=r"must be unix:PATH or tcp://HOST:PORT"):
        LinkAddress.parse(text)


async def exchanged_over(address, server_tls=None, client_tls=None):
    """Return what a server receives from a client over this address."""
    received, has_received = [], trio.Event()
    listeners = await listen(address, server_tls)
    if not address.path:
        socket = getattr(listeners[0], "transport_listener", listeners[0]).socket
        address = LinkAddress(host=address.host, port=socket.getsockname()[1])

    def receive(message):
        received.append(message)
        has_received.set()

    async def serve(stream):
        await FrameLink(stream, decoder).run(receive)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(trio.serve_listeners, serve, listeners, handler_nursery=nursery))
        link = FrameLink(await connect(address, client_tls), decoder)
        nursery.start_soon(link.run, lambda _message: None)
        link.send(Note("hello"))
        with trio.fail_after(10):
            await has_received.wait()
        nursery.cancel_scope.cancel()
    return received


async def test_messages_over_a_unix_socket_only_for_its_user(tmp_path):
    path = tmp_path / "dispatcher.sock"
    for _ in range(2):  # the second server replaces the socket that the first one left
        assert await exchanged_over(LinkAddress(path=str(path))) == [Note("hello")]
        assert path.stat().st_mode & 0o777 == 0o600


async def test_file_that_is_no_socket_is_not_replaced(tmp_path):
    path = tmp_path / "file"
    path.write_text("content")
    with pytest.raises(OSError):
        await listen(LinkAddress(path=str(path)))
    assert path.read_text() == "content"


async def test_messages_over_tcp():
    assert await exchanged_over(LinkAddress(host="127.0.0.1")) == [Note("hello")]


def make_certificate(folder):
    """Return the files of a certificate for 127.0.0.1, which is its own authority, and of its key."""
    certificate, key = folder / "cert.pem", folder / "key.pem"
    options = "-x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=localhost"
    command = ["openssl", "req", *options.split(), "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    return certificate, key


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl, which makes a certificate")
async def test_messages_over_tls_and_only_with_a_trusted_certificate(tmp_path):
    certificate, key = make_certificate(tmp_path)
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(certificate, key)
    trusting = ssl.create_default_context(cafile=str(certificate))
    assert await exchanged_over(LinkAddress(host="127.0.0.1"), server, trusting) == [Note("hello")]
    with pytest.RaisesGroup(
        pytest.RaisesExc(OSError, match="CERTIFICATE_VERIFY_FAILED"), allow_unwrapped=True
    ):
        await exchanged_over(LinkAddress(host="127.0.0.1"), server, ssl.create_default_context())


async def test_address_without_a_server_is_an_os_error(tmp_path):
    with pytest.raises(OSError):
        await connect(LinkAddress(path=str(tmp_path / "none.sock")))
