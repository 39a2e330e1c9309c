"""Messages between a server and its process for grammars. Only that process imports their libraries."""

import msgspec


class Trial(msgspec.Struct, frozen=True):
    """A grammar to compile, or another call.

    `cpu_s`: the processor time that it may take.
    `memory_bytes`: the memory that it may take.
    `most_s`: how long that may last on a machine with other work.
    `call`: the name in `CALLS` of a function to call instead; empty: none.
    `arguments`: of that, as `encode_values` writes them.
    `is_idle`: it runs only while a processor is idle from its start, for `IDLE_S` at most.
    """

    grammar: str
    cpu_s: float
    memory_bytes: int
    most_s: float
    call: str = ""
    arguments: bytes = b""
    is_idle: bool = False


class TrialResult(msgspec.Struct, frozen=True):
    """The end of a trial.

    `fault`: why the grammar is refused, or why the call has not returned; None: it compiles, or has returned.
    `is_busy`: the machine had no time for it, which says nothing of the grammar.
    `memory_bytes`: what it takes when it is compiled.
    `value`: what the call has returned, as `encode_values` writes it.
    `was_long`: it has taken more than `LONG_S` of processor time.
    """

    fault: str | None = None
    is_busy: bool = False
    memory_bytes: int = 0
    value: bytes = b""
    was_long: bool = False
