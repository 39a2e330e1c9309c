"""A child with fronts in this process: the loop and its sockets with a fake model, and clients to drive them.

Nothing here waits: a client reads what has arrived, and the child runs a turn when the test says so.
"""

import signal
import socket
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from engine import fake_model
from fairlead.base import messages
from fairlead.base.frames import FrameSocket, FrameSplitter, encode_frame
from fairlead.base.grant import FIRST_GRANT, Grant
from fairlead.base.job import Sampling
from fairlead.engine.engine import Engine
from fairlead.engine.worker.loop import Loop
from fairlead.engine.worker.shared_channel import SharedChannel, bind

LONGEST = 60
SLOTS = 3
BLOCKS = 40
READY = messages.Ready(SLOTS, LONGEST, fake_model.VOCABULARY, BLOCKS, 4, "cpu", "fake", 1, 1)
# A turn takes less than a millisecond, so one that takes this long is blocked.
BLOCKED_S = 60  # ends a test that hangs, never one on a busy machine


class Client:
    """The test's end of a connection: what was submitted over it, and what has arrived.

    `has_ended`: the child has closed the connection.
    """

    def __init__(self, connection: socket.socket, decoder: Any, prefix: int | None = None) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.prefix = prefix
        self.expected: dict[int, tuple[list[int], str]] = {}
        self.stale: set[int] = set()
        self.grants: dict[int, Grant | None] = {}
        self.aborted: set[int] = set()
        self.received: dict[int, list[int]] = {}
        self.ends: dict[int, str | None] = {}
        self.frames: list[Any] = []
        self.has_ended = False
        self._decoder = decoder
        self._splitter = FrameSplitter()
        self._numbers = 0

    def send(self, *sent: Any) -> None:
        self.send_bytes(b"".join(map(encode_frame, sent)))

    def send_bytes(self, data: bytes) -> None:
        self.connection.sendall(data)

    def new_key(self) -> int:
        assert self.prefix is not None
        self._numbers += 1
        return self.prefix << messages.KEY_BITS | self._numbers

    def submit(
        self, prompt: list[int], max_tokens: int, grant: Grant | None, *, is_stale: bool = False
    ) -> messages.Submit:
        """Return the message, and expect its whole answer, or only a refusal."""
        key = self.new_key()
        sampling = Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self.expected[key] = fake_model.answer(prompt, sampling, LONGEST)
        self.grants[key] = grant
        self.received[key] = []
        if is_stale:
            self.stale.add(key)
        return messages.Submit(key, messages.pack_tokens(prompt), sampling, grant=grant)

    def read(self) -> list[Any]:
        """Read what has arrived, check that it is of this client's sequences, and return the frames."""
        frames: list[Any] = []
        while not self.has_ended:
            try:
                data = self.connection.recv(1 << 16)
            except BlockingIOError:
                break
            except ConnectionError:
                data = b""
            self.has_ended = not data
            frames += map(self._decoder.decode, self._splitter.feed(data))
        for frame in frames:
            if isinstance(frame, messages.StepOutputs):
                self._check(frame)
        self.frames += frames
        return frames

    def _check(self, step: messages.StepOutputs) -> None:
        for key, token_id in step.plain():
            self._receive(key, [token_id])
        for output in step.outputs:
            self._receive(output.key, output.token_ids)
            if output.error is not None or output.finish_reason is not None:
                assert (output.code == "stale_grant") == (output.key in self.stale), output
                self.ends[output.key] = output.code or output.finish_reason

    def _receive(self, key: int, token_ids: list[int]) -> None:
        assert key in self.expected, f"{key} is not a sequence of client {self.prefix}"
        assert key not in self.ends, "an output after the end"
        self.received[key] += token_ids
        whole, _ = self.expected[key]
        assert whole[: len(self.received[key])] == self.received[key]


class Rig:
    """The child: an engine with a fake model, its loop, and the channel for the parent and clients."""

    def __init__(self, *, overlaps: bool = False, first_grant: Grant = FIRST_GRANT) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="fronts")
        self.path = str(Path(self._directory.name) / "engine.sock")
        self._listener = bind(self.path)
        self._listener.listen()
        ours, self._theirs = socket.socketpair()
        self.parent = Client(ours, messages.to_parent_decoder, prefix=0)
        self.clients = [self.parent]
        self.channel = SharedChannel(
            FrameSocket(self._theirs, messages.from_parent_decoder), self._listener, READY, first_grant
        )
        runner = fake_model.FakeRunner(4, overlaps=overlaps)
        self.engine = Engine(
            runner,
            slots=SLOTS,
            max_batch=SLOTS,
            max_batched_tokens=16,
            max_model_len=LONGEST,
            blocks_total=BLOCKS,
            block_size=4,
            vocab_size=fake_model.VOCABULARY,
            eos_token_ids=(fake_model.EOS,),
            draw_seed=lambda: 1,
        )
        self._loop = Loop(self.engine, runner, self, clock=lambda: 0.0)
        signal.signal(signal.SIGALRM, _blocked)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.alarm(0)
        for client in self.clients:
            client.connection.close()
        self.channel.close()
        self._theirs.close()
        self._listener.close()
        self._directory.cleanup()

    # The loop's channel, which never waits -----------------------------------------------------------

    def read(self, *, wait_s: float | None) -> list[messages.ToEngine]:
        return self.channel.read(wait_s=0.0)

    def write(self, step: messages.StepOutputs, /) -> None:
        self.channel.write(step)

    # Control by the tests ----------------------------------------------------------------------------

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            signal.alarm(BLOCKED_S)
            self._loop.turn()
            signal.alarm(0)
            for client in self.channel._connected.values():
                assert not client.connection._connection.getblocking(), "a turn could block"

    def connect(self) -> Client:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(self.path)
        client = Client(connection, messages.to_client_decoder)
        self.clients.append(client)
        return client

    def attach(self, *, small_buffer: bool = False) -> Client:
        """Return a front that has attached; with `small_buffer`, the system buffers only a few frames."""
        client = self.connect()
        self.turn()
        if small_buffer:
            connection = list(self.channel._connected.values())[-1].connection
            connection._connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        client.send(messages.Attach(messages.PROTOCOL_VERSION, f"front-{len(self.clients)}"))
        self.turn()
        (attached,) = client.read()
        assert isinstance(attached, messages.Attached)
        assert attached.ready == READY
        client.prefix = attached.prefix
        return client

    def run_until_idle(self) -> None:
        for _ in range(2000):
            self.turn()
            for client in self.clients:
                if client.connection.fileno() >= 0:
                    client.read()
            if self.engine.idle and not self.channel._left and not self.unsent_bytes():
                return
        raise AssertionError("the engine does not become idle")

    def unsent_bytes(self) -> int:
        """Return the largest buffer of a front."""
        return max((len(each.connection._unsent) for each in self.channel._connected.values()), default=0)

    def assert_nothing_is_held(self) -> None:
        counts = self.engine.statistics()
        assert (counts.running, counts.pending, counts.suspended) == (0, 0, 0)
        assert (counts.slots_free, counts.blocks_free) == (SLOTS, BLOCKS)
        assert len(self.channel.grants) == 0


def _blocked(_number: int, _frame: object) -> None:
    raise AssertionError(f"a turn was blocked for {BLOCKED_S} s")
