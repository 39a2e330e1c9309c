"""One end of a connection that says what a test says, message by message."""

import msgspec
import trio
import trio.testing

from fairlead.base.frames import FrameSplitter, encode_frame
from fairlead.distributed.frontends import wire


class ScriptedEnd:
    """Sends messages and bytes, and keeps what it receives."""

    def __init__(self, stream, decoder):
        self.received = []
        self.has_ended = False
        self._stream = stream
        self._decoder = decoder
        self._splitter = FrameSplitter()

    async def send(self, *messages):
        await self.send_bytes(b"".join(map(encode_frame, messages)))

    async def send_bytes(self, data):
        await self._stream.send_all(data)
        await trio.testing.wait_all_tasks_blocked()

    async def send_payload(self, value):
        """Send a frame that is no message."""
        payload = msgspec.msgpack.encode(value)
        await self.send_bytes(len(payload).to_bytes(4, "little") + payload)

    def of(self, kind):
        """Return the received messages of a kind."""
        return [message for message in self.received if isinstance(message, kind)]

    async def cut(self):
        await trio.aclose_forcefully(self._stream)
        await trio.testing.wait_all_tasks_blocked()

    async def receive(self):
        """Receive until the connection ends."""
        try:
            while data := await self._stream.receive_some():
                self.received += map(self._decoder.decode, self._splitter.feed(bytes(data)))
        except trio.ClosedResourceError:
            """It was cut."""
        self.has_ended = True


async def scripted_front(system, name):
    """Return the front's end of a new connection to the dispatcher."""
    ours, theirs = trio.testing.memory_stream_pair()
    system.serving.start_soon(system.server.serve, theirs, name)
    front = ScriptedEnd(ours, wire.to_front_decoder)
    system.nursery.start_soon(front.receive)
    await trio.testing.wait_all_tasks_blocked()
    return front


async def scripted_dispatcher(nursery, make_client):
    """Return a client, and the dispatcher's end of its connection."""
    ours, theirs = trio.testing.memory_stream_pair()
    streams = [ours]

    async def connect():
        if not streams:
            raise OSError("one connection is enough")
        return streams.pop()

    client = make_client([connect])
    dispatcher = ScriptedEnd(theirs, wire.to_dispatcher_decoder)
    nursery.start_soon(client.run)
    nursery.start_soon(dispatcher.receive)
    await dispatcher.send(wire.Welcome(1))
    return client, dispatcher
