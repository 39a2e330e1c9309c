"""A sampling parameter is its declaration and its use; a logits processor its class and its registration."""

import typing

import msgspec
import numpy as np
import pytest
import torch
import transformers

from engine.models.tiny import SIZES, load, prompt_of, save
from fairlead._cext.inputbatch import InputBatch
from fairlead.base.job import Sampling
from fairlead.dialects.fields import SamplingParameters
from fairlead.engine.request_validator import RequestValidator
from fairlead.engine.sampling import logits_processors, parameters
from fairlead.engine.sampling.logits_processors import LogitsProcessor, SampledRows, keep_by_slot
from fairlead.engine.sampling.parameters import PARAMETERS, ParameterTable, SamplingParameter
from fairlead.engine.sampling.sampler import Sampler


def test_wire_form_has_the_declared_names_types_and_defaults():
    fields = msgspec.structs.fields(Sampling)
    assert {field.name for field in fields} == {parameter.name for parameter in PARAMETERS}
    types = typing.get_type_hints(Sampling)
    for parameter in PARAMETERS:
        [field] = (field for field in fields if field.name == parameter.name)
        default = field.default
        if field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        assert (types[parameter.name], default) == (parameter.value_type, parameter.default)


@pytest.mark.parametrize("parameter", PARAMETERS, ids=lambda parameter: parameter.name)
def test_api_accepts_no_number_that_the_engine_refuses(parameter):
    known = typing.get_type_hints(SamplingParameters, include_extras=True)
    if parameter.name not in known or parameter.name == "top_k":  # −1 there means off
        return
    for bounds in metas(known[parameter.name]):
        for declared, accepted in ((parameter.minimum, bounds.ge), (parameter.maximum, bounds.le)):
            if declared is not None and accepted is not None:
                parameter.check(accepted)


def metas(hint):
    """Yield the `msgspec.Meta` of a type, also of a member of its union."""
    for part in typing.get_args(hint):
        if isinstance(part, msgspec.Meta):
            yield part
        yield from metas(part)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("max_tokens", 0), ("max_tokens", 2**31), ("min_tokens", -1), ("temperature", -0.5)),
        *(("temperature", float("nan")), ("top_p", 1.5), ("top_p", float("nan")), ("top_k", -1)),
        *(("min_p", 2.0), ("logprobs", -1), ("logprobs", 2**31), ("prompt_logprobs", -1)),
        ("repeat_last_n", -2),
    ],
)
def test_value_out_of_range_is_refused_by_its_name(name, value):
    with pytest.raises(ValueError, match=name):
        parameters.TABLE.encode(Sampling(**{"max_tokens": 1} | {name: value}))


def test_sequence_needs_logits_processing_only_for_parameters_with_an_effect():
    def needs(**changes):
        return parameters.TABLE.encode(Sampling(max_tokens=1, seed=1, **changes)).processes_logits

    assert not needs(temperature=0.5, top_p=0.5, logprobs=3, stop_token_ids=(3,))
    assert all(
        needs(**{name: value})
        for name, value in [
            *(("min_tokens", 1), ("presence_penalty", 0.5), ("frequency_penalty", -1.0)),
            *(("repetition_penalty", 1.1), ("logit_bias", {1: 1.0}), ("allowed_token_ids", (1,))),
        ]
    )


# A new parameter and its logits processor ------------------------------------------------------------


class SamplingWithTopA(Sampling, frozen=True, array_like=True):
    """The wire form with one more field."""

    top_a: float = 0.0


TOP_A = SamplingParameter("top_a", float, 0.0, "logits", 0.0, 0, 1, np.float32)


class TopA(LogitsProcessor):
    """Bans tokens that are less likely than `top_a` times the square of the likeliest one's probability."""

    def __init__(self, columns, vocab_size, eos_token_ids):
        del vocab_size, eos_token_ids
        self.columns, self.slots = columns, {}

    def update_state(self, update):
        keep_by_slot(self.slots, update, lambda state: state.sampling.parameters.top_a or None)

    def applies_to(self, rows):
        return len(rows.indices(self.slots)) > 0

    def apply(self, logits, rows):
        probabilities = logits.softmax(-1)
        top_a = torch.from_numpy(self.columns["top_a"][rows.slots])
        limits = top_a[:, None] * probabilities.max(-1, keepdim=True).values ** 2
        logits.masked_fill_(probabilities < limits, float("-inf"))


