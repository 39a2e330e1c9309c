"""Token sampling: every parameter is compared with an oracle in float64, and rows are independent."""

import math

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.models.tiny import SampledToken, state_of
from fairlead._cext.inputbatch import InputBatch
from fairlead.base.job import Sampling
from fairlead.engine.sampling.logits_processors import SampledRows
from fairlead.engine.sampling.row_parameters import RowParameters, uniforms
from fairlead.engine.sampling.sampler import Sampler, choose
from fairlead.engine.sampling.torch_sampler import _inverse, _top

VOCABULARY = 24
EOS = (2, 9)
DRAWS = 6000
LOGITS = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(1)) * 2
PROMPT = [3, 3, 7]
OUTPUT = [5, 5, 5, 7, 11]


def sequence(*, seed=0, prompt=PROMPT, output=OUTPUT, **sampling):
    return prompt, output, Sampling(**{"max_tokens": 100, "seed": seed, **sampling})


def batch_of(sequences):
    """Return a batch of these sequences, with their outputs committed step by step."""
    longest = max(len(prompt) + len(output) for prompt, output, _ in sequences) + 1
    batch = InputBatch(
        slots=len(sequences),
        max_batched_tokens=len(sequences) * longest,
        max_model_len=longest + 1,
        block_size=longest,
        vocab_size=2**31 - 1,  # the model's vocabulary may be smaller
        eos_token_ids=EOS,
    )
    for slot, (prompt, _, sampling) in enumerate(sequences):
        small = [token_id for token_id in sampling.stop_token_ids if -(2**31) <= token_id < 2**31]
        changed = msgspec.structs.replace(sampling, stop_token_ids=tuple(small))
        state = state_of(prompt, changed, key=slot, seed=sampling.seed, replaced_by=sampling)
        batch.add_request(slot, state, ([slot],))
    for index in range(max(len(output) for _, output, _ in sequences)):
        talking = {slot for slot, (_, output, _) in enumerate(sequences) if index < len(output)}
        for slot in range(len(sequences)):
            state = batch.state(slot)
            batch.num_scheduled[slot] = (state.num_tokens - state.computed) * (slot in talking)
        step = batch.prepare_inputs()
        outputs = [sequences[slot][1][index] for slot in step.sample_slots]
        batch.commit_tokens(step, np.array(outputs, dtype=np.int32))
    return batch


def sampler_of(sequences, vocabulary=VOCABULARY, eos=EOS):
    """Return a sampler of a batch with these sequences, and the rows of their next tokens."""
    sampler = Sampler(batch_of(sequences), vocabulary, eos)
    sampler.update_state()
    slots = np.arange(len(sequences), dtype=np.int32)
    lengths = np.array([len(prompt) + len(output) for prompt, output, _ in sequences], dtype=np.int32)
    return sampler, SampledRows(slots, lengths, torch.zeros(len(sequences), dtype=torch.int32))


def listed(pending):
    picks = pending.wait()
    return [
        SampledToken(token_id, picks.logprobs.get(row), picks.errors.get(row))
        for row, token_id in enumerate(picks.token_ids.tolist())
    ]


def pick(logits, *sequences):
    sampler, rows = sampler_of(sequences, logits.shape[1])
    return listed(sampler.sample(logits, rows))


def oracle(sampling):
    """Return the distribution of `sampling` after `PROMPT` and `OUTPUT`, computed one token at a time."""
    scores = {}
    for token, logit in enumerate(LOGITS.double().tolist()):
        score = logit
        known, last = PROMPT + OUTPUT, sampling.repeat_last_n
        window = known if last == -1 else known[max(0, len(known) - last) :]
        output = window[-len(OUTPUT) :]
        if token in window:
            repetition = sampling.repetition_penalty
            score = score / repetition if score > 0 else score * repetition
        score -= sampling.frequency_penalty * output.count(token)
        score -= sampling.presence_penalty * (token in output)
        score += sampling.logit_bias.get(token, 0)
        ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else EOS)}
        if len(OUTPUT) < sampling.min_tokens and token in ends:
            score = -math.inf
        if sampling.allowed_token_ids is not None and token not in sampling.allowed_token_ids:
            score = -math.inf
        scores[token] = score
    weights = {token: math.exp(score / sampling.temperature) for token, score in scores.items()}
    likeliest = max(weights.values())
    ranked = sorted(weights, key=weights.__getitem__, reverse=True)
    ranked = [token for token in ranked if weights[token] >= sampling.min_p * likeliest]
    if sampling.top_k:
        ranked = ranked[: sampling.top_k]
    target = sampling.top_p * sum(weights[token] for token in ranked)
    kept, mass = [], 0.0
    for token in ranked:
        if mass >= target:
            break
        kept.append(token)
        mass += weights[token]
    return np.array([weights[token] / mass if token in kept else 0.0 for token in range(VOCABULARY)])


