"""A model's child process: loads it, then steps its engine until the parent's end of the socket closes.

One thread, no async. If the model is divided among ranks, this is rank 0, with another thread for each of the
others (`engine/worker/ranks.py`). Guarantees to end with its parent, however that ends, and to print its
stack on SIGUSR1. The engine and torch are imported with the model, after the first frame is read.
"""

import argparse
import contextlib
import faulthandler
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from fairlead.base import messages
from fairlead.base.config import ConfigError
from fairlead.base.errors import LoadFailed
from fairlead.base.frames import FrameSocket, PeerGone
from fairlead.base.runtime import gc_tuning
from fairlead.base.runtime.compilers import explained
from fairlead.engine.worker.lifeline import end_with_parent

if TYPE_CHECKING:
    from fairlead.engine.engine import Engine
    from fairlead.engine.loading import LoadedModel
    from fairlead.engine.worker.shared_channel import ParentSocket
    from fairlead.language.structured.compiler import GrammarCompiler
    from fairlead.language.text.tokenizer import Tokenizer

Report = Callable[[float, str], None]
Load = Callable[[messages.WorkerSpec, Report], "LoadedModel"]


def main(load: Load | None = None) -> int:
    """Run a child on the socket with descriptor `--fd`; return its exit status."""
    gc_tuning.begin()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent decides
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # sent by the parent if a step does not end
    parser = argparse.ArgumentParser(description="A model's process; fairlead starts it.")
    parser.add_argument("--fd", type=int, required=True, help="the inherited socket to the parent")
    connection = socket.socket(fileno=parser.parse_args().fd)
    try:
        if not end_with_parent():
            return 0
        return serve(FrameSocket(connection, messages.from_parent_decoder), load or _load)
    except PeerGone as gone:
        if not str(gone):
            return 0
        traceback.print_exception(gone)
        return 1
    finally:
        connection.close()


def serve(parent: "ParentSocket", load: Load) -> int:
    """Load the model of the first message, then generate until the parent is gone (`PeerGone`).

    Returns an exit status only if the load failed.
    """
    spec = parent.receive()
    assert isinstance(spec, messages.WorkerSpec)
    with contextlib.ExitStack() as listening:
        try:
            listener = listening.enter_context(_bound(spec.listen))
        except OSError as error:
            parent.send(
                messages.LoadFailure(f"the socket for clients, {spec.listen}, cannot be made: {error}")
            )
            return 1
        return _load_and_run(spec, parent, load, listener)


def _load_and_run(  # noqa: RET503  the loop does not return
    spec: messages.WorkerSpec, parent: "ParentSocket", load: Load, listener: socket.socket
) -> int:
    try:
        model = load(spec, lambda fraction, stage: parent.send(messages.LoadProgress(fraction, stage)))
    except (LoadFailed, ConfigError) as error:
        parent.send(messages.LoadFailure(str(error)))
        return 1
    except PeerGone:
        raise
    except Exception as error:  # noqa: BLE001  the parent reports any error to waiting jobs
        traceback.print_exception(error)
        parent.send(messages.LoadFailure(explained(error)))
        return 1
    from fairlead.engine.worker.loop import Loop
    from fairlead.engine.worker.shared_channel import MOST_CLIENTS, SharedChannel

    compiler = None if model.embeds else _compiler(model, spec)
    _tokenizer.cache_clear()  # it may take a hundred megabytes
    engine, ready = _engine(model, spec, compiler), _ready(model)
    listener.listen(MOST_CLIENTS)
    gc_tuning.freeze()  # a full collection would be a pause for all sequences
    with contextlib.closing(SharedChannel(parent, listener, ready, spec.first_grant)) as channel:
        parent.send(ready)
        Loop(engine, model.runner, channel).run()  # until `PeerGone`


@contextlib.contextmanager
def _bound(path: str) -> Iterator[socket.socket]:
    """Bind a socket before the load, which may take minutes; clients are refused until it listens."""
    from fairlead.engine.worker.shared_channel import bind

    with bind(path) as listener:
        try:
            yield listener
        finally:
            Path(path).unlink(missing_ok=True)


