"""Suspension changes no answer: the same requests with and without it, over every family of models.

Answers are compared bit for bit: tokens, log-probabilities, ends. Sequences are suspended and resumed at
random, in any step; at times the engine is lost, and another one takes over. In float32 on the C kernel this
holds with little memory, too, where blocks are given up and recomputed. In bfloat16, and in torch, logits
depend on how a prompt is cut: there the prompts are whole chunks, and nothing is recomputed. Experts, which
only torch computes, round otherwise with other tokens beside them: there each sequence runs alone.
"""

import functools
import random
import time

import msgspec
import pytest

from engine.models.test_agreement import CONFIGS
from engine.models.tiny import VOCABULARY, load, prompt_of, save
from fairlead.base.job import Sampling
from fairlead.base.messages import EngineStatistics, Speculation, StepOutputs
from fairlead.engine.engine import Engine
from fairlead.engine.runner import ModelRunner
from fairlead.engine.slow_masks import SlowMasks
from fairlead.language.structured.compiler import GrammarCompiler
from fairlead.language.structured.grammar import ChoiceAnswer, JsonAnswer, RegexAnswer, answer_grammar
from fairlead.language.structured.vocabulary import token_vocabulary

EOS = (3,)
DENSE = [name for name in CONFIGS if "moe" not in name and "mixtral" not in name]
EXPERTS = [name for name in CONFIGS if name not in DENSE]
BLOCK_SIZE = 16
SHARED = prompt_of(60, seed=99)
GRAMMARS = [
    answer_grammar(RegexAnswer("[a-f]{3,40}")),
    answer_grammar(ChoiceAnswer(["abcabcabc", "abdabd", "x" * 30])),
    answer_grammar(JsonAnswer({"type": "array", "items": {"type": "integer"}, "maxItems": 6})),
]
WHOLE = [
    {"slots": slots, "max_batch": slots, "blocks": 400, "max_batched_tokens": 900, "prefix_cache": False}
    for slots in (8, 4, 2)
]
LIMITS = [
    {"slots": 8, "max_batch": 8, "blocks": 400, "max_batched_tokens": 64},
    {"slots": 3, "max_batch": 2, "blocks": 60, "max_batched_tokens": 24},
    {"slots": 6, "max_batch": 6, "blocks": 16, "max_batched_tokens": 48},  # so that blocks are given up
    {"slots": 6, "max_batch": 4, "blocks": 20, "max_batched_tokens": 40, "prefix_cache": False},
]


def vocabulary():
    """Return a vocabulary of printable characters, alone and in pairs."""

    def token_bytes(token_id):
        first, second = 32 + token_id % 95, 97 + token_id // 95
        return bytes([first]) if token_id < 95 else bytes([first, second])

    return token_vocabulary(token_bytes, vocab_size=VOCABULARY, special_ids=[0, 1, 2], eos_token_ids=EOS)


VOCABULARY_OF_TEXT = vocabulary()


class Answer(msgspec.Struct):
    """All that one sequence gets."""

    tokens: list = []
    logprobs: list = []
    prompt_logprobs: list = []
    end: tuple | None = None


