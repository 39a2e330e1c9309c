"""A model's child process in virtual time, with the real engine and the real demonstration model."""

import contextlib
import struct
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

import msgspec
import trio

from fairlead import messages
from fairlead.engine.device_memory import cache_bytes
from fairlead.engine.loading import load_runner
from fairlead.engine.ranks import Membership
from fairlead.errors import LoadFailed
from fairlead.models.parallel import Ranks
from fairlead.worker import main
from fairlead.worker.loop import Loop, MessageInbox
from fairlead.worker.shared_channel import SharedChannel
from simulation.processes import Process


@dataclass
class EnginePlan:
    """How children behave, and what they received. A step takes `step_s`, and loading takes `load_s`.

    With `gpu_mb`, children report a GPU of that size, which holds their weights and KV cache.

    `specs` are those of all children; `submitted` has the lengths of all prompts, in order. `computed` has,
    for each step, the number of its prompt and output tokens.
    """

    step_s: float = 0.1
    load_s: float = 0.5
    is_stuck: bool = False
    gpu_mb: int = 0
    specs: list[messages.WorkerSpec] = field(default_factory=list)
    submitted: list[int] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)
    statistics: messages.EngineStatistics = field(default_factory=messages.EngineStatistics)


class _Gpu(NamedTuple):
    """The `DeviceMemory` of one child's GPU, on which the weights are loaded."""

    total_bytes: int

    def free_and_total(self) -> tuple[int, int]:
        return self.total_bytes - self.taken(), self.total_bytes

    def taken(self) -> int:
        return 100 << 20


def _membership(spec: messages.WorkerSpec) -> Membership | None:
    """Return rank 0's membership; None for one rank. There are no others here, so using it raises."""

    def refuse(_argument: object) -> NoReturn:
        raise AssertionError("there is only one rank")

    ranks = Ranks(0, spec.parallel)
    return None if ranks.size == 1 else Membership(ranks, join=refuse, send=refuse, give_up=refuse)


class _ParentChannel:
    """The parent's connection, as a `Loop` or a `SharedChannel` uses it: an inbox and an outbox.

    The child fills and empties them between turns.
    """

    def __init__(self, number: int) -> None:
        self.inbox: list[messages.ToChild] = []
        self.outbox: deque[messages.ToParent] = deque()
        self._number = number

    @property
    def has_received(self) -> bool:
        return bool(self.inbox)

    def fileno(self) -> int:
        return self._number

    def read(self, *, wait_s: float | None) -> list[messages.ToChild]:  # the child has waited already
        received, self.inbox = self.inbox, []
        return received

    def write(self, message: messages.ToParent) -> None:
        self.outbox.append(message)


class _Inbox:
    """The inbox of a `Loop`: `channel`'s. What a step writes is kept until the step has taken its time."""

    def __init__(self, channel: MessageInbox, plan: EnginePlan) -> None:
        self._channel = channel
        self._plan = plan
        self._written: list[messages.StepOutputs] = []

    def read(self, *, wait_s: float | None) -> list[messages.ToChild]:
        received = self._channel.read(wait_s=0.0)
        for message in received:
            if isinstance(message, messages.Submit):
                self._plan.submitted.append(len(message.prompt) // struct.calcsize("i"))
        return received

    def write(self, message: messages.StepOutputs) -> None:
        self._written.append(message)

    def flush(self) -> None:
        for message in self._written:
            self._channel.write(message)
        self._written.clear()


def _close_connections(shared: SharedChannel) -> None:
    for connection, _ in shared._fronts.values():
        connection.close()


class EngineChild:
    """One child: what `fairlead.worker.main` does, on a simulated machine."""

    def __init__(self, process: Process, plan: EnginePlan) -> None:
        self._process = process
        self._plan = plan
        (self._end,) = process.ends.values()
        self._splitter = messages.FrameSplitter()

    async def run(self) -> int:
        """Load, then serve until the parent closes the connection."""
        first, *frames = await self._receive()
        spec = messages.spec_decoder.decode(first)
        self._plan.specs.append(spec)
        with contextlib.ExitStack() as closing:
            return await self._load_and_run(spec, frames, closing)

    async def _load_and_run(
        self, spec: messages.WorkerSpec, frames: list[bytes], closing: contextlib.ExitStack
    ) -> int:
        listener = None if spec.listen is None else closing.enter_context(main._bound(spec.listen))
        await self._process.pause(self._plan.load_s)
        try:
            model = load_runner(spec, lambda _fraction, _stage: None, membership=_membership(spec))
        except LoadFailed as error:
            await self._send(messages.LoadFailure(error.message))
            return 1
        if self._plan.gpu_mb:
            gpu = _Gpu(self._plan.gpu_mb << 20)
            taken = gpu.taken() + cache_bytes(gpu, spec.gpu_memory, spec.kv_cache_bytes)
            model = msgspec.structs.replace(
                model, device="cuda:0", gpu_bytes=taken, gpu_total_bytes=gpu.total_bytes
            )
        engine, ready = main._engine(model, spec), main._ready(model)
        self._end.refs += 1
        number = self._process.machine.open(self._end)
        closing.callback(self._process.machine.close, number)
        parent = _ParentChannel(number)
        shared = None if listener is None else main._shared(parent, listener, ready, spec.first_grant)  # type: ignore[arg-type]
        if shared is not None:
            closing.callback(_close_connections, shared)
        inbox = _Inbox(shared or parent, self._plan)
        loop = Loop(engine, model.runner, inbox, clock=trio.current_time)
        await self._send(ready)
        while True:
            parent.inbox += map(messages.to_child_decoder.decode, frames)
            if self._plan.is_stuck and not engine.idle:
                await trio.sleep_forever()
            before = engine.statistics()
            loop.turn()
            self._plan.statistics = engine.statistics()
            if (steps := self._plan.statistics.steps - before.steps) > 0:
                self._plan.computed.append(self._plan.statistics.step_tokens - before.step_tokens)
                await self._process.pause(self._plan.step_s * steps)
            inbox.flush()
            while parent.outbox:
                await self._send(parent.outbox.popleft())
            wait_s = engine.wait_s(trio.current_time())
            frames = []
            with trio.move_on_after(float("inf") if wait_s is None else wait_s):
                if shared is None:
                    frames = await self._receive()
                else:
                    await shared._poll.wait()  # type: ignore[attr-defined]  # the simulated one
            if shared is not None and self._end.is_ready("read"):
                frames = await self._receive()

    async def _receive(self) -> list[bytes]:
        while True:
            data = await self._end.receive()
            await self._process.pause(0)
            if not data:
                raise BrokenPipeError
            if frames := list(self._splitter.feed(data)):
                return frames

    async def _send(self, message: messages.ToParent) -> None:
        await self._end.send(messages.encode_frame(message))
