"""1,000 or 20,000 random steps of the demonstration model: each finished output is the same as alone."""

import random
import struct
from collections import Counter

import pytest
from tokenizers import Tokenizer

from fairlead.base.config import demonstration_model
from fairlead.base.job import Sampling
from fairlead.base.messages import WorkerSpec
from fairlead.engine.engine import Engine
from fairlead.engine.loading import load_runner

SEQUENCES = 24
NOTHING = [-1]  # equals no output
STEP_S = 0.01  # on the engine's clock
WORDS = ("fair", "queue", "seat", "slot", "block", "turn", "wait", "node", "model", "token", "plan", "count")


def engine_over(loaded, **limits) -> Engine:
    """Return an engine over the model, with `limits` in place of those that it was loaded with."""
    return Engine(
        loaded.runner,
        **{
            "slots": SEQUENCES,
            "max_batch": 16,
            "max_batched_tokens": 96,
            "max_model_len": loaded.max_model_len,
            "blocks_total": loaded.blocks_total,
            "windows": loaded.windows,
            "block_size": loaded.block_size,
            "vocab_size": loaded.vocab_size,
            "eos_token_ids": loaded.eos_token_ids,
            "draw_seed": lambda: 0,
            **limits,
        },
    )


def requests(tokenizer, chance: random.Random) -> list[tuple[list[int], Sampling]]:
    """Return 50 greedy requests of various lengths; some share a prefix, some ignore the end token."""

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    begin = encode("<|user|>" + " ".join(chance.choices(WORDS, k=60)))
    made = []
    for _ in range(50):
        text = "<|user|>" + " ".join(chance.choices(WORDS, k=chance.choice([2, 8, 30, 90]))) + "<|assistant|>"
        prompt = begin[: chance.choice([0, 0, 32, 100])] + encode(text)
        sampling = Sampling(
            max_tokens=chance.choice([1, 5, 40, 150]), temperature=0, ignore_eos=chance.random() < 0.7
        )
        made.append((prompt, sampling))
    return made


class Soak:
    """One engine, its requests, and the result of each sequence."""

    def __init__(self, loaded, requests_to_run) -> None:
        self.runner = loaded.runner
        # A sixth of the blocks that 24 sequences of 400 tokens need.
        self.engine = engine_over(loaded, blocks_total=[100 for _ in loaded.blocks_total])
        self.requests_to_run = requests_to_run
        self.now_s = 0.0
        self.request_of: dict[int, int] = {}
        self.texts: dict[int, list[int]] = {}
        self.ended = Counter()
        self.wrong: list[tuple[int, list[int]]] = []

    def submit(self, request: int, **options) -> None:
        prompt, sampling = self.requests_to_run[request]
        key = len(self.request_of)
        self.request_of[key], self.texts[key] = request, []
        self.engine.submit(key, list(prompt), sampling, **options)

    def abort(self, key: int) -> None:
        self.engine.abort(key)
        del self.texts[key]
        self.ended["aborted"] += 1

    def step(self, expected) -> None:
        self.now_s += STEP_S
        step = self.engine.plan(self.now_s)
        if step is None:
            outcome = self.engine.take_outcome()
        else:
            outcome = self.engine.commit(step, self.runner.launch(step, self.engine.batch).wait())
        keys, tokens = struct.iter_unpack("<q", outcome.keys), struct.iter_unpack("<i", outcome.tokens)
        for (key,), (token,) in zip(keys, tokens, strict=True):
            self.texts[key].append(token)
        for output in outcome.outputs:
            text = self.texts[output.key] + output.token_ids
            if output.error is None and output.finish_reason is None:  # a token with extra information
                self.texts[output.key] = text
                continue
            if output.error is not None:
                assert output.code == "request_timeout"
                self.ended["timed out"] += 1
            else:
                self.ended["finished"] += 1
                if text != expected[self.request_of[output.key]]:
                    self.wrong.append((self.request_of[output.key], text))
            del self.texts[output.key]


@pytest.mark.slow
@pytest.mark.timeout(1200)  # one minute, but far more on half a core without wide registers
@pytest.mark.parametrize("steps", [1_000, pytest.param(20_000, marks=pytest.mark.nightly)])
def test_random_aborts_timeouts_and_preemptions_change_no_output(steps):
    path = demonstration_model()
    spec = WorkerSpec(path=str(path), dtype="float32", device="cpu", eos_token_ids=(1,))
    loaded = load_runner(spec, lambda *_: None)
    chance = random.Random(4)
    requests_to_run = requests(Tokenizer.from_file(str(path / "tokenizer.json")), chance)
    expected = [unbatched(loaded, request) for request in requests_to_run]
    soak = Soak(loaded, requests_to_run)
    for _ in range(steps):
        if len(soak.texts) < SEQUENCES and chance.random() < 0.5:
            options = {"priority": chance.choice([0, 1, 1, 2])}
            if chance.random() < 0.1:
                options["timeout_s"] = chance.choice([0.05, 0.5, 2.0])
            soak.submit(chance.randrange(len(requests_to_run)), **options)
        if soak.texts and chance.random() < 0.02:
            soak.abort(chance.choice(list(soak.texts)))
        soak.step(expected)
    while not soak.engine.idle:
        soak.step(expected)

    statistics = soak.engine.statistics()
    assert soak.wrong == []
    assert statistics.running + statistics.pending == 0
    assert statistics.slots_free == SEQUENCES
    assert soak.ended.total() == len(soak.request_of)
    # Otherwise the steps did not exercise these cases often enough.
    assert min(soak.ended.values()) > steps / 400, soak.ended
    assert statistics.preemptions > steps / 200
    assert statistics.prefix_hits > steps / 20


def unbatched(loaded, request) -> list[int]:
    """Return the output of one request in its own engine."""
    soak = Soak(loaded, [request])
    soak.engine = engine_over(loaded, prefix_cache=False)
    soak.submit(0)
    while soak.texts:
        soak.step([NOTHING])
    [(_, text)] = soak.wrong
    return text