class Driver:
    """Runs requests in an engine to their ends. `chance`: how likely a turn suspends or resumes something."""

    def __init__(self, loaded, rng, *, limits, chance=0.0, overlaps=False, speculation=None, slow=False):
        self.rng, self.chance = rng, chance
        self.loaded, self.limits, self.speculation, self.slow = loaded, dict(limits), speculation, slow
        self.runner = ModelRunner(loaded.runner.forward, EOS, overlaps=overlaps)
        self.compiler = GrammarCompiler(VOCABULARY_OF_TEXT)
        self.suspensions = self.recomputed = self.failovers = 0
        self.start_engine()

    def start_engine(self):
        limits = dict(self.limits)
        blocks = limits.pop("blocks")
        # A sequence holds few blocks of a group with a window.
        self.blocks = [blocks if window is None else -(-blocks // 3) for window in self.loaded.windows]
        self.slow_masks = SlowMasks(share=0.0, least_budget_s=-1.0) if self.slow else SlowMasks()
        self.engine = Engine(
            self.runner,
            **limits,
            blocks_total=self.blocks,
            windows=self.loaded.windows,
            max_model_len=200,
            block_size=BLOCK_SIZE,
            vocab_size=VOCABULARY,
            eos_token_ids=EOS,
            draw_seed=lambda: 1,
            hash_key=bytes(16),
            compiler=self.compiler,
            slow_masks=self.slow_masks,
            speculation=self.speculation,
        )
        self.under_way = []
        self.suspended = set()

    def answers(self, requests):
        self.requests = requests
        self.got = {key: Answer() for key in range(len(requests))}
        self.before = {}  # what was received of an answer before its engine was lost
        waiting = list(range(len(requests)))
        for turn in range(20_000):
            while waiting and (not self.chance or self.rng.random() < 0.5):
                self.submit(waiting.pop(0))
            if self.engine.idle and not self.under_way and not waiting:
                break
            if self.chance:
                self.disturb(turn)
            self.turn()
        else:
            raise AssertionError("the engine does not come to an end")
        self.recomputed += self.engine.recomputed_tokens
        counts = self.engine.statistics()
        assert (counts.blocks_free, counts.slots_free) == (self.blocks[0], self.limits["slots"])
        assert (counts.running, counts.pending, counts.suspended) == (0, 0, 0)
        self.slow_masks.close()
        self.compiler.close()
        return self.got

    def submit(self, key):
        prompt, sampling, priority = self.requests[key]
        self.engine.submit(key, prompt, sampling, priority=priority)

    def disturb(self, turn):
        """Suspend some that have not ended, resume some, or lose the engine; in the end all are resumed."""
        open_keys = [key for key, answer in self.got.items() if answer.end is None]
        if turn > 2_000:
            self.chance = 0.0
            for key in open_keys:
                self.engine.resume(key)
            return
        if self.rng.random() < self.chance and open_keys:
            for key in self.rng.sample(open_keys, min(len(open_keys), self.rng.randint(1, 3))):
                self.suspensions += key not in self.suspended
                self.suspended.add(key)
                self.engine.suspend(key)
        if self.suspended and self.rng.random() < 0.7 * self.chance:
            for key in self.rng.sample(sorted(self.suspended), self.rng.randint(1, len(self.suspended))):
                self.suspended.discard(key)
                self.engine.resume(key)
        if self.rng.random() < 0.002 and not self.failovers:
            self.fail_over()

    def fail_over(self):
        """Begin all answers that have not ended anew in another engine, as if its process had ended."""
        self.failovers += 1
        for _, pending in self.under_way:
            pending.wait()
        self.recomputed += self.engine.recomputed_tokens
        live = sorted(self.engine._live.by_key)
        self.slow_masks.close()
        self.compiler.close()
        self.compiler = GrammarCompiler(VOCABULARY_OF_TEXT)
        self.start_engine()
        for key in live:
            self.before[key] = self.got[key]
            self.got[key] = Answer()
            self.submit(key)

    def turn(self):
        step = self.engine.plan(time.monotonic())
        if step is not None:
            self.under_way.append((step, self.runner.launch(step, self.engine.batch)))
        if not self.under_way:
            self.collect(self.engine.take_outcome())
            if self.engine.compiling:
                time.sleep(0.0005)
            elif self.chance and len(self.suspended) >= self.engine.statistics().suspended > 0:
                assert self.engine.wait_s(time.monotonic()) != 0.0 or self.engine.trim_if_due(
                    time.monotonic()
                )
        elif step is None or not self.runner.overlaps or len(self.under_way) == 2:
            step, pending = self.under_way.pop(0)
            self.collect(self.engine.commit(step, pending.wait()))

    def collect(self, outcome):
        frame = StepOutputs(outcome.keys, outcome.tokens, outcome.outputs, EngineStatistics(), outcome.counts)
        for key, token_id in frame.plain():
            self.got[key].tokens.append(token_id)
        for output in outcome.outputs:
            answer = self.got[output.key]
            answer.tokens += output.token_ids
            answer.logprobs += output.logprobs
            answer.prompt_logprobs += output.prompt_logprobs
            if output.finish_reason or output.error:
                answer.end = (output.finish_reason, output.stop_token, output.error)
                self.suspended.discard(output.key)
                if (before := self.before.get(output.key)) is not None:
                    assert before.tokens == answer.tokens[: len(before.tokens)]
                    assert before.logprobs == answer.logprobs[: len(before.logprobs)]


def request_of(rng):
    """Return a prompt, parameters and a class."""
    piece = [rng.randrange(4, VOCABULARY) for _ in range(rng.randint(1, 8))]
    prompt = rng.choice([SHARED, piece * 12])[: rng.randint(1, 70)] + piece[: rng.randint(0, 3)]
    options = {"max_tokens": rng.choice([1, 2, 7, 20, 45]), "seed": rng.randrange(100)}
    options["temperature"] = rng.choice([0, 0, 0.3, 1.0])
    if rng.random() < 0.3:
        options |= {"top_k": rng.choice([0, 3, 10]), "top_p": rng.choice([0.5, 1.0]), "min_p": 0.01}
    if rng.random() < 0.3:
        options |= {"repetition_penalty": 1.1, "frequency_penalty": 0.2, "presence_penalty": 0.1}
    if rng.random() < 0.4:
        options |= {"logprobs": rng.choice([0, 2])}
    if rng.random() < 0.2:
        options |= {"prompt_logprobs": 1}
    if rng.random() < 0.3:
        stops = tuple(rng.randrange(VOCABULARY) for _ in range(20))
        options |= {"stop_token_ids": stops, "min_tokens": min(options["max_tokens"], rng.choice([0, 5]))}
    if rng.random() < 0.2:
        options |= {"logit_bias": {rng.randrange(VOCABULARY): rng.choice([-5.0, 5.0])}}
    if rng.random() < 0.3:
        options |= {"grammar": rng.choice(GRAMMARS), "close_at_limit": rng.random() < 0.3}
    return prompt, Sampling(**options), rng.choice([1, 1, 1, 0, 2])


def requests_of(rng, count):
    """Return requests; some are choices of the same job, which differ in their seeds."""
    made = []
    while len(made) < count:
        prompt, sampling, priority = request_of(rng)
        seeds = range(sampling.seed, sampling.seed + rng.choice([1, 1, 1, 2, 3]))
        made += [(prompt, msgspec.structs.replace(sampling, seed=seed), priority) for seed in seeds]
    return made[:count]


def compare(loaded, rounds, seed, *, limits=LIMITS, together=6):
    """Compare answers of some sequences at once with those that nothing has suspended; return counts."""
    rng = random.Random(seed)
    suspensions = recomputed = failovers = 0
    for _ in range(rounds):
        requests = requests_of(rng, together)
        expected = Driver(loaded, rng, limits=limits[0]).answers(requests)
        driver = Driver(
            loaded,
            rng,
            limits=rng.choice(limits),
            chance=rng.choice([0.1, 0.3, 0.6]),
            overlaps=rng.random() < 0.5,
            speculation=rng.choice([None, Speculation(ngram=2, drafts=4)]) if together > 1 else None,
            slow=rng.random() < 0.2,
        )
        assert expected == driver.answers(requests)
        suspensions += driver.suspensions
        recomputed += driver.recomputed
        failovers += driver.failovers
    return suspensions, recomputed, failovers


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory):
    """A function that saves a model of a family, once."""

    @functools.cache
    def saved(name):
        directory = tmp_path_factory.mktemp("model")
        save(CONFIGS[name], directory)
        return directory

    return saved


def loaded_from(directory, dtype, *, compiled=True):
    return load(
        directory,
        dtype=dtype,
        compiled=compiled,
        slots=8,
        max_model_len=200,
        kv_cache_bytes=16 << 20,
        speculation=Speculation(),
        block_size=BLOCK_SIZE,
    )


of_each_dtype = pytest.mark.parametrize(("dtype", "limits"), [("float32", LIMITS), ("bfloat16", WHOLE)])


@of_each_dtype
@pytest.mark.parametrize("name", DENSE)
def test_suspended_answers_are_those_of_sequences_that_run_through(directory_of, name, dtype, limits):
    suspensions, *_ = compare(loaded_from(directory_of(name), dtype), 2, dtype, limits=limits)
    assert suspensions > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", EXPERTS)
def test_suspended_answers_of_experts_are_those_of_sequences_that_run_through(directory_of, name, dtype):
    suspensions, *_ = compare(loaded_from(directory_of(name), dtype), 4, 5, limits=WHOLE, together=1)
    assert suspensions > 0


@pytest.mark.parametrize("name", ["llama", "mistral, window", DENSE[-2]])
def test_suspended_answers_of_torch_are_those_of_sequences_that_run_through(directory_of, name):
    loaded = loaded_from(directory_of(name), "float32", compiled=False)
    suspensions, recomputed, _ = compare(loaded, 1, 5, limits=WHOLE)
    assert suspensions > 0
    assert recomputed == 0


@pytest.mark.nightly
@of_each_dtype
@pytest.mark.parametrize("name", DENSE)
def test_ten_thousand_suspended_answers_are_those_of_sequences_that_run_through(
    directory_of, name, dtype, limits
):
    rounds = -(-10_000 // (6 * 2 * len(DENSE)))
    loaded = loaded_from(directory_of(name), dtype)
    suspensions, recomputed, failovers = compare(loaded, rounds, 7, limits=limits)
    assert suspensions > rounds
    assert failovers > 0
    assert (recomputed > 0) == (limits is LIMITS)
