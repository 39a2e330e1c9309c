"""A client's sequences in an engine's process: submitted, aborted, and delivered to their receivers.

Submitting, suspending and aborting are synchronous. A step's outputs are delivered in one wake-up. Does not
own the connection, which is an `Attachment`'s.
"""

import itertools
import struct
from collections.abc import Sequence

from fairlead.base import messages
from fairlead.base.errors import ContextLengthExceeded, InvalidRequest, NodeFailed
from fairlead.base.frame_link import FrameLink
from fairlead.base.grant import Grant
from fairlead.base.job import Sampling
from fairlead.nodes.engines.open_sequences import OpenSequences, Receiver


class SequenceClient:
    """Sequences over one connection, between `begin` and `end`.

    `statistics` are those of the engine's latest frame on this connection.
    """

    def __init__(self) -> None:
        self.statistics = messages.EngineStatistics()
        self._open = OpenSequences(self.abort)
        self._connection: FrameLink[messages.ToClient] | None = None
        self._max_model_len = 0
        self._keys = itertools.count(1)

    def __len__(self) -> int:
        """Return the number of open sequences."""
        return len(self._open)

    def begin(self, connection: FrameLink[messages.ToClient], ready: messages.Ready, *, prefix: int) -> None:
        """Accept sequences, now that the model is loaded; their keys have this prefix."""
        self._connection = connection
        self._max_model_len = ready.max_model_len
        self._keys = itertools.count((prefix << messages.KEY_BITS) + 1)

    def end(self) -> None:
        """Accept and send nothing more. The open sequences stay until `fail_all`."""
        self._connection = None

    def submit(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        receiver: Receiver,
        *,
        priority: int = 1,
        timeout_s: float | None = None,
        salt: bytes = b"",
        embed: bool = False,
        grant: Grant | None = None,
        tenant: int = 0,
    ) -> int:
        """Start a sequence and return its key; the options are those of `messages.Submit`.

        Raises `NodeFailed` if the child is not ready or gone, `InvalidRequest` if the prompt can never run.
        """
        if self._connection is None:
            raise NodeFailed("the model's process is not running")
        if len(prompt) >= self._max_model_len:
            raise ContextLengthExceeded.of_prompt(
                self._max_model_len, f"this one has {len(prompt)}", param="prompt"
            )
        try:
            packed = messages.pack_tokens(prompt)
        except struct.error:
            raise InvalidRequest("the prompt has a token id outside the vocabulary", param="prompt") from None
        key = next(self._keys)
        self._connection.send(
            messages.Submit(key, packed, sampling, priority, timeout_s, salt, embed, grant, tenant)
        )
        self._open.add(key, receiver)
        return key

    def prepare(self, grammar: str, receiver: Receiver, *, salt: bytes = b"", grammar_bytes: int = 0) -> int:
        """Have a grammar compiled for sequences with this salt; return the key, which `abort` takes.

        Raises `NodeFailed` if the child is not ready or gone.
        """
        if self._connection is None:
            raise NodeFailed("the model's process is not running")
        key = next(self._keys)
        self._connection.send(messages.Prepare(key, grammar, salt, grammar_bytes))
        self._open.add(key, receiver)
        return key

    def abort(self, key: int) -> None:
        """Abort a sequence; its receiver is not called any more. Safe at any time, for any key."""
        if self._open.remove(key) and self._connection is not None:
            self._connection.send(messages.Abort(key))

    def suspend(self, key: int) -> None:
        """Have a running sequence pause, from the engine's next step on. Safe at any time, for any key.

        Its slot is free for others then; how many are paused is in `statistics`.
        """
        if key in self._open and self._connection is not None:
            self._connection.send(messages.Suspend(key))

    def resume(self, key: int) -> None:
        """Have a suspended sequence go on. Safe at any time, for any key."""
        if key in self._open and self._connection is not None:
            self._connection.send(messages.Resume(key))

    async def deliver(self, step: messages.StepOutputs) -> None:
        """Deliver a step's outputs to the receivers, with checkpoints so that other tasks can run."""
        self.statistics = step.statistics
        await self._open.deliver(step)

    def fail_all(self, reason: str) -> None:
        """Fail every open sequence with `NodeFailed`; see `OpenSequences.fail_all`."""
        self._open.fail_all(reason)
