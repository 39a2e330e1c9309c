"""A model that the CPU kernel runs: its process answers every kind of request, and never imports torch."""

import json
import sys
from pathlib import Path

import jsonschema
import pytest
import transformers
import trio

from engine.models.tiny import SIZES, save
from engine.worker.children import GRANT, Stream, failure_of, running
from fairlead.base import messages
from fairlead.base.config import demonstration_model
from fairlead.base.job import Sampling
from fairlead.language.structured.grammar import JsonAnswer, answer_grammar
from fairlead.language.text.tokenizer import Tokenizer
from fairlead.nodes.own_engine import OwnEngine
from language.text.vocabularies import byte_level

# An import of torch fails, as if it were not installed.
COMMAND = [
    sys.executable,
    "-c",
    "import sys; sys.modules['torch'] = None; from fairlead.engine.worker.main import main; sys.exit(main())",
]
VOCABULARY = byte_level()
DENSE = {**SIZES, "vocab_size": VOCABULARY.get_vocab_size()}
FAMILIES = {
    "llama": transformers.LlamaConfig(**DENSE),
    "mistral": transformers.MistralConfig(**DENSE, sliding_window=21),
    "qwen2": transformers.Qwen2Config(**DENSE | {"hidden_size": 96}),
    "qwen3": transformers.Qwen3Config(**DENSE),
    "gemma3": transformers.Gemma3TextConfig(**DENSE, sliding_window=17, query_pre_attn_scalar=20),
}
FORMATS = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}},
    "required": ["a"],
    "additionalProperties": False,
}
GRAMMAR = answer_grammar(JsonAnswer(SCHEMA))
REQUESTS = {
    "schema": Sampling(max_tokens=300, temperature=0, grammar=GRAMMAR, grammar_bytes=len(GRAMMAR)),
    "logprobs": Sampling(max_tokens=5, temperature=0, logprobs=3, prompt_logprobs=2),
    "penalties": Sampling(
        max_tokens=12,
        seed=2,
        top_p=0.9,
        top_k=50,
        min_p=0.01,
        min_tokens=3,
        repetition_penalty=1.2,
        frequency_penalty=0.5,
        presence_penalty=0.5,
        logit_bias={7: 2.0, 9: -100.0},
        repeat_last_n=5,
        allowed_token_ids=tuple(range(100)),
    ),
}


def worker_of(folder: Path, **options: object) -> OwnEngine:
    spec = messages.WorkerSpec(path=str(folder), kv_cache_bytes=1 << 20, device="cpu", **options)
    return OwnEngine(spec, command=COMMAND)


async def answers(folder: Path, **options: object) -> dict[str, Stream]:
    """Start a child on a CPU without torch; return its answers to all requests at once."""
    worker = worker_of(folder, **options)
    streams = {name: Recorded() for name in REQUESTS}
    async with running(worker):
        for name, sampling in REQUESTS.items():
            worker.sequences.submit(list(range(3, 20)), sampling, streams[name], grant=GRANT)
        for stream in streams.values():
            await stream.ended.wait()
    return streams


class Recorded(Stream):
    """Keeps log-probabilities, too."""

    def __init__(self) -> None:
        super().__init__()
        self.logprobs, self.prompt_logprobs = [], []

    def receive(self, output: messages.Output) -> None:
        self.logprobs += output.logprobs
        self.prompt_logprobs += output.prompt_logprobs
        super().receive(output)


def check(tokenizer: Tokenizer, streams: dict[str, Stream]) -> None:
    assert [stream.ends[0] for stream in streams.values()] == ["stop", "length", "length"]
    jsonschema.validate(json.loads(tokenizer.decode(streams["schema"].token_ids)), SCHEMA)
    listed = streams["logprobs"]
    assert (
        [one.token_id for one in listed.logprobs]
        == listed.token_ids
        == [one.top[0][0] for one in listed.logprobs]
    )
    assert len(listed.prompt_logprobs) == 16
    assert 9 not in streams["penalties"].token_ids


@pytest.mark.parametrize("family", FAMILIES)
async def test_every_family_and_format_answers_without_torch(family, tmp_path):
    save(FAMILIES[family], tmp_path)
    VOCABULARY.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    found = {}

    async def record(name):
        found[name] = await answers(tmp_path, **FORMATS[name])

    async with trio.open_nursery() as nursery:
        for name in FORMATS:
            nursery.start_soon(record, name)
    for streams in found.values():
        check(Tokenizer.load(tmp_path), streams)


async def test_demonstration_model_answers_without_torch():
    streams = await answers(demonstration_model())
    assert all(stream.token_ids for stream in streams.values())


async def test_model_that_the_kernel_does_not_run_needs_torch():
    assert "import of torch" in str(await failure_of(worker_of(demonstration_model(), dtype="float16")))