CASES = {
    "plain": {},
    "cold": {"temperature": 0.6},
    "hot": {"temperature": 1.7},
    "top_k": {"top_k": 5},
    "top_k beyond the vocabulary": {"top_k": 2**31 - 1},
    "top_p": {"top_p": 0.7},
    "top_p of next to nothing": {"top_p": 1e-9},
    "min_p": {"min_p": 0.1},
    "all filters": {"top_k": 8, "top_p": 0.8, "min_p": 0.05, "temperature": 1.3},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.7},
    "negative penalties": {"presence_penalty": -1.0, "frequency_penalty": -0.2},
    "repetition": {"repetition_penalty": 1.8},
    "repetition in a window": {"repetition_penalty": 1.8, "repeat_last_n": 3},
    "all penalties in a window of the last token": {
        "repetition_penalty": 1.8,
        "frequency_penalty": 0.7,
        "presence_penalty": 0.5,
        "repeat_last_n": 1,
    },
    "no penalties": {"repetition_penalty": 1.8, "frequency_penalty": 0.7, "repeat_last_n": 0},
    "some tokens": {"allowed_token_ids": (2, 4, 7, 9)},
    "bias": {"logit_bias": {4: 3.0, 5: -100.0}},
    "min_tokens": {"min_tokens": 6, "stop_token_ids": (4,)},
    "min_tokens reached": {"min_tokens": 5, "stop_token_ids": (4,)},
    "min_tokens without eos": {"min_tokens": 6, "stop_token_ids": (4,), "ignore_eos": True},
    "all at once": {
        "temperature": 0.9,
        "top_k": 10,
        "top_p": 0.9,
        "min_p": 0.02,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.2,
        "logit_bias": {1: 2.0},
        "min_tokens": 50,
    },
}


@pytest.mark.parametrize("case", list(CASES))
def test_samples_follow_the_requested_distribution(case):
    expected = DRAWS * oracle(Sampling(max_tokens=100, **CASES[case]))
    rows = [sequence(seed=seed, **CASES[case]) for seed in range(DRAWS)]
    tokens = [one.token_id for one in pick(LOGITS.expand(DRAWS, -1), *rows)]
    counts = np.bincount(tokens, minlength=VOCABULARY)
    assert not counts[expected == 0].any()
    rare = expected < 5
    observed, target = (
        np.append(counts[~rare], counts[rare].sum()),
        np.append(expected[~rare], expected[rare].sum()),
    )
    possible = target > 0
    chi_square = ((observed - target)[possible] ** 2 / target[possible]).sum()
    degrees_of_freedom = possible.sum() - 1
    # Wilson-Hilferty: the cube root is nearly normal. Limit: 3.3 standard deviations; the seeds are fixed.
    limit = (
        degrees_of_freedom
        * (1 - 2 / (9 * max(degrees_of_freedom, 1)) + 3.3 * math.sqrt(2 / (9 * max(degrees_of_freedom, 1))))
        ** 3
    )
    assert chi_square <= limit or (degrees_of_freedom == 0 and chi_square < 1e-9)


def test_samples_of_one_seed_at_successive_positions_follow_the_distribution():
    expected = DRAWS * oracle(Sampling(max_tokens=100))
    rows = [sequence(seed=7, prompt=[0] * (1 + position), output=[]) for position in range(1500)]
    tokens = [one.token_id for one in pick(LOGITS.expand(1500, -1), *rows)]
    share = np.bincount(tokens, minlength=VOCABULARY) / 1500
    assert np.abs(share - expected / DRAWS).max() < 0.04


MANY = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.5, 1.0, 2.0]),
        "top_k": st.integers(0, 30),
        "top_p": st.floats(0.01, 1),
        "min_p": st.floats(0, 1),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "repetition_penalty": st.floats(0.1, 2),
        "logit_bias": st.dictionaries(st.integers(0, VOCABULARY - 1), st.floats(-100, 100), max_size=3),
        "min_tokens": st.integers(0, 10),
        "logprobs": st.integers(0, 5),
    },
)


