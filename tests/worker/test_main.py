"""The child's side alone, over a socketpair in this process: its answers to messages."""

import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import msgspec
import pytest

from fairlead import messages
from fairlead.compilers import ADVICE
from fairlead.config import demonstration_model
from fairlead.job import Sampling
from fairlead.worker import channel, main
from worker import fake_child

GREEDY = Sampling(max_tokens=3)


class Parent:
    """The other end of a child's socket, with blocking reads and writes."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._splitter = messages.FrameSplitter()
        self._payloads: list[bytes] = []

    def send(self, *sent: messages.WorkerSpec | messages.ToChild) -> None:
        self.connection.sendall(b"".join(map(messages.encode_frame, sent)))

    def receive(self) -> messages.ToParent:
        while not self._payloads:
            data = self.connection.recv(1 << 16)
            assert data, "the child closed its end"
            self._payloads.extend(self._splitter.feed(data))
        return messages.to_parent_decoder.decode(self._payloads.pop(0))


@contextlib.contextmanager
def child(path: str = "fake:") -> Iterator[Parent]:
    """Serve in a thread until the block ends; check that the child ends when its socket is closed."""
    ours, theirs = socket.socketpair()
    ended = []

    def serve() -> None:
        with contextlib.suppress(channel.ParentGone):
            main.serve(channel.Channel(theirs), fake_child.load)
        ended.append(True)

    thread = threading.Thread(target=serve)
    with ours, theirs:
        ours.settimeout(60)
        thread.start()
        try:
            parent = Parent(ours)
            parent.send(messages.WorkerSpec(path=path))
            yield parent
        finally:
            ours.shutdown(socket.SHUT_RDWR)
            thread.join(60)
    assert ended == [True]


def step(parent: Parent) -> messages.StepOutputs:
    message = parent.receive()
    assert isinstance(message, messages.StepOutputs)
    return message


def begin(parent: Parent) -> None:
    assert parent.receive() == messages.LoadProgress(0.5, "weights")
    assert isinstance(parent.receive(), messages.Ready)


def test_loading_is_reported_and_then_the_limits():
    with child("fake:slots=3") as parent:
        assert parent.receive() == messages.LoadProgress(0.5, "weights")
        assert parent.receive() == messages.Ready(3, 1_000_000, 1000, 8000, 1024, "cpu", "fake", 1, 1)


def test_step_is_one_message_for_all_sequences_together():
    with child() as parent:
        begin(parent)
        prompts = {1: [5], 2: [6, 7]}
        parent.send(
            *(messages.Submit(key, messages.pack_tokens(prompt), GREEDY) for key, prompt in prompts.items())
        )
        received: dict[int, list[int]] = {1: [], 2: []}
        for number in range(1, 4):
            message = step(parent)
            plain = dict(message.plain())
            last = {output.key: output.token_ids for output in message.outputs}
            assert ((sorted(plain), [*last]) if number < 3 else (sorted(last), [*plain])) == ([1, 2], [])
            assert message.statistics.steps == number
            for key, token_id in plain.items():
                received[key].append(token_id)
            for key, token_ids in last.items():
                received[key] += token_ids
        assert {key: fake_child.answer(prompt, 3) for key, prompt in prompts.items()} == received
        assert [output.finish_reason for output in message.outputs] == ["length", "length"]
        assert message.statistics.running == 0


def test_abort_alone_is_answered_with_current_counts():
    with child("fake:slots=1") as parent:
        begin(parent)
        endless = Sampling(max_tokens=900_000)
        parent.send(messages.Submit(1, messages.pack_tokens([5]), endless))
        assert step(parent).statistics.running == 1
        parent.send(messages.Abort(1))
        while (last := step(parent)).statistics.running:
            pass
        assert (last.keys, last.outputs) == (b"", [])
        assert (last.statistics.blocks_free, last.statistics.slots_free) == (8000, 1)


def test_resources_freed_by_an_abort_are_reported_before_the_next_step():
    with child("fake:slots=2") as parent:
        begin(parent)
        endless = Sampling(max_tokens=900_000)
        parent.send(*(messages.Submit(key, messages.pack_tokens([5]), endless) for key in (1, 2)))
        while (before := step(parent)).statistics.running < 2:
            pass
        parent.send(messages.Abort(1))
        while (received := step(parent)).statistics.slots_free == 0:
            before = received
        assert (received.keys, received.outputs, received.statistics.steps) == (
            b"",
            [],
            before.statistics.steps,
        )
        assert [key for key, _ in step(parent).plain()] == [2]


def test_failed_sequence_is_reported_with_the_reason_and_the_child_continues():
    with child() as parent:
        begin(parent)
        parent.send(messages.Submit(1, messages.pack_tokens([4000]), GREEDY))
        (output,) = step(parent).outputs
        assert "no token 4000" in str(output.error)
        parent.send(messages.Submit(2, messages.pack_tokens([4]), GREEDY))
        assert step(parent).tokens == messages.pack_tokens(fake_child.answer([4], 1))


def test_failed_step_is_reported_and_the_child_continues():
    with child("fake:raise_in_step=1") as parent:
        begin(parent)
        parent.send(messages.Submit(1, messages.pack_tokens([4]), GREEDY))
        (output,) = step(parent).outputs
        assert output.error == "the engine's step failed: RuntimeError: the fake device failed"
        parent.send(messages.Submit(2, messages.pack_tokens([4]), GREEDY))
        assert step(parent).tokens == messages.pack_tokens(fake_child.answer([4], 1))


def test_message_may_arrive_in_pieces():
    with child() as parent:
        begin(parent)
        for byte in messages.encode_frame(messages.Submit(1, messages.pack_tokens([4]), GREEDY)):
            parent.connection.sendall(bytes([byte]))
        assert step(parent).tokens == messages.pack_tokens(fake_child.answer([4], 1))


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
    code = "import sys, fairlead.worker.main; sys.exit(bool({'torch', 'trio', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_parents_side_imports_neither_torch_nor_the_engine():
    code = (
        "import sys, fairlead.worker.client; "
        "sys.exit(bool({'torch', 'fairlead.engine', 'fairlead.worker.main'} & set(sys.modules)))"
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
