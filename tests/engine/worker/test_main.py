"""The child's side alone, over a socketpair in this process: its answers to messages."""

import contextlib
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from engine.worker import fake_child
from fairlead.base import messages
from fairlead.base.config import demonstration_model
from fairlead.base.frames import FrameSocket, PeerGone, encode_frame
from fairlead.base.grant import Grant
from fairlead.base.job import Sampling
from fairlead.base.runtime.compilers import ADVICE
from fairlead.engine.worker import main

GREEDY = Sampling(max_tokens=3)
FIRST = 1 << messages.KEY_BITS | 1  # the first key of the first client


class End(FrameSocket[Any]):
    """The other end of a connection of a child. `listen` is the path of the child's socket for clients."""

    def __init__(self, connection: socket.socket, decoder: msgspec.msgpack.Decoder, listen: str) -> None:
        connection.settimeout(60)
        super().__init__(connection, decoder)
        self.connection = connection
        self.listen = listen

    def send(self, *sent: msgspec.Struct) -> None:
        self.connection.sendall(b"".join(map(encode_frame, sent)))


@contextlib.contextmanager
def child(path: str = "fake:") -> Iterator[End]:
    """Serve in a thread until the block ends; check that the child ends when its socket is closed."""
    ours, theirs = socket.socketpair()
    ended = []

    def serve() -> None:
        with contextlib.suppress(PeerGone):
            main.serve(FrameSocket(theirs, messages.from_parent_decoder), fake_child.load)
        ended.append(True)

    thread = threading.Thread(target=serve)
    with ours, theirs, tempfile.TemporaryDirectory() as folder:
        thread.start()
        try:
            parent = End(ours, messages.to_parent_decoder, f"{folder}/engine.sock")
            parent.send(messages.WorkerSpec(path=path, listen=parent.listen))
            yield parent
        finally:
            ours.shutdown(socket.SHUT_RDWR)
            thread.join(60)
    assert ended == [True]


def step(client: End) -> messages.StepOutputs:
    message = client.receive()
    assert isinstance(message, messages.StepOutputs)
    return message


def submit(number: int, prompt: list[int], sampling: Sampling = GREEDY) -> messages.Submit:
    return messages.Submit(
        1 << messages.KEY_BITS | number, messages.pack_tokens(prompt), sampling, grant=Grant(1, 1)
    )


@contextlib.contextmanager
def attached(path: str = "fake:") -> Iterator[End]:
    """Serve until the block ends, and attach to the child as its first client."""
    with child(path) as parent, socket.socket(socket.AF_UNIX) as connection:
        assert parent.receive() == messages.LoadProgress(0.5, "weights")
        assert isinstance(parent.receive(), messages.Ready)
        connection.connect(parent.listen)
        client = End(connection, messages.to_client_decoder, parent.listen)
        client.send(messages.Attach(messages.PROTOCOL_VERSION, "test"))
        assert client.receive().prefix == 1
        yield client


def test_loading_is_reported_and_then_the_limits():
    with child("fake:slots=3") as parent:
        assert parent.receive() == messages.LoadProgress(0.5, "weights")
        assert parent.receive() == messages.Ready(3, 1_000_000, 1000, 8000, 1024, "cpu", "fake", 1, 1)


def test_step_is_one_message_for_all_sequences_together():
    with attached() as client:
        prompts = {FIRST: [5], FIRST + 1: [6, 7]}
        client.send(*(submit(key, prompt) for key, prompt in prompts.items()))
        received: dict[int, list[int]] = {key: [] for key in prompts}
        for number in range(1, 4):
            message = step(client)
            plain = dict(message.plain())
            last = {output.key: output.token_ids for output in message.outputs}
            assert ((sorted(plain), [*last]) if number < 3 else (sorted(last), [*plain])) == ([*prompts], [])
            assert message.statistics.steps == number
            for key, token_id in plain.items():
                received[key].append(token_id)
            for key, token_ids in last.items():
                received[key] += token_ids
        assert {key: fake_child.answer(prompt, 3) for key, prompt in prompts.items()} == received
        assert [output.finish_reason for output in message.outputs] == ["length", "length"]
        assert message.statistics.running == 0


