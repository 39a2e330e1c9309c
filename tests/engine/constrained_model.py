"""The demonstration model with a compiler of grammars, in an engine's loop."""

import functools
import json
import time

import jsonschema
import msgspec

from engine.fake_model import Loop
from engine.test_soak import engine_over
from fairlead.base.config import demonstration_model
from fairlead.base.job import Sampling
from fairlead.base.messages import WorkerSpec
from fairlead.engine.loading import load_runner
from fairlead.engine.runner import ModelRunner
from fairlead.engine.slow_masks import SlowMasks
from fairlead.language.structured.compiler import GrammarCompiler
from fairlead.language.structured.grammar import JsonAnswer, answer_grammar
from fairlead.language.structured.vocabulary import token_vocabulary
from fairlead.language.text.model import TextModel
from fairlead.language.text.tokenizer import Tokenizer
from language.structured.schemas import schema_of

FOLDER = demonstration_model()


@functools.cache
def tokenizer():
    return Tokenizer.load(FOLDER)


@functools.cache
def model():
    ends = tuple(TextModel.load(FOLDER, name="demonstration").eos_token_ids)
    spec = WorkerSpec(path=str(FOLDER), device="cpu", dtype="float32", eos_token_ids=ends)
    return load_runner(spec, lambda _fraction, _stage: None)


@functools.cache
def vocabulary(*, has_end=True):
    loaded = model()
    return token_vocabulary(
        tokenizer().token_bytes,
        vocab_size=loaded.vocab_size,
        special_ids=tokenizer().special_ids,
        eos_token_ids=list(loaded.eos_token_ids) if has_end else [],
    )


def prompt_of(text):
    return tokenizer().encode(f"<|user|>{text}<|assistant|>", add_special_tokens=False)


def grammar_of(schema):
    return answer_grammar(JsonAnswer(schema))


class Constrained(Loop):
    """An engine's loop that waits for grammars, with the texts of its sequences."""

    def __init__(self, *, overlaps=False, slow=False, has_end=True, **limits):
        """Make the loop.

        slow: every mask is found by a thread, while its sequence is left out of steps.
        has_end: whether the model has a token that ends answers.
        """
        loaded = model() if has_end else msgspec.structs.replace(model(), eos_token_ids=())
        if slow:
            limits["slow_masks"] = SlowMasks(share=0.0, least_budget_s=-1.0)
        missing = None if has_end else loaded.vocab_size
        self.compiler = GrammarCompiler(vocabulary(has_end=has_end), missing_end=missing)
        runner = loaded.runner
        if overlaps or not has_end:
            runner = ModelRunner(loaded.runner.forward, loaded.eos_token_ids, overlaps=overlaps)
        engine = engine_over(msgspec.structs.replace(loaded, runner=runner), compiler=self.compiler, **limits)
        super().__init__(engine, runner)
        self.capacity = engine.statistics()

    def submit(self, key, text="What is Fairlead?", *, grammar=None, **sampling):
        options = {"max_tokens": 500, "seed": key, **sampling}
        submitted = {name: options.pop(name) for name in ("timeout_s", "salt") if name in options}
        self.engine.submit(key, prompt_of(text), Sampling(grammar=grammar, **options), **submitted)

    def turn(self, seconds=0.01):
        if self.engine.wait_s(self.now_s):
            time.sleep(0.001)
        super().turn(seconds)

    def run(self, turns=100_000):
        super().run(turns)
        self.compiler.close()
        return self

    def text(self, key):
        """Return a sequence's text, without its end token."""
        token_ids = self.token_ids_of[key]
        ends = self.ends[key].stop_token is not None
        return tokenizer().decode(token_ids[:-1] if ends else token_ids, skip_special_tokens=False)

    def everything_is_free(self):
        counts = self.engine.statistics()
        held = (counts.running, counts.pending, self.compiler.waiting, len(self.engine._live))
        capacity = self.capacity
        free = (counts.slots_free, counts.blocks_free) == (capacity.slots_free, capacity.blocks_free)
        return held == (0, 0, 0, 0) and free


def validated(seeds, *, sequences=24, **limits):
    """Generate an answer at temperature 1 for the schema of each seed; check each that is whole.

    Return how many were whole, the loop, and the texts by seed. An error of any sequence fails.
    """
    tested = Constrained(slots=sequences, max_batch=sequences, **limits)
    schemas = {seed: schema_of(seed) for seed in seeds}
    waiting, whole, texts = list(schemas.items()), 0, {}
    while waiting or not tested.engine.idle or tested.under_way is not None:
        while waiting and len(tested.engine._live) < sequences:
            seed, schema = waiting.pop()
            tested.submit(seed, grammar=grammar_of(schema))
        tested.turn()
    for seed, schema in schemas.items():
        end = tested.ends[seed]
        assert end.error is None, (seed, end.error)
        texts[seed] = tested.text(seed)
        if end.finish_reason == "stop":
            whole += 1
            jsonschema.Draft202012Validator(schema).validate(json.loads(texts[seed]))
    tested.compiler.close()
    assert tested.everything_is_free()
    return whole, tested, texts