@given(parameters=st.lists(MANY, min_size=2, max_size=32), seed=st.integers(0, 2**64 - 1))
def test_row_gets_the_same_token_alone_and_in_a_batch(parameters, seed):
    generator = torch.Generator().manual_seed(seed % 2**63)
    logits = torch.randn(len(parameters), VOCABULARY, generator=generator) * 3
    rows = [sequence(seed=seed + row, **one) for row, one in enumerate(parameters)]
    alone = [pick(logits[row : row + 1], one)[0] for row, one in enumerate(rows)]
    assert alone == pick(logits, *rows)


def test_top_p_of_a_flat_distribution_extends_beyond_the_first_1024_candidates():
    wide = torch.linspace(1, 0, 5000)[None]
    kept = int((wide.double().softmax(-1).cumsum(-1) < 0.9).sum()) + 1
    tokens = [pick(wide, sequence(seed=seed, top_p=0.9))[0].token_id for seed in range(300)]
    assert 1024 < max(tokens) < kept < 5000


@pytest.mark.parametrize(("size", "top_p"), [(5000, 0.5), (20_000, 0.9), (20_000, 0.3), (1024, 0.99)])
def test_nucleus_is_exact_for_any_size(size, top_p):
    # The nuclei of a flat, a steep and a NaN row differ in size; each row is searched independently.
    generator = torch.Generator().manual_seed(size)
    flat = torch.randn(size, generator=generator) * 0.1
    logits = torch.stack([flat, flat * 100, torch.full((size,), float("nan")), flat])
    rows = [sequence(seed=row, top_p=p) for row, p in enumerate([top_p, top_p, top_p, 1.0])]
    scores = (logits - logits.max(-1, keepdim=True).values)[[0, 1, 3]]
    assert "NaN" in pick(logits, *rows)[2].error
    found = _top(scores, torch.full((3,), -math.inf), np.zeros(3, np.int64), np.array([top_p, top_p, 1.0]))
    for row in range(2):
        ranked = np.sort(scores[row].double().numpy())[::-1]
        masses = np.exp(ranked).cumsum()
        assert ranked[np.searchsorted(masses, top_p * masses[-1])] == pytest.approx(
            found[row].item(), abs=1e-6
        )
    assert -math.inf == found[2]


def test_temperature_zero_chooses_the_likeliest_token():
    assert int(LOGITS.argmax()) == pick(LOGITS[None], sequence(temperature=0))[0].token_id
    assert int(LOGITS.argmax()) == pick(LOGITS[None], sequence(temperature=1e-300))[0].token_id


def test_greedy_rows_apply_biases_penalties_and_min_tokens():
    likeliest_token = int(LOGITS.argmax())
    second = int(LOGITS.topk(2).indices[1])
    assert (
        second
        == pick(LOGITS[None], sequence(temperature=0, logit_bias={likeliest_token: -100.0}))[0].token_id
    )
    banned = sequence(temperature=0, min_tokens=6, stop_token_ids=(likeliest_token,))
    assert second == pick(LOGITS[None], banned)[0].token_id
    repeated = sequence(temperature=0, output=[likeliest_token] * 50, frequency_penalty=1.0)
    assert second == pick(LOGITS[None], repeated)[0].token_id


def test_min_tokens_bans_ends_only_in_rows_that_have_not_reached_it():
    logits = LOGITS.repeat(2, 1)
    logits[:, EOS[0]] = 50.0
    waits, may_end = pick(
        logits, sequence(temperature=0, min_tokens=6), sequence(temperature=0, min_tokens=5)
    )
    assert waits.token_id not in EOS
    assert EOS[0] == may_end.token_id


def test_given_logits_are_not_modified():
    logits = LOGITS[None].clone()
    pick(logits, sequence(logit_bias={1: 5.0}, repetition_penalty=1.5, min_tokens=9, logprobs=3))
    assert torch.equal(LOGITS[None], logits)


def test_logprobs_ignore_sampling_parameters():
    expected = LOGITS.double().log_softmax(-1)
    [one] = pick(LOGITS[None], sequence(temperature=0.3, top_k=2, logit_bias={4: 50.0}, logprobs=3))
    assert one.logprob.token_id == one.token_id == 4
    assert pytest.approx(expected[4].item(), abs=1e-5) == one.logprob.logprob
    best = expected.topk(3)
    assert best.indices.tolist() == [token for token, _ in one.logprob.top]
    assert pytest.approx(best.values.tolist(), abs=1e-5) == [logprob for _, logprob in one.logprob.top]


