"""Messages between a model's child process, its parent and its clients; see `frames`.

The parent starts, watches and ends the child. They trust each other's messages, and closing either end of
their socketpair ends the child. Clients connect to the unix socket `WorkerSpec.listen`, and submit sequences.
A malformed message ends the connection of the client that sent it.
"""

import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, repeat
from typing import Literal

import msgspec

from fairlead.base.grant import FIRST_GRANT, Grant
from fairlead.base.job import FinishReason, Sampling, TokenLogprob

_INT_IS_LITTLE_INT32 = array("i", [1]).tobytes() == b"\x01\0\0\0"

# The version of the messages between an engine and its clients: increased when a message changes.
PROTOCOL_VERSION = 6
# A sequence's key is `prefix << KEY_BITS | number`. The prefix is that of its connection, 1 or more.
KEY_BITS = 40

ErrorCode = Literal["engine_failed", "grammar_failed", "invalid_request", "request_timeout", "stale_grant"]


class Speculation(msgspec.Struct, frozen=True):
    """Prompt lookup: what followed a sequence's last tokens before is likely to follow them again.

    ngram: how many last tokens must have occurred before.
    drafts: how many tokens are tried in a step.
    """

    ngram: int = 3
    drafts: int = 4


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="spec"):
    """The model that a child loads, and its limits. Sent as the first frame. None: choose what fits.

    path: the model's folder.
    eos_token_ids: the tokens that end an answer. The process sets them itself, for all of its ranks: a
        dispatcher with fronts has read nothing of the model.
    device: where it is computed.
    dtype: the type of weights and activations.
    quantization: the name of a weight format; None: the weights stay as they are.
    slots: how many sequences run at once.
    max_batch: how many of them a step may compute.
    max_batched_tokens: how many tokens a step may compute.
    max_model_len: the most tokens of a sequence, prompt and output.
    max_input_tokens: the most tokens of a prompt.
    max_output_tokens: the most tokens of an answer.
    kv_cache_bytes: a bound on the KV cache.
    kv_cache_entries: the same, in tokens.
    eviction_threshold: cached blocks of finished sequences are evicted down to this part of either bound.
    cleanup_interval_s: how often.
    eviction_policy: which ones first.
    gpu_memory: the child's budget of GPU memory: a fraction of the total up to 1, or MiB.
    watchdog_s: how long a step may take before the parent ends the child.
    block_size: the tokens of a block.
    threads: how many threads compute.
    parallel: how many processes compute the model together. They share `kv_cache_bytes` and `threads`, and
        each uses `gpu_memory` of a GPU of its own.
    speculation: how drafts are made; None: there are none.
    target_step_s: how long a step with decodes is to take, in seconds; 0: as long as it does; None: choose.
    listen: the path of the unix socket for clients, in a directory that only this user can enter.
    first_grant: grants of its epoch before this one were for an earlier run of the model.
    """

    path: str
    eos_token_ids: tuple[int, ...] = ()
    device: str = "auto"
    dtype: str = "auto"
    quantization: str | None = None
    slots: int | None = None
    max_batch: int | None = None
    max_batched_tokens: int | None = None
    max_model_len: int | None = None
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None
    kv_cache_bytes: int | None = None
    kv_cache_entries: int | None = None
    eviction_threshold: float = 0.8
    cleanup_interval_s: float = 1.0
    eviction_policy: Literal["lru", "fifo"] = "lru"
    gpu_memory: float | None = None
    watchdog_s: float = 30.0
    block_size: int = 16
    threads: int | None = None
    parallel: int = 1
    speculation: Speculation | None = None
    target_step_s: float | None = None
    listen: str = ""
    first_grant: Grant = FIRST_GRANT


# Parent or client → child ---------------------------------------------------------------------------


class Submit(msgspec.Struct, frozen=True, array_like=True, tag="submit"):
    """A new sequence.

    key: chosen by the sender, higher than all before.
    prompt: token ids, little-endian int32.
    sampling: how it samples.
    priority: the class of its job; 0 is the last to be preempted.
    timeout_s: the time that is left, from now; None: no limit.
    salt: sequences with different salts share no cached prefixes.
    embed: whether to compute the prompt's embedding, and no tokens.
    grant: that of its job; required from fronts.
    tenant: a number for whose it is, the same in all processes; it says nothing else.
    """

    key: int
    prompt: bytes
    sampling: Sampling
    priority: int = 1
    timeout_s: float | None = None
    salt: bytes = b""
    embed: bool = False
    grant: Grant | None = None
    tenant: int = 0


