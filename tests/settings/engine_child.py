"""A model's child process in virtual time, with the real engine and the real demonstration model."""

import contextlib
import struct
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

import msgspec
import trio

from fairlead.base import messages
from fairlead.base.errors import LoadFailed
from fairlead.base.frames import FrameSocket, PeerGone
from fairlead.engine.device_memory import cache_bytes
from fairlead.engine.loading import load_runner
from fairlead.engine.models.parallel import Ranks
from fairlead.engine.ranks import Membership
from fairlead.engine.worker import main
from fairlead.engine.worker.loop import Loop, MessageInbox
from fairlead.engine.worker.shared_channel import MOST_CLIENTS, SharedChannel
from simulation.processes import Process
from simulation.sockets import FakeSocket


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


class _Inbox:
    """The inbox of a `Loop`: `channel`'s. What a step writes is kept until the step has taken its time."""

    def __init__(self, channel: MessageInbox, plan: EnginePlan) -> None:
        self._channel = channel
        self._plan = plan
        self._written: list[messages.StepOutputs] = []

    def read(self, *, wait_s: float | None) -> list[messages.ToEngine]:
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


class EngineChild:
    """One child: what `fairlead.engine.worker.main` does, on a simulated machine."""

    def __init__(self, process: Process, plan: EnginePlan) -> None:
        self._process = process
        self._plan = plan
        (end,) = process.ends.values()
        end.refs += 1
        self._end = end
        self._connection = FakeSocket(fileno=process.machine.open(end))
        self._parent = FrameSocket(self._connection, messages.from_parent_decoder)

    async def run(self) -> int:
        """Load, then serve until the parent closes the connection."""
        with contextlib.ExitStack() as closing:
            closing.callback(self._connection.close)
            try:
                await self._end.wait("read")
                spec = self._parent.receive()
                assert isinstance(spec, messages.WorkerSpec)
                self._plan.specs.append(spec)
                return await self._load_and_run(spec, closing)
            except PeerGone:
                return 0

    async def _load_and_run(self, spec: messages.WorkerSpec, closing: contextlib.ExitStack) -> int:
        listener = closing.enter_context(main._bound(spec.listen))
        await self._process.pause(self._plan.load_s)
        try:
            model = load_runner(spec, lambda _fraction, _stage: None, membership=_membership(spec))
        except LoadFailed as error:
            self._parent.send(messages.LoadFailure(error.message))
            return 1
        if self._plan.gpu_mb:
            gpu = _Gpu(self._plan.gpu_mb << 20)
            taken = gpu.taken() + cache_bytes(gpu, spec.gpu_memory, spec.kv_cache_bytes)
            model = msgspec.structs.replace(
                model, device="cuda:0", gpu_bytes=taken, gpu_total_bytes=gpu.total_bytes
            )
        engine, ready = main._engine(model, spec), main._ready(model)
        listener.listen(MOST_CLIENTS)
        channel = SharedChannel(self._parent, listener, ready, spec.first_grant)
        closing.callback(channel.close)
        inbox = _Inbox(channel, self._plan)
        loop = Loop(engine, model.runner, inbox, clock=trio.current_time)
        self._parent.send(ready)
        while True:
            if self._plan.is_stuck and not engine.idle:
                await trio.sleep_forever()
            before = engine.statistics()
            loop.turn()
            self._plan.statistics = engine.statistics()
            if (steps := self._plan.statistics.steps - before.steps) > 0:
                self._plan.computed.append(self._plan.statistics.step_tokens - before.step_tokens)
                await self._process.pause(self._plan.step_s * steps)
            inbox.flush()
            wait_s = engine.wait_s(trio.current_time())
            with trio.move_on_after(float("inf") if wait_s is None else wait_s):
                await channel._poll.wait()  # type: ignore[attr-defined]  # the simulated one
            await self._process.pause(0)
