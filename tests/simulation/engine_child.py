"""A fake child process of a model, which exchanges frames of `fairlead.base.messages` in virtual time.

It generates the answers of `words`: in each step one token for each sequence that has a slot. A `ChildPlan`
defines its faults: how it loads, and what it does at its n-th frame.
"""

import signal
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
import trio

from fairlead.base import messages
from fairlead.base.frames import FrameSplitter, encode_frame
from fairlead.base.job import Sampling
from fairlead.language.text.model import TextModel
from simulation import words
from simulation.network import Network
from simulation.processes import Process
from simulation.streams import End

Fate = Literal["die", "exit", "stop", "garbage", "half", "huge", "close", "unknown", "error"]
Loading = Literal["well", "fails", "dies", "hangs", "closes"]

FINAL_FATES = frozenset({"die", "exit", "half", "close"})  # fates after which it sends nothing

MAX_MODEL_LEN = 1024
KILLED = -signal.SIGKILL


@dataclass
class ChildPlan:
    """How a child behaves. `fates`: what it does instead of sending its n-th frame, counted from 1.

    `on_submit` is called with the model and the ticket of each sequence, `on_tokens` also with the number of
    tokens generated.
    """

    slots: int = 2
    load_s: float = 0.5
    step_s: float = 0.05
    loading: Loading = "well"
    fates: dict[int, Fate] = field(default_factory=dict)
    on_tokens: Callable[[str, str, int], None] = lambda _model, _ticket, _tokens: None
    on_submit: Callable[[str, str], None] = lambda _model, _ticket: None


class _Sequence:
    def __init__(self, ticket: str, left: list[int], sampling: Sampling, eos: int) -> None:
        self.ticket = ticket
        self.is_cut = len(left) >= sampling.max_tokens
        self.left = left[: sampling.max_tokens] if self.is_cut else [*left, eos]

    def next(self, key: int) -> messages.Output | int:
        """Return the next token, or the last output."""
        token = self.left.pop(0)
        if self.left:
            return token
        if self.is_cut:
            return messages.Output(key, [token], finish_reason="length")
        return messages.Output(key, [token], finish_reason="stop", stop_token=token)


class _Connection:
    """The child's end of a connection, from which `child` gets the messages. `is_due`: a frame is due."""

    def __init__(self, end: End, decoder: msgspec.msgpack.Decoder[Any]) -> None:
        self.is_due = False
        self._end = end
        self._decoder = decoder
        self._splitter = FrameSplitter()

    async def receive(self) -> list[Any]:
        """Wait for messages; return none when the other end is closed."""
        with suppress(OSError):
            while data := await self._end.receive():
                if received := [self._decoder.decode(frame) for frame in self._splitter.feed(data)]:
                    return received
        return []

    async def send(self, data: bytes) -> None:
        """Send a frame, or a part of it; it is lost if the other end is closed."""
        with suppress(OSError):
            await self._end.send(data)

    def shut(self) -> None:
        """Close it."""
        self._end.shut()


