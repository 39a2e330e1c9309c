"""Threads for work that takes longer for larger requests and responses, so that it delays no stream.

Tenants use the threads in turn (`turns`). Small work is done at once, in the event loop's thread.
"""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from math import inf
from typing import Any, TypeVar

from fairlead.base.config import Config, Limits
from fairlead.base.errors import QueueFull
from fairlead.generation.caller import Caller
from fairlead.generation.turns import RETRY_S, Threads, Turns, in_turn
from fairlead.language.structured.trial_messages import TrialResult
from fairlead.language.structured.trials import GrammarTrials, TrialFailed
from fairlead.router.quotas.key_quotas import KeyQuotas

Parsed = TypeVar("Parsed")
Encoded = TypeVar("Encoded")

# From this size on, tokenizing could delay the next token of every stream, so a thread does it.
LONG_BODY_BYTES = 8 * 1024
ENCODING_THREADS = 2
# From this size on, parsing could, too. It holds the GIL: two at a time would hold it twice as long.
LARGE_BODY_BYTES = 64 * 1024
PARSING_THREADS = WRITING_THREADS = 1
TRIALS = 2  # of grammars at a time, each in a process
FORMS, FORMS_EACH = 16, 2
"""How many forms of answers are checked and tried at a time, and of one tenant. Others wait at no cost."""


class Offload:
    """Parsing, encoding and writing, in threads where they take long."""

    def __init__(self, config: Config, quotas: KeyQuotas) -> None:
        timeout_s = config.queue.timeout_s
        self._limits = config.limits
        self._quotas = quotas
        self._parsing = Threads(PARSING_THREADS, timeout_s=timeout_s)
        self._writing = Threads(WRITING_THREADS, timeout_s=timeout_s)
        # A stream has begun, so it waits for its turn as long as its client does. Each connection has one.
        self._streaming = Threads(WRITING_THREADS, timeout_s=inf, most_waiting=config.limits.connections)
        self._encoding = Threads(ENCODING_THREADS, timeout_s=timeout_s)
        self._trying = Threads(TRIALS, timeout_s=timeout_s)
        self._forming = Turns(FORMS, each=FORMS_EACH)
        self._timeout_s = timeout_s
        self._trials = GrammarTrials(cpu_s=config.limits.grammar_timeout_s)

    async def parse(self, tenant: str, body: bytes, parse: Callable[[bytes, Limits], Parsed]) -> Parsed:
        """Parse a body, in a thread if it is large, by tenants' turns.

        Raises `InvalidRequest`; for a large body also `QueueFull` and `QueueTimeout`.
        """
        if len(body) <= LARGE_BODY_BYTES:
            return parse(body, self._limits)
        return await self._parsing.run(tenant, parse, body, self._limits)

    async def decode(self, caller: Caller, body: bytes, decode: Callable[[bytes, Limits], Parsed]) -> Parsed:
        """Call a function that parses a body and converts what it contains, in a thread for a long body.

        Raises as `parse` and `encode` do.
        """
        if len(body) > LARGE_BODY_BYTES:
            return await self.parse(caller.tenant, body, decode)
        return await self.encode(caller, decode, body, self._limits)

    async def encode(
        self, caller: Caller, encode: Callable[..., Encoded], *arguments: Any, **options: Any
    ) -> Encoded:
        """Call a function that takes longer for longer prompts, as `in_turn` does.

        Raises `RateLimited`, too, if the body is long and the key's limits are used up.
        """
        if caller.body_bytes < LONG_BODY_BYTES:
            return encode(*arguments, **options)
        await self._quotas.check(caller.api_key)
        return await self.in_turn(caller, partial(encode, *arguments, **options))

    async def in_turn(self, caller: Caller, encode: Callable[..., Encoded], *arguments: Any) -> Encoded:
        """Call a function that takes longer for longer texts: for a long body in a thread, by tenants' turns.

        Raises what the function raises, `QueueFull` and `QueueTimeout`.
        """
        if caller.body_bytes < LONG_BODY_BYTES:
            return encode(*arguments)
        return await self._encoding.run(caller.tenant, encode, *arguments)

    async def in_thread(self, tenant: str, function: Callable[..., Encoded], *arguments: Any) -> Encoded:
        """Call a function that takes milliseconds whatever the size, in a thread, by tenants' turns."""
        return await self._encoding.run(tenant, function, *arguments)

    def form_in_turn(self, caller: Caller) -> AbstractAsyncContextManager[None]:
        """Enter the block by tenants' turns, to check the form of an answer and to try its grammar.

        The checks take milliseconds for a hostile schema. A tenant that sends many has two of them at a time,
        and nothing is done for a client that leaves before its turn. Raises as `in_turn` does.
        """
        return in_turn(self._forming, caller.tenant, timeout_s=self._timeout_s)

    async def try_grammar(self, caller: Caller, grammar: str) -> TrialResult:
        """Try a grammar in a process of its own. Raises as `in_turn` does, and `QueueFull` if that failed."""
        return await self._trying.run(caller.tenant, self._try, caller.tenant, grammar)

    async def call(self, caller: Caller, name: str, *arguments: Any) -> Any:
        """Call a function where grammars are tried; see `GrammarTrials.call`.

        Raises `TrialRefused`, and as `try_grammar` does.
        """
        return await self._trying.run(caller.tenant, self._call, caller.tenant, name, *arguments)

    def _call(self, tenant: str, name: str, *arguments: Any) -> Any:
        try:
            return self._trials.call(name, *arguments, owner=tenant)
        except TrialFailed as error:
            raise QueueFull(str(error), retry_after_s=RETRY_S) from error

    def _try(self, tenant: str, grammar: str) -> TrialResult:
        try:
            return self._trials.run(grammar, tenant)
        except TrialFailed as error:
            raise QueueFull(str(error), retry_after_s=RETRY_S) from error

    async def write(self, caller: Caller, write: Callable[..., bytes], *arguments: Any) -> bytes:
        """Call a function that writes a long response, in a thread, by turns. Raises as `in_turn` does."""
        return await self._writing.run(caller.tenant, write, *arguments)

    async def write_piece(
        self, tenant: str, write: Callable[..., bytes], *arguments: Any, abandons: bool = True
    ) -> bytes:
        """Call a function that writes a large piece of a stream, in a thread, by tenants' turns.

        A client that reads slowly gets such pieces. `abandons`: when cancelled, do not wait for the thread.
        Raises what the function raises, and `QueueFull`.
        """
        return await self._streaming.run(tenant, write, *arguments, abandons=abandons)