def _compiler(model: "LoadedModel", spec: messages.WorkerSpec) -> "GrammarCompiler | None":
    """Return the compiler of grammars; None without a readable tokenizer.

    llguidance holds the GIL for seconds while it reads a vocabulary of 150,000 tokens. Even in a thread, this
    would stop every stream for that long, so it is part of the load.
    """
    from fairlead.language.structured.compiler import GrammarCompiler
    from fairlead.language.structured.vocabulary import token_vocabulary

    tokenizer = _tokenizer(spec.path)
    if tokenizer is None:
        return None
    has_end = any(token_id < model.vocab_size for token_id in model.eos_token_ids)
    vocabulary = token_vocabulary(
        tokenizer.token_bytes,
        vocab_size=model.vocab_size,
        special_ids=tokenizer.special_ids,
        eos_token_ids=model.eos_token_ids,
    )
    return GrammarCompiler(vocabulary, missing_end=None if has_end else model.vocab_size)


@cache
def _tokenizer(path: str) -> "Tokenizer | None":
    """Return the model's tokenizer; None without a readable one. It is used twice in a load."""
    from fairlead.language.text.tokenizer import Tokenizer

    try:
        return Tokenizer.load(Path(path))
    except LoadFailed:
        return None


def _end_tokens(path: str) -> tuple[int, ...]:
    from fairlead.language.text.chat_template import ChatTemplate
    from fairlead.language.text.end_tokens import read_end_tokens

    directory = Path(path)
    return tuple(sorted(read_end_tokens(directory, _tokenizer(path), ChatTemplate.load(directory)).ids))


def _engine(
    model: "LoadedModel", spec: messages.WorkerSpec, compiler: "GrammarCompiler | None" = None
) -> "Engine":
    from fairlead.engine.engine import Engine

    return Engine(
        model.runner,
        slots=model.slots,
        max_batch=model.max_batch,
        max_batched_tokens=model.max_batched_tokens,
        max_model_len=model.max_model_len,
        max_input_tokens=model.max_input_tokens,
        max_output_tokens=model.max_output_tokens,
        windows=model.windows,
        blocks_total=model.blocks_total,
        block_size=model.block_size,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        max_entries=spec.kv_cache_entries,
        eviction_threshold=spec.eviction_threshold,
        cleanup_interval_s=spec.cleanup_interval_s,
        first_in_first_out=spec.eviction_policy == "fifo",
        draw_seed=_draw_seed,
        embeds=model.embeds,
        compiler=compiler,
        speculation=None if model.embeds else spec.speculation,
        target_step_s=_target_step_s(model, spec),
    )


def _target_step_s(model: "LoadedModel", spec: messages.WorkerSpec) -> float:
    if spec.target_step_s is not None:
        return spec.target_step_s
    return 0.05 if model.device == "cpu" else 0.025


def _ready(model: "LoadedModel") -> messages.Ready:
    limits = {name: getattr(model, name) for name in messages.Ready.__struct_fields__}
    return messages.Ready(**limits | {"blocks_total": model.blocks_total[0]})


def _load(spec: messages.WorkerSpec, report: Report) -> "LoadedModel":
    # Threads that spin while they wait take the core from the parent, and from the thread they wait for:
    # with one other busy process a step took 14 times as long. torch reads this when it is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    spec = msgspec.structs.replace(spec, eos_token_ids=_end_tokens(spec.path))
    if spec.parallel > 1:
        from fairlead.engine.worker.ranks import load_on_ranks

        return load_on_ranks(spec, report)
    from fairlead.engine.loading import load_runner

    return load_runner(spec, report)


def _draw_seed() -> int:
    """Return 63 random bits, which torch's generators accept."""
    return int.from_bytes(os.urandom(8), "little") >> 1


if __name__ == "__main__":
    sys.exit(main())
