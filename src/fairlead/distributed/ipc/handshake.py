"""How two processes recognize each other: the version of the protocol, and proof of a shared key.

Each side sends a random challenge, and proves that it has the key by an HMAC-SHA256 (RFC 2104) of both
challenges and of its role, so that no proof is valid twice or for the other side. The key itself is not sent.
The messages afterwards are neither encrypted nor signed: that is what TLS is for.
"""

import hashlib
import hmac
import secrets
from pathlib import Path
from typing import NoReturn, TypeVar

import msgspec
import trio

from fairlead.base.config import ConfigError
from fairlead.base.frames import encode_frame

PROTOCOL = 1
HANDSHAKE_TIMEOUT_S = 5.0
MAX_BYTES = 4096  # of a frame, before the peer is authenticated
MAX_NAME_LENGTH = 128
CHALLENGE_BYTES = 32
MIN_KEY_BYTES = 16


class HandshakeFailed(Exception):
    """The peer is not what it should be; the message has the reason."""


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The first message of either side. `name` identifies the process in the log."""

    protocol: int
    name: str
    challenge: bytes


class Proof(msgspec.Struct, frozen=True, tag="proof"):
    """The second message of either side; empty without a key."""

    mac: bytes


class HandshakeRefusal(msgspec.Struct, frozen=True, tag="refusal"):
    """Why the handshake fails."""

    reason: str


Expected = TypeVar("Expected", Hello, Proof)

_decoder = msgspec.msgpack.Decoder(Hello | Proof | HandshakeRefusal)


def read_key(path: Path) -> bytes:
    """Return the key that a file has, without white space around it. Raises `ConfigError`."""
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    if len(key) < MIN_KEY_BYTES:
        raise ConfigError(f"{path}: the key must have {MIN_KEY_BYTES} bytes or more")
    return key


async def shake_hands(stream: trio.abc.Stream, *, name: str, key: bytes | None, is_client: bool) -> str:
    """Authenticate the peer, and this process to it; return the peer's name.

    Raises `HandshakeFailed`; the caller closes the stream. Reads nothing beyond the handshake.
    """
    link = _Exchange(stream)
    ours = Hello(PROTOCOL, name, secrets.token_bytes(CHALLENGE_BYTES))
    try:
        with trio.fail_after(HANDSHAKE_TIMEOUT_S):
            await link.send(ours)
            theirs = await link.expect(Hello)
            if theirs.protocol != PROTOCOL:
                await link.refuse(f"protocol {theirs.protocol}, and this process speaks {PROTOCOL}")
            if len(theirs.challenge) != CHALLENGE_BYTES or not 0 < len(theirs.name) <= MAX_NAME_LENGTH:
                await link.refuse("invalid challenge or name")
            if theirs.challenge == ours.challenge:
                await link.refuse("the challenge was reflected")
            challenges = (ours, theirs) if is_client else (theirs, ours)
            # The client proves itself first: a server answers no stranger with a proof.
            if is_client:
                await link.send(Proof(_mac(key, "client", *challenges)))
            proof = await link.expect(Proof)
            role = "server" if is_client else "client"
            if not hmac.compare_digest(proof.mac, _mac(key, role, *challenges)):
                await link.refuse("the keys differ")
            if not is_client:
                await link.send(Proof(_mac(key, "server", *challenges)))
    except trio.TooSlowError:
        raise HandshakeFailed(f"no handshake within {HANDSHAKE_TIMEOUT_S:g} s") from None
    return theirs.name


def _mac(key: bytes | None, role: str, client: Hello, server: Hello) -> bytes:
    if key is None:
        return b""
    text = b"\0".join((role.encode(), client.name.encode(), server.name.encode()))
    return hmac.digest(key, client.challenge + server.challenge + text, hashlib.sha256)


class _Exchange:
    """Sends and receives one message at a time, and reads nothing beyond it."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self._stream = stream

    async def send(self, message: Hello | Proof | HandshakeRefusal) -> None:
        """Send a message. Raises `HandshakeFailed`."""
        try:
            await self._stream.send_all(encode_frame(message))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise HandshakeFailed("the peer closed the connection") from None

    async def expect(self, kind: type[Expected]) -> Expected:
        """Return the next message, which has to be of this kind. Raises `HandshakeFailed`."""
        size = int.from_bytes(await self._exactly(4), "little")
        if size > MAX_BYTES:
            await self.refuse(f"a frame of {size} bytes")
        try:
            message = _decoder.decode(await self._exactly(size))
        except msgspec.MsgspecError as error:
            await self.refuse(f"invalid message: {error}")
        if isinstance(message, HandshakeRefusal):
            raise HandshakeFailed(f"refused: {message.reason}")
        if not isinstance(message, kind):
            await self.refuse("unexpected message")
        return message

    async def refuse(self, reason: str) -> NoReturn:
        """Send the reason, and raise it."""
        await self.send(HandshakeRefusal(reason))
        raise HandshakeFailed(reason)

    async def _exactly(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            try:
                piece = await self._stream.receive_some(count - len(data))
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                piece = b""
            if not piece:
                raise HandshakeFailed("the peer closed the connection")
            data += piece
        return bytes(data)