class Prepare(msgspec.Struct, frozen=True, array_like=True, tag="prepare"):
    """Compile a grammar for sequences to come. It needs no grant, because it takes no seat.

    key: an `Output` for it ends this: with a finish reason when the grammar is compiled, else with an error.
    grammar: the grammar.
    salt: that of the sequences.
    grammar_bytes: as in `Sampling`.
    """

    key: int
    grammar: str
    salt: bytes = b""
    grammar_bytes: int = 0


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """Ends a sequence or a preparation. Has no effect on one that has ended."""

    key: int


class Suspend(msgspec.Struct, frozen=True, array_like=True, tag="suspend"):
    """Takes a sequence out of steps, and its slot, until `Resume`. Has no effect on one that has ended."""

    key: int


class Resume(msgspec.Struct, frozen=True, array_like=True, tag="resume"):
    """Lets a suspended sequence go on where it was. Has no effect on any other."""

    key: int


class Ping(msgspec.Struct, frozen=True, array_like=True, tag="ping"):
    """The parent requests a frame with the current statistics."""


class Epoch(msgspec.Struct, frozen=True, array_like=True, tag="epoch"):
    """The parent demands that grants of lower epochs are refused from now on."""

    epoch: int


class Attach(msgspec.Struct, frozen=True, array_like=True, tag="attach"):
    """The first frame of a client, whose `name` is for logs."""

    version: int
    name: str


# Child → parent or client ---------------------------------------------------------------------------


class LoadProgress(msgspec.Struct, frozen=True, array_like=True, tag="progress"):
    """The progress of the load: `fraction` is 0…1."""

    fraction: float
    stage: str


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The model is loaded.

    slots: how many sequences run at once.
    max_model_len: the most tokens of a sequence, prompt and output.
    vocab_size: the width of the logits.
    blocks_total: the blocks of the KV cache.
    block_size: the tokens of a block.
    device: where it is computed.
    dtype: the type of weights and activations.
    weight_bytes: the memory of the weights.
    kv_cache_bytes: the memory of the KV cache.
    kernel: what computes its steps: "torch", or an instruction set such as "amx".
    embeds: whether it makes embeddings of prompts, and no text.
    gpu_bytes: the memory that the child has taken of its GPU; 0 on a CPU.
    gpu_total_bytes: the GPU's memory; 0 on a CPU.
    """

    slots: int
    max_model_len: int
    vocab_size: int
    blocks_total: int
    block_size: int
    device: str
    dtype: str
    weight_bytes: int
    kv_cache_bytes: int
    kernel: str = "torch"
    embeds: bool = False
    gpu_bytes: int = 0
    gpu_total_bytes: int = 0


class LoadFailure(msgspec.Struct, frozen=True, array_like=True, tag="load_failed"):
    """The model cannot be loaded, for the reason in `message`. The child ends after it."""

    message: str


class Output(msgspec.Struct, frozen=True, array_like=True):
    """One sequence's output of one step.

    key: the sequence.
    token_ids: the tokens.
    logprobs: those of the tokens, if requested.
    finish_reason: set in the last output of a sequence, unless it has an error.
    stop_token: the id that ended it, if one did; it is also the last of `token_ids`.
    error: why it failed; it is the last output then.
    code: the error's; None: `engine_failed`.
    vector: the prompt's embedding, float32, little-endian; such a sequence has no tokens, and ends with it.
    prompt_logprobs: those of the next tokens of the prompt, beginning with its second; the last of them come
        with the first token.
    cached_tokens: with the first token: the number of tokens of the prompt that were cached.
    param: the client's field at fault, if one is.
    """

    key: int
    token_ids: list[int]
    logprobs: list[TokenLogprob] = []
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    error: str | None = None
    code: ErrorCode | None = None
    vector: bytes = b""
    prompt_logprobs: list[TokenLogprob] = []
    cached_tokens: int = 0
    param: str | None = None


class EngineStatistics(msgspec.Struct, frozen=True, array_like=True):
    """The engine's own counts after a step. Counts of steps and tokens are since the start.

    running: sequences that have a slot.
    pending: sequences that wait for a slot or for blocks.
    slots_free: slots that are free.
    blocks_free: blocks of the KV cache that are free.
    blocks_total: all of its blocks.
    steps: steps so far.
    prompt_tokens: tokens of prompts.
    generated_tokens: tokens of answers.
    prefix_queries: tokens that were looked up in the prefix cache.
    prefix_hits: tokens that were found there.
    preemptions: sequences that lost their blocks to others, and were computed again.
    cached_tokens: tokens in the prefix cache now.
    cache_usage: the fraction of the blocks that running and suspended sequences hold, 0 to 1.
    step_s: the time that all steps took.
    step_tokens: the tokens that they computed.
    draft_tokens: drafts that were tried.
    accepted_tokens: drafts that the model has chosen itself.
    suspended: sequences that have no slot until they are resumed.
    """

    running: int = 0
    pending: int = 0
    slots_free: int = 0
    blocks_free: int = 0
    blocks_total: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    cached_tokens: int = 0
    cache_usage: float = 0.0
    step_s: float = 0.0
    step_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    suspended: int = 0


class Attached(msgspec.Struct, frozen=True, array_like=True, tag="attached"):
    """Answers `Attach`: the prefix of the client's keys, and the loaded model."""

    prefix: int
    ready: Ready