def test_abort_alone_is_answered_with_current_counts():
    with attached("fake:slots=1") as client:
        endless = Sampling(max_tokens=900_000)
        client.send(submit(1, [5], endless))
        assert step(client).statistics.running == 1
        client.send(messages.Abort(FIRST))
        while (last := step(client)).statistics.running:
            pass
        assert (last.keys, last.outputs) == (b"", [])
        assert (last.statistics.blocks_free, last.statistics.slots_free) == (8000, 1)


def test_resources_freed_by_an_abort_are_reported_before_the_next_step():
    with attached("fake:slots=2") as client:
        endless = Sampling(max_tokens=900_000)
        client.send(*(submit(key, [5], endless) for key in (1, 2)))
        while (before := step(client)).statistics.running < 2:
            pass
        client.send(messages.Abort(FIRST))
        while (received := step(client)).statistics.slots_free == 0:
            before = received
        assert (received.keys, received.outputs, received.statistics.steps) == (
            b"",
            [],
            before.statistics.steps,
        )
        assert [key for key, _ in step(client).plain()] == [FIRST + 1]


def test_failed_sequence_is_reported_with_the_reason_and_the_child_continues():
    with attached() as client:
        client.send(submit(1, [4000]))
        (output,) = step(client).outputs
        assert "no token 4000" in str(output.error)
        client.send(submit(2, [4]))
        assert step(client).tokens == messages.pack_tokens(fake_child.answer([4], 1))


def test_failed_step_is_reported_and_the_child_continues():
    with attached("fake:raise_in_step=1") as client:
        client.send(submit(1, [4]))
        (output,) = step(client).outputs
        assert output.error == "the engine's step failed: RuntimeError: the fake device failed"
        client.send(submit(2, [4]))
        assert step(client).tokens == messages.pack_tokens(fake_child.answer([4], 1))


def test_message_may_arrive_in_pieces():
    with attached() as client:
        for byte in encode_frame(submit(1, [4])):
            client.connection.sendall(bytes([byte]))
        assert step(client).tokens == messages.pack_tokens(fake_child.answer([4], 1))


@pytest.mark.parametrize(
    ("path", "reason"),
    [("fake:fail_load", "no such fake model"), ("fake:crash_load", "RuntimeError: a bug in loading")],
)
def test_failed_load_is_reported_with_the_reason(path, reason):
    with child(path) as parent:
        assert isinstance(parent.receive(), messages.LoadProgress)
        assert messages.LoadFailure(reason) == parent.receive()


def test_load_without_a_compiler_is_reported_with_what_to_do():
    with child("fake:no_compiler") as parent:
        assert isinstance(parent.receive(), messages.LoadProgress)
        assert parent.receive() == messages.LoadFailure(
            "RuntimeError: Failed to find C compiler. Please specify via CC environment variable. "
            f"To compile its GPU kernels Triton needs one: {ADVICE}."
        )


def test_child_imports_neither_torch_nor_trio_before_it_loads():
    code = (
        "import sys, fairlead.engine.worker.main; sys.exit(bool({'torch', 'trio', 'numpy'} & "
        "set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_parents_side_imports_neither_torch_nor_the_engine():
    code = (
        "import sys, fairlead.nodes.engines.client; "
        "sys.exit(bool({'torch', 'fairlead.engine', 'fairlead.engine.worker.main'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_process_finds_the_end_tokens_of_its_model_and_constrains_answers_without_any() -> None:
    spec = messages.WorkerSpec(path=str(demonstration_model()), device="cpu", dtype="float32")
    loaded = main._load(spec, lambda _fraction, _stage: None)
    assert loaded.eos_token_ids == (1,)
    found = []
    for ends in ((1,), (loaded.vocab_size,), ()):
        compiler = main._compiler(msgspec.structs.replace(loaded, eos_token_ids=ends), spec)
        assert compiler is not None
        found.append(compiler.missing_end)
        compiler.close()
    assert found == [None, loaded.vocab_size, loaded.vocab_size]