class EngineChild:
    """One child. `plan_of` returns how a model's child behaves. A model is named after its folder.

    It has one client, which its sequences are of: that of a server in one process.
    """

    def __init__(
        self, process: Process, network: Network, text: TextModel, plan_of: Callable[[str], ChildPlan]
    ) -> None:
        self._process = process
        self._network = network
        self._text = text
        self._plan_of = plan_of
        self._model = ""
        self._plan = ChildPlan()
        self._eos = min(text.eos_token_ids)
        (end,) = process.ends.values()
        self._parent = _Connection(end, messages.from_parent_decoder)
        self._client: _Connection | None = None
        self._received: list[Any] = []
        self._news = trio.Event()
        self._sequences: dict[int, _Sequence] = {}
        self._frames = 0
        self._steps = 0
        process.on_signal = self._handle_signal

    async def run(self) -> int:
        """Load, then serve until the parent is gone; return the exit status."""
        if not (received := await self._parent.receive()):
            return 0
        (spec,) = received
        await self._process.pause(0)
        self._model = Path(spec.path).name
        self._plan = self._plan_of(self._model)
        if (status := await self._load()) is not None:
            return status
        address = (spec.listen, 0)
        self._network.serve(address, self._accept)
        try:
            await self._send(self._parent, self._ready())
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._step_forever)
                while received := await self._parent.receive():
                    self._parent.is_due = True
                    self._received += received
                    self._news.set()
                nursery.cancel_scope.cancel()
        finally:
            self._network.stop_serving(address)
            if self._client is not None:
                self._client.shut()
        return 0

    async def _accept(self, end: End) -> None:
        client = _Connection(end, messages.from_client_decoder)
        if await client.receive() != [messages.Attach(messages.PROTOCOL_VERSION, "server")]:
            return
        self._client = client
        self._process.ends[-1] = end
        await self._process.pause(0)
        await self._send(client, messages.Attached(1, self._ready()))
        while received := await client.receive():
            client.is_due = True
            self._received += received
            self._news.set()
        self._sequences.clear()

    async def _step_forever(self) -> None:
        while True:
            if not (self._sequences or self._received):
                await self._news.wait()
            await self._process.pause(self._plan.step_s)
            received, self._received, self._news = self._received, [], trio.Event()
            for message in received:
                match message:
                    case messages.Submit(key, prompt, sampling):
                        self._submit(key, prompt, sampling)
                    case messages.Abort(key):
                        self._sequences.pop(key, None)
            await self._step()

    def _ready(self) -> messages.Ready:
        return messages.Ready(
            slots=self._plan.slots,
            max_model_len=MAX_MODEL_LEN,
            vocab_size=self._text.tokenizer.vocab_size,
            blocks_total=1000,
            block_size=16,
            device="cpu",
            dtype="fake",
            weight_bytes=1,
            kv_cache_bytes=1,
        )

    async def _load(self) -> int | None:
        plan = self._plan
        for stage, fraction in (("config", 0.1), ("weights", 0.7)):
            await self._send(self._parent, messages.LoadProgress(fraction, stage))
            await self._process.pause(plan.load_s / 2)
        match plan.loading:
            case "fails":
                await self._send(self._parent, messages.LoadFailure("the fake model cannot be loaded"))
                return 1
            case "dies":
                self._process.print("Segmentation fault")
                return 3
            case "hangs":
                await trio.sleep_forever()
            case "closes":
                self._parent.shut()
                await trio.sleep_forever()
        return None

    def _submit(self, key: int, prompt: bytes, sampling: Sampling) -> None:
        ids = struct.unpack(f"<{len(prompt) // 4}i", prompt)
        ticket = words.ticket_in(words.text_of(self._text.tokenizer, list(ids)))
        answer = words.pieces_of(self._text.tokenizer, self._model, ticket)
        self._sequences[key] = _Sequence(ticket, answer, sampling, self._eos)
        self._plan.on_submit(self._model, ticket)

    async def _step(self) -> None:
        plain: dict[int, int] = {}
        outputs: list[messages.Output] = []
        for key, sequence in list(self._sequences.items())[: self._plan.slots]:
            output = sequence.next(key)
            self._plan.on_tokens(self._model, sequence.ticket, 1)
            if isinstance(output, int):
                plain[key] = output
            else:
                outputs.append(output)
                del self._sequences[key]
        self._steps += 1
        if self._parent.is_due:
            self._parent.is_due = False
            await self._send(self._parent, self._frame({}, []))
        if self._client is not None and (self._client.is_due or plain or outputs):
            self._client.is_due = False
            await self._send(self._client, self._frame(plain, outputs))

    def _frame(self, plain: dict[int, int], outputs: list[messages.Output]) -> messages.StepOutputs:
        running = min(len(self._sequences), self._plan.slots)
        return messages.StepOutputs(
            struct.pack(f"<{len(plain)}q", *plain),
            struct.pack(f"<{len(plain)}i", *plain.values()),
            outputs,
            messages.EngineStatistics(
                running=running,
                pending=len(self._sequences) - running,
                slots_free=self._plan.slots - running,
                blocks_free=1000 - running,
                blocks_total=1000,
                steps=self._steps,
            ),
        )

    async def _send(self, to: _Connection, message: messages.ToParent | messages.ToClient) -> None:
        """Send a frame, or apply the fault that is planned for it."""
        self._frames += 1
        fate = self._plan.fates.pop(self._frames, None)
        if isinstance(message, messages.StepOutputs) and to is self._client:
            if fate == "unknown":
                message = self._with_unknown_sequences(message)
            elif fate == "error":
                message = self._with_errors(message)
        data = encode_frame(message)
        if fate == "garbage":
            data = b"\x07\x00\x00\x00garbage" + data
        elif fate == "huge":
            data = b"\xff\xff\xff\xff" + data
        elif fate == "stop":
            self._process.send_signal(signal.SIGSTOP)
            await self._process.pause(0)
        elif fate is not None and fate in FINAL_FATES:
            await self._end_at_frame(to, fate, data)
        await to.send(data)

    async def _end_at_frame(self, to: _Connection, fate: Fate, data: bytes) -> None:
        if fate == "close":
            to.shut()
        elif fate == "half":
            await to.send(data[: len(data) // 2])
            self._process.exit_with(KILLED)
        elif fate == "exit":
            self._process.print("RuntimeError: the fake device failed")
            self._process.exit_with(1)
        else:
            self._process.exit_with(KILLED)
        await trio.sleep_forever()

    def _with_unknown_sequences(self, message: messages.StepOutputs) -> messages.StepOutputs:
        """Add output of sequences that the client does not have."""
        keys = message.keys + struct.pack("<q", 1 << 40)
        tokens = message.tokens + struct.pack("<i", 7)
        outputs = [*message.outputs, messages.Output(1 << 41, [7], finish_reason="stop")]
        return msgspec.structs.replace(message, keys=keys, tokens=tokens, outputs=outputs)

    def _with_errors(self, message: messages.StepOutputs) -> messages.StepOutputs:
        """Fail every sequence, as an engine does when logits are not finite."""
        failed = [messages.Output(key, [], error="the logits are not finite") for key in self._sequences]
        self._sequences.clear()
        return self._frame({}, [*message.outputs, *failed])

    def _handle_signal(self, number: int) -> bool:
        if number == signal.SIGUSR1:
            self._process.print("Current thread (most recent call first): fake_step")
        return True