class AttachRefused(msgspec.Struct, frozen=True, array_like=True, tag="attach_refused"):
    """Answers `Attach`, or a connection. The child closes the connection after it."""

    reason: str


class StepOutputs(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """One engine step's outputs for all sequences of a connection. Also answers messages that need no step.

    keys: the sequences that got tokens and nothing else, little-endian int64.
    tokens: the tokens of the first one, then those of the next, little-endian int32.
    outputs: everything else. No sequence is both in `keys` and here.
    statistics: the engine's counts.
    counts: how many tokens each of `keys` got, a byte each; empty: each got one.

        keys 7 9, counts 1 2, tokens 40 41 42 → sequence 7 got 40, and 9 got 41 and 42
    """

    keys: bytes
    tokens: bytes
    outputs: list[Output]
    statistics: EngineStatistics
    counts: bytes = b""

    def __post_init__(self) -> None:
        rows = len(self.keys) // 8
        tokens = sum(self.counts) if self.counts else rows
        if len(self.keys) % 8 or len(self.tokens) != 4 * tokens or len(self.counts) not in {0, rows}:
            raise ValueError(
                f"{len(self.keys)} bytes of keys, {len(self.counts)} counts and {len(self.tokens)} bytes of "
                "tokens do not match"
            )

    def plain(self) -> Iterator[tuple[int, int]]:
        """Return the pairs of key and token id, a sequence's tokens in their order."""
        keys: Iterable[int] = struct.unpack(f"<{len(self.keys) // 8}q", self.keys)
        if self.counts:
            keys = chain.from_iterable(map(repeat, keys, self.counts))
        return zip(keys, struct.unpack(f"<{len(self.tokens) // 4}i", self.tokens), strict=True)


FromParent = WorkerSpec | Ping | Epoch
FromClient = Attach | Submit | Prepare | Abort | Suspend | Resume
ToEngine = Submit | Prepare | Abort | Suspend | Resume | Ping | Epoch
ToParent = LoadProgress | Ready | LoadFailure | StepOutputs
ToClient = Attached | AttachRefused | StepOutputs

from_parent_decoder = msgspec.msgpack.Decoder(FromParent)
from_client_decoder = msgspec.msgpack.Decoder(FromClient)
to_parent_decoder = msgspec.msgpack.Decoder(ToParent)
to_client_decoder = msgspec.msgpack.Decoder(ToClient)


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Return token ids as `Submit.prompt`. Raises `struct.error` if one is not a 32-bit integer.

    An array of C's `int` is a thousand times as fast as a list.
    """
    if isinstance(token_ids, array) and token_ids.typecode == "i" and _INT_IS_LITTLE_INT32:
        return token_ids.tobytes()
    return struct.pack(f"<{len(token_ids)}i", *token_ids)