@pytest.fixture
def with_top_a(monkeypatch):
    """Declare the parameter and register its processor."""
    monkeypatch.setattr(parameters, "TABLE", ParameterTable((*PARAMETERS, TOP_A)))
    registered = (*logits_processors.LOGITS_PROCESSORS, TopA)
    monkeypatch.setattr(logits_processors, "LOGITS_PROCESSORS", registered)


def validator():
    return RequestValidator(longest=100, vocab_size=320, draw_seed=lambda: 7)


@pytest.mark.usefixtures("with_top_a")
def test_declared_parameter_is_checked_encoded_and_applied():
    with pytest.raises(ValueError, match=r"top_a is 2.0, and must be in 0…1"):
        validator().accept(1, [1], SamplingWithTopA(max_tokens=4, top_a=2.0))
    batch = InputBatch(slots=2, max_batched_tokens=8, max_model_len=8, block_size=8, vocab_size=320)
    for slot, top_a in enumerate((0.0, 0.5)):
        state = validator().accept(slot, [1], SamplingWithTopA(max_tokens=4, top_a=top_a))
        assert state.sampling.processes_logits == (top_a > 0)
        batch.add_request(slot, state, ([slot],))
    sampler = Sampler(batch, 4, ())
    sampler.update_state()
    logits = torch.tensor([[0.6, 0.3, 0.09, 0.01]]).log().expand(2, -1)
    rows = SampledRows(np.arange(2), np.ones(2), torch.ones(2))
    kept = sampler.process(logits, rows) > float("-inf")
    assert kept.tolist() == [[True] * 4, [True, True, False, False]]  # the limit is 0.5 · 0.6²


@pytest.mark.usefixtures("with_top_a")
def test_model_generates_with_a_declared_parameter(tmp_path):
    save(transformers.LlamaConfig(**SIZES), tmp_path)
    runner = load(tmp_path).runner
    greedy = generate(runner, SamplingWithTopA(max_tokens=12, ignore_eos=True, temperature=0))
    drawn = generate(runner, SamplingWithTopA(max_tokens=12, ignore_eos=True, temperature=1.0, seed=3))
    limited = generate(
        runner, SamplingWithTopA(max_tokens=12, ignore_eos=True, temperature=1.0, seed=3, top_a=1.0)
    )
    assert drawn != limited
    assert len(greedy) == len(limited) == 12


def generate(runner, sampling):
    """Run one sequence to its end; return its output."""
    batch = InputBatch(slots=1, max_batched_tokens=32, max_model_len=64, block_size=16, vocab_size=320)
    state = validator().accept(1, prompt_of(10), sampling)
    batch.add_request(0, state, ([0, 1],))
    ended = False
    while not ended:
        batch.num_scheduled[0] = state.num_tokens - state.computed
        step = batch.prepare_inputs()
        ended = batch.commit_tokens(step, runner.launch(step, batch).wait().token_ids).finished
    return state.token_ids(state.prompt_length).tolist()


class BannedTokens(LogitsProcessor):
    """Bans tokens in every sequence: a processor without a parameter of its own."""

    always = True
    banned = ()

    def __init__(self, columns, vocab_size, eos_token_ids):
        del columns, vocab_size, eos_token_ids

    def update_state(self, update):
        """Keep nothing."""

    def applies_to(self, rows):
        return len(rows.slots) > 0

    def apply(self, logits, rows):
        assert len(logits) == len(rows.slots)
        logits[:, list(self.banned)] = float("-inf")


def test_logits_processor_is_a_class_and_its_registration(monkeypatch, tmp_path):
    save(transformers.LlamaConfig(**SIZES), tmp_path)
    loaded = load(tmp_path)
    sampling = Sampling(max_tokens=12, temperature=0, ignore_eos=True)
    before = generate(loaded.runner, sampling)
    monkeypatch.setattr(logits_processors, "LOGITS_PROCESSORS", (BannedTokens,))
    monkeypatch.setattr(BannedTokens, "banned", tuple(before))
    after = generate(loaded.runner, sampling)
    assert not set(before) & set(after)
