"""A model that writes given texts, for tests of everything between its tokens and HTTP.

Only the network is replaced: its logits make the next token of a script the likeliest. Sampling, masks of
grammars, the engine, its loop and its frames are the real ones, and so is the server. A model's child process
is a thread here, so that one test can serve many models, for which torch is imported once.

A prompt names its script: "script 7". The tokens of an answer reach the server in pieces of as many as the
script says, as if the model were ahead of the network by so many steps.
"""

import json
import os
import re
import signal
import socket
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, cast

import msgspec
import numpy as np
import pytest
import torch
import trio
from tokenizers import Tokenizer as Library

from fairlead._cext.inputbatch import InputBatch, Step
from fairlead.base import messages
from fairlead.base.config import Config, ModelConfig
from fairlead.base.frames import FrameSocket, PeerGone
from fairlead.engine.inputs import Inputs
from fairlead.engine.loading import LoadedModel
from fairlead.engine.runner import ModelRunner
from fairlead.engine.worker import main, shared_channel
from fairlead.engine.worker.shared_channel import ParentSocket, SharedChannel
from fairlead.nodes.engines.client import Worker
from fairlead.nodes.processes.child import Child
from fairlead.server.app import serve
from language.text.model_folders import CONFIG, NO_TENSORS

MAX_MODEL_LEN = 4096
SLOTS = 24
BLOCK_SIZE = 16
END = "<|im_end|>"
_NAMED = re.compile(r"script (\d+)")


class Script(NamedTuple):
    """What a model writes: texts, each followed by the token that ends an answer; `piece`: tokens at once."""

    texts: tuple[str, ...]
    piece: int = 1


class Scripts:
    """The scripts of all models, by number."""

    def __init__(self) -> None:
        self._scripts: list[Script] = []

    def add(self, *texts: str, piece: int = 1) -> str:
        """Add a script; return the message that asks for it."""
        self._scripts.append(Script(texts, piece))
        return f"Write script {len(self._scripts) - 1}, please."

    def named_in(self, prompt: str) -> Script:
        """Return the script that a prompt names."""
        found = _NAMED.search(prompt)
        assert found is not None, prompt
        return self._scripts[int(found[1])]


def write_folder(folder: Path, library: Library, template: str) -> None:
    """Write what a server reads of a model, without weights. Its answers end with `END`."""
    folder.mkdir(parents=True, exist_ok=True)
    library.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    (folder / "model.safetensors").write_bytes(NO_TENSORS)
    config = {"vocab_size": library.get_vocab_size(), "eos_token_id": _end_id(library)}
    files = {
        "config": {**CONFIG, **config, "max_position_embeddings": MAX_MODEL_LEN},
        "tokenizer_config": {"eos_token": END, "bos_token": "<|im_start|>"},
        "generation_config": {"do_sample": False},
    }
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


class ScriptedForward:
    """A `StagedForward` whose likeliest token is the next one of the script, and after it `END`."""

    device = torch.device("cpu")
    kernel = "torch"
    samples_several = True
    columns: ClassVar[dict[str, int]] = {}

    def __init__(self, library: Library, scripts: Scripts) -> None:
        self.vocab_size = library.get_vocab_size()
        self._library = library
        self._scripts = scripts
        self._end = _end_id(library)
        self._answers: dict[int, tuple[Script, list[int]]] = {}  # by the keys of sequences
        self._likeliest: list[int] = []  # for the rows that sample

    def prepare(self, **limits: Any) -> None:
        """Do nothing: there is no device memory."""

    def release(self, group: int, blocks: Sequence[int]) -> None:
        """Do nothing, as above."""

    def stage(self, step: Step, batch: InputBatch, latest: torch.Tensor | None) -> Inputs:
        """Return the inputs, and find the next token of each script."""
        self._likeliest = []
        for slot in step.sample_slots[: step.samples]:
            state = batch.state(slot)
            _, ids = self._answer(state.key, state.tokens_view()[: state.prompt_length].tolist())
            at = state.output_length
            self._likeliest.append(ids[at] if at < len(ids) else self._end)
        inputs = Inputs.read(step, batch, self.device)
        return inputs.resolved(np.asarray(step.input_ids), latest, self.vocab_size)

    def __call__(self, inputs: Inputs) -> torch.Tensor:
        logits = torch.zeros(len(inputs.logit_tokens), self.vocab_size)
        logits[:, self._end] = 1.0  # where a grammar forbids what the script has
        for row, token_id in enumerate(self._likeliest):
            logits[row, token_id] = 9.0
        return logits

    def piece_of(self, key: int) -> int:
        """Return how many tokens of a sequence are sent at once."""
        script, _ = self._answers.get(key, (Script(()), []))
        return script.piece

    def _answer(self, key: int, prompt: list[int]) -> tuple[Script, list[int]]:
        if key not in self._answers:
            script = self._scripts.named_in(self._library.decode(prompt, skip_special_tokens=False))
            ids: list[int] = []
            for text in script.texts:
                ids += [*self._library.encode(text, add_special_tokens=False).ids, self._end]
            self._answers[key] = script, ids
        return self._answers[key]


