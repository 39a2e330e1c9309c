"""Measure what fronts cost an engine's step: the same 1,024 sequences submitted by one client, or by several.

    python bench/engine_fronts.py [--sequences 1024] [--rounds 5] [--out bench/results/engine_fronts.json]

The child's loop runs in this process, over real sockets, with a runner that computes nothing: what is left is
the work of the host in a step. Each figure is the median time of a step, in microseconds, of the best round;
the rounds alternate between the cases. Reading the frames is not included.
"""

import argparse
import contextlib
import json
import platform
import socket
import statistics
import tempfile
import time
from array import array
from pathlib import Path
from typing import Any, ClassVar

from fairlead.base import messages
from fairlead.base.frames import FrameSocket, encode_frame
from fairlead.base.grant import Grant
from fairlead.base.job import Sampling
from fairlead.engine.engine import Engine
from fairlead.engine.step import SampledTokens
from fairlead.engine.worker.loop import Loop
from fairlead.engine.worker.shared_channel import SharedChannel, bind

CASES = {"1 client": 1, "2 clients": 2, "4 clients": 4, "16 clients": 16}
STEPS = 150
WARM_UP = 30
READY = messages.Ready(1, 1, 1, 1, 1, "cpu", "none", 0, 0)


class NoWork:
    """A runner, and its pending step, that returns the same token for every row."""

    overlaps = False
    samples_several = True
    columns: ClassVar[dict[str, int]] = {}
    arenas = 2

    def launch(self, step: Any, _batch: Any) -> "NoWork":
        self._samples = step.samples
        return self

    def wait(self) -> SampledTokens:
        return SampledTokens(array("i", [9]) * self._samples)

    def release(self, _blocks: Any) -> None:
        """Do nothing."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sequences", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rounds: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(options.rounds):
        for name, count in CASES.items():
            rounds[name].append(measure(options.sequences, count))
    result = {
        "sequences": options.sequences,
        "python": platform.python_version(),
        "machine": platform.processor() or platform.machine(),
        "step_us": {name: round(min(times), 1) for name, times in rounds.items()},
        "rounds_us": {name: [round(value, 1) for value in times] for name, times in rounds.items()},
    }
    text = json.dumps(result, indent=2)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")


def measure(sequences: int, count: int) -> float:
    """Return the median time of a step in microseconds."""
    runner = NoWork()
    engine = Engine(
        runner,
        slots=sequences,
        max_batch=sequences,
        max_batched_tokens=max(4096, sequences),
        max_model_len=1024,
        blocks_total=64 * sequences,
        block_size=16,
        vocab_size=50,
        eos_token_ids=(0,),
        draw_seed=lambda: 1,
    )
    with tempfile.TemporaryDirectory() as directory:
        ours, theirs = socket.socketpair()
        path = str(Path(directory) / "engine.sock")
        with ours, theirs, bind(path) as listener:
            listener.listen()
            parent = FrameSocket(theirs, messages.from_parent_decoder)
            channel = SharedChannel(parent, listener, READY)
            turn = Loop(engine, runner, channel).turn
            submits = [bytearray() for _ in range(count)]
            for number in range(sequences):
                index = number % count
                key = index + 1 << messages.KEY_BITS | number + 1
                prompt = messages.pack_tokens([1 + number % 40] * 8)
                submit = messages.Submit(key, prompt, Sampling(max_tokens=900), grant=Grant(1, number))
                submits[index] += encode_frame(submit)
            clients = [_attached(path, channel) for _ in range(count)]
            for client, data in zip(clients, submits, strict=True):
                _send(client, data, turn)
            times = []
            for number in range(WARM_UP + STEPS):
                began = time.perf_counter()
                turn()
                if number >= WARM_UP:
                    times.append(time.perf_counter() - began)
                _drain(clients)
            assert engine.statistics().running == sequences
            for client in clients:
                client.close()
            channel.close()
            return 1e6 * statistics.median(times)


def _attached(path: str, channel: Any) -> socket.socket:
    front = socket.socket(socket.AF_UNIX)
    front.connect(path)
    front.sendall(encode_frame(messages.Attach(messages.PROTOCOL_VERSION, "front")))
    channel.read(wait_s=0.0)
    channel.read(wait_s=0.0)
    return front


def _send(client: socket.socket, data: bytearray, turn: Any) -> None:
    client.setblocking(False)
    while data:
        with contextlib.suppress(BlockingIOError):
            data = data[client.send(data) :]
        turn()
        _drain([client])


def _drain(clients: list[socket.socket]) -> None:
    for client in clients:
        client.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while client.recv(1 << 20):
                pass


if __name__ == "__main__":
    main()