def test_each_row_gets_only_as_many_logprobs_as_requested():
    requested = [None, 0, 2, 10**6]
    picks = pick(LOGITS.expand(4, -1), *(sequence(logprobs=k) for k in requested))
    assert picks[0].logprob is None
    assert [len(one.logprob.top) for one in picks[1:]] == [0, 2, VOCABULARY]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_row_of_nan_fails_alone(temperature):
    logits = LOGITS.repeat(3, 1)
    logits[1, 4] = float("nan")
    rows = [sequence(seed=row, temperature=temperature, logprobs=1, top_p=0.9) for row in range(3)]
    healthy = [pick(logits[row : row + 1], rows[row])[0] for row in (0, 2)]
    picks = pick(logits, *rows)
    assert healthy == [picks[0], picks[2]]
    assert "NaN" in picks[1].error
    assert (picks[1].token_id, picks[1].logprob) == (-1, None)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_row_of_minus_infinity_fails_alone(temperature):
    logits = LOGITS.repeat(2, 1)
    logits[0] = float("-inf")
    broken, healthy = pick(logits, sequence(temperature=temperature), sequence(temperature=temperature))
    assert "no token is left" in broken.error
    assert healthy.error is None


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_infinity_is_always_chosen_and_minus_infinity_never(temperature):
    logits = LOGITS[None].clone()
    logits[0, 6] = float("inf")
    assert pick(logits, sequence(temperature=temperature, logprobs=2, top_p=0.5))[0].token_id == 6
    logits = torch.full((1, VOCABULARY), float("-inf"))
    logits[0, 8] = -5.0
    [one] = pick(logits, sequence(temperature=temperature, logprobs=2))
    assert one.token_id == 8
    assert one.logprob.top[0] == (8, 0.0)
    assert one.logprob.top[1][1] == -9999.0


def test_banned_end_token_stays_banned_with_an_infinite_logit():
    logits = LOGITS[None].clone()
    logits[0, EOS[0]] = float("inf")
    assert pick(logits, sequence(min_tokens=50))[0].token_id not in EOS


@pytest.mark.parametrize("unknown_token", [-1, VOCABULARY, 2**31, 2**63, -(2**70)])
def test_unknown_token_ids_have_no_effect(unknown_token):
    expected = pick(LOGITS[None], sequence())
    parameters = {"logit_bias": {unknown_token: 100.0}, "stop_token_ids": (unknown_token,), "min_tokens": 2}
    sampler, rows = sampler_of([sequence(**parameters)], eos=(unknown_token,))
    assert expected == listed(sampler.sample(LOGITS[None], rows))
    penalised = sequence(prompt=[VOCABULARY, 2**31 - 2], output=[], repetition_penalty=1.5)
    assert (
        pick(LOGITS[None], sequence(prompt=[0, 0], output=[]))[0].token_id
        == pick(LOGITS[None], penalised)[0].token_id
    )


@pytest.mark.parametrize(
    "invalid_rows",
    [
        {"temperature": float("inf")},
        {"temperature": 1e300},
        {"top_p": 0.0},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": -1.0},
        {"repetition_penalty": float("nan")},
        {"presence_penalty": float("inf")},
        {"logit_bias": {1: float("nan")}},
        {"logit_bias": {1: 1e308}},
    ],
)
def test_parameters_out_of_range_do_not_affect_other_rows(invalid_rows):
    expected = pick(LOGITS[None], sequence(seed=5))[0]
    picks = pick(LOGITS.expand(2, -1), sequence(seed=4, **invalid_rows), sequence(seed=5))
    assert expected == picks[1]
    assert picks[0].error is not None or 0 <= picks[0].token_id < VOCABULARY


@pytest.mark.parametrize(
    ("column", "invalid_rows"),
    [
        ("temperature", float("nan")),
        ("temperature", -1.0),
        ("top_p", -1.0),
        ("top_p", float("nan")),
        ("top_k", -5),
        ("top_k", 2**31 - 1),
        ("min_p", 2.0),
        ("min_p", -1.0),
        ("min_p", float("nan")),
        ("logprobs", -7),
    ],
)
def test_columns_out_of_range_do_not_affect_other_rows(column, invalid_rows):
    whole = sequence(seed=5, top_p=0.8, top_k=9, min_p=0.02, logprobs=2)
    expected = pick(LOGITS[None], whole)[0]
    sampler, rows = sampler_of([whole, whole])
    columns = sampler.parameters(rows).columns
    columns[column][0] = invalid_rows
    logits = LOGITS.expand(2, -1)
    picks = listed(choose(logits, logits, RowParameters(columns, rows.positions)))
    assert expected == picks[1]
    assert picks[0].error is not None or 0 <= picks[0].token_id < VOCABULARY