class PieceChannel(SharedChannel):
    """The child's channel, which keeps the tokens of a sequence until there are enough for a piece."""

    def __init__(self, forward: ScriptedForward, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._forward = forward
        self._kept: dict[int, list[int]] = {}

    def write(self, step: messages.StepOutputs) -> None:
        super().write(self._in_pieces(step))

    def _in_pieces(self, message: messages.StepOutputs) -> messages.StepOutputs:
        outputs = []
        for key, token_id in message.plain():
            self._kept.setdefault(key, []).append(token_id)
            if len(self._kept[key]) >= self._forward.piece_of(key):
                outputs.append(messages.Output(key, self._kept.pop(key)))
        for output in message.outputs:
            ids = [*self._kept.pop(output.key, ()), *output.token_ids]
            outputs.append(msgspec.structs.replace(output, token_ids=ids))
        return msgspec.structs.replace(message, keys=b"", tokens=b"", outputs=outputs)


class ThreadProcess:
    """A model's child process as a thread: what a `Worker` uses of a `trio.Process`."""

    def __init__(self, connection: socket.socket, scripts: Scripts) -> None:
        self.pid = os.getpid()
        self.returncode: int | None = None
        self.stdin = self.stdout = self
        self.stderr = None
        self._connection = connection.dup()
        self._scripts = scripts
        self._ended = trio.Event()
        self._token = trio.lowlevel.current_trio_token()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    async def wait(self) -> int:
        """Wait for the end of the thread."""
        await self._ended.wait()
        return 0

    async def receive_some(self) -> bytes:
        """Return the end of the output, of which there is none, when the thread has ended."""
        await self._ended.wait()
        return b""

    async def aclose(self) -> None:
        """Do nothing."""
        await trio.lowlevel.checkpoint()

    def send_signal(self, number: int) -> None:
        """End the connection, and so the thread."""
        if number == signal.SIGTERM and self.returncode is None:
            self._connection.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        parent = FrameSocket(self._connection, messages.from_parent_decoder)
        try:
            main.serve(parent, partial(_load, self._scripts))
        except PeerGone:
            pass
        finally:
            self._connection.close()
            self.returncode = 0
            self._token.run_sync_soon(self._ended.set)


class _Observer:
    """Shows no progress."""

    def loading(self, model: str, fraction: float | None, stage: str) -> None: ...
    def ready(self, url: str, models: Sequence[str]) -> None: ...
    def failed(self, model: str, reason: str) -> None: ...
    def stopping(self) -> None: ...


@asynccontextmanager
async def serving(folder: Path, scripts: Scripts) -> AsyncIterator[tuple[str, int]]:
    """Serve the model in a folder as `scripted`; yield the server's address."""

    async def start(_worker: Worker, theirs: socket.socket) -> Child:
        await trio.lowlevel.checkpoint()
        return Child(cast(trio.Process, ThreadProcess(theirs, scripts)))

    model = ModelConfig(path=folder, name="scripted", preload=True, watchdog_s=600)
    config = Config(models=(model,), host="127.0.0.1", port=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Worker, "_start", start)
        patch.setattr(shared_channel, "SharedChannel", _piece_channel)
        async with trio.open_nursery() as nursery:
            url = await nursery.start(serve, config, _Observer())
            host, _, port = url.removeprefix("http://").rpartition(":")
            yield host, int(port)
            nursery.cancel_scope.cancel()


def _piece_channel(parent: ParentSocket, listener: socket.socket, *rest: Any) -> PieceChannel:
    """Return the channel of a model in this thread, which has loaded it."""
    return PieceChannel(_loaded.forward, parent, listener, *rest)


_loaded = threading.local()


def _load(scripts: Scripts, spec: messages.WorkerSpec, _report: main.Report) -> LoadedModel:
    torch.set_num_threads(1)  # as for any small model: a second thread would only spin
    library = Library.from_file(str(Path(spec.path) / "tokenizer.json"))
    forward = ScriptedForward(library, scripts)
    _loaded.forward = forward
    ends = (_end_id(library),)
    return LoadedModel(
        runner=ModelRunner(forward, ends),
        slots=SLOTS,
        max_batch=SLOTS,
        max_batched_tokens=SLOTS * 256,
        max_model_len=MAX_MODEL_LEN,
        max_input_tokens=MAX_MODEL_LEN,
        max_output_tokens=MAX_MODEL_LEN,
        vocab_size=forward.vocab_size,
        windows=(None,),
        blocks_total=(SLOTS * MAX_MODEL_LEN // BLOCK_SIZE,),
        block_size=BLOCK_SIZE,
        eos_token_ids=ends,
        device="cpu",
        dtype="float32",
        weight_bytes=1,
        kv_cache_bytes=1,
        kernel=forward.kernel,
    )


def _end_id(library: Library) -> int:
    found = library.token_to_id(END)
    assert found is not None
    return int(found)