PENALTIES = {
    "presence_penalty": 0.4,
    "frequency_penalty": 0.3,
    "repetition_penalty": 1.3,
    "ignore_eos": True,
}


@given(
    output=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=8),
    late=st.lists(st.booleans(), min_size=3, max_size=3),
    prompt=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=4),
    window=st.sampled_from([-1, 1, 2, 4]),
)
def test_uncommitted_token_is_penalized_like_a_committed_one(output, late, prompt, window):
    # In late rows the last token is only on the device, and not yet committed to the batch.
    penalties = PENALTIES | {"repeat_last_n": window}
    with_output = [sequence(prompt=prompt, output=output, **penalties) for _ in late]
    without_penalties = [
        sequence(prompt=prompt, output=output[:-1] if is_late else output, **penalties) for is_late in late
    ]
    batch = batch_of(without_penalties)
    sampler = Sampler(batch, VOCABULARY, EOS)
    sampler.update_state()
    logits = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(len(output)))
    with_ids, rows = sampler_of(with_output)
    rows = rows._replace(latest=torch.full((3,), output[-1], dtype=torch.int32))
    expected = with_ids.process(logits, rows)
    assert not torch.equal(logits, expected)
    torch.testing.assert_close(expected, sampler.process(logits, rows), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("size", [1, 127, 128, 129, 1000])
def test_inverse_finds_the_token_where_the_cumulative_sum_passes_a_number(size):
    generator = torch.Generator().manual_seed(size)
    weights = torch.rand(200, size, generator=generator) * (torch.rand(200, size, generator=generator) < 0.2)
    weights[:, size // 2] += 1e-3  # at least one weight is positive
    weights[::7, : size // 2] = 0
    numbers = torch.rand(200, generator=generator, dtype=torch.float64)
    numbers[:40], numbers[40:80] = 0, 1 - 2.0**-53
    sums = weights.double().numpy().cumsum(-1)
    found = _inverse(weights, numbers).tolist()
    for row, token in enumerate(found):
        target = sums[row, -1] * float(numbers[row])
        expected = int(np.searchsorted(sums[row], target, side="right"))
        near = abs(sums[row] - target).min() < 1e-12 * sums[row, -1]  # rounding may decide either way
        assert expected == token or near
        assert weights[row, token] > 0


def test_random_numbers_are_uniform_and_distinct_by_seed_and_position():
    seeds, positions = np.tile(np.arange(100), 100), np.repeat(np.arange(100), 100)
    numbers = uniforms(seeds, positions)
    assert len(set(numbers.tolist())) == 10_000
    assert 0 <= numbers.min() < numbers.max() < 1
    counts = np.bincount((numbers * 20).astype(int), minlength=20)
    assert ((counts - 500) ** 2 / 500).sum() < 43.8  # chi-square, 19 degrees of freedom, 0.1 %


def test_random_numbers_of_a_seed_never_change():
    # A client's seed must mean the same after an upgrade.
    expected = [0.6524484863740305, 0.9435642308648511, 0.03388416163547703, 0.03388416163547703]
    seeds = np.array([0, 1, 2**64 - 1, 2**64 - 1], dtype=np.uint64)
    assert expected == uniforms(seeds, np.array([0, 1, 1000, 1000])).tolist()


def test_negative_seed_equals_its_value_modulo_two_to_the_64():
    expected = [pick(LOGITS[None], sequence(seed=2**64 - 1, output=OUTPUT[:n]))[0] for n in range(5)]
    assert expected == [pick(LOGITS[None], sequence(seed=-1, output=OUTPUT[:n]))[0] for n in range(5)]


def test_parameters_that_no_row_uses_are_not_gathered():
    def used(*sequences):
        sampler, rows = sampler_of(sequences)
        logits = LOGITS.expand(len(sequences), -1)
        return sampler.parameters(rows).columns, sampler.process(logits, rows) is logits

    columns, unchanged = used(sequence(), sequence())
    assert (set(columns), unchanged) == ({"temperature", "seed"}, True)
    columns, _ = used(sequence(temperature=0))
    assert "temperature" not in columns
    columns, unchanged = used(sequence(**CASES["all at once"], logprobs=0), sequence())
    assert not unchanged
    names = ("temperature", "top_k", "top_p", "min_p", "logprobs")
    assert [len(columns[name]) for name in names] == [2] * 5
