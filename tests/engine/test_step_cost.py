"""The cost of steps is learned, chunks take the time that they are given, and tenants share it."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.fake_model import FakeRunner, Loop, answer
from fairlead.base.job import Sampling
from fairlead.engine.engine import Engine
from fairlead.engine.step_cost import ChunkTurns, Pace, StepCost, StepWork

BLOCK = 16


class Machine:
    """A machine with these costs in seconds: of a step, a decode, a token, and a token before it."""

    def __init__(self, step=0.01, decode=0.001, token=0.0005, pair=2e-7, noise=0.0, interrupted=0.0, seed=1):
        self.costs = step, decode, token, pair
        self.noise, self.interrupted = noise, interrupted
        self.rng = random.Random(seed)

    def took_s(self, work: StepWork) -> float:
        step, decode, token, pair = self.costs
        took_s = step + decode * work.decodes + (token + pair * work.context) * work.tokens
        if self.rng.random() < self.interrupted:
            took_s += 2.0
        return took_s * self.rng.uniform(1 - self.noise, 1 + self.noise)


machines = st.builds(
    Machine,
    step=st.floats(0.0005, 0.02),
    decode=st.floats(0.00005, 0.002),
    token=st.floats(0.00002, 0.003),
    pair=st.floats(0, 1e-6),
    noise=st.sampled_from([0.0, 0.1]),
    interrupted=st.sampled_from([0.0, 0.02]),
    seed=st.integers(0, 100),
)


def run(pace: Pace, machine: Machine, steps: int, seed: int = 0) -> list[tuple[StepWork, float]]:
    """Run steps: decodes come and go, and prompts of any length are computed beside them."""
    rng, now_s = random.Random(seed), 5.0
    decodes, context, left = 4, 0, 0
    done = []
    for _ in range(steps):
        decodes = max(1, min(8, decodes + rng.choice([-1, 0, 0, 1])))
        if not left and rng.random() < 0.3:
            context, left = 0, rng.choice([40, 300, 2000])
        pace.begin(now_s)
        tokens = min(left, pace.tokens(decodes, context), 512)
        work = StepWork(decodes, tokens, context if tokens else 0.0)
        pace.planned(work, under_way=0)
        took_s = machine.took_s(work)
        now_s += took_s
        done.append((work, took_s))
        context, left = context + tokens, left - tokens
    return done


@given(machine=machines, target_s=st.floats(0.02, 0.1))
def test_steps_with_chunks_take_about_the_target_on_any_machine(machine, target_s):
    done = run(Pace(target_s, BLOCK), machine, 400)
    step, decode, token, pair = machine.costs
    late = done[100:]
    for work, took_s in late:
        if work.tokens <= BLOCK or took_s > 1.5:
            continue
        alone_s = step + decode * work.decodes
        wanted_s = max(target_s, 1.5 * alone_s)
        one_block_s = BLOCK * (token + pair * work.context)
        assert took_s <= 1.6 * wanted_s + one_block_s, (work, took_s, wanted_s)
    chunks = [work.tokens for work, _ in late if work.tokens]
    assert chunks


def test_chunk_uses_the_time_that_decodes_leave():
    machine = Machine()
    pace = Pace(0.05, BLOCK)
    run(pace, machine, 300)
    for decodes, context in ((1, 0), (8, 0), (4, 1000)):
        left_s = 0.05 - 0.01 - 0.001 * decodes
        exact = left_s / (0.0005 + 2e-7 * context)
        assert abs(pace.tokens(decodes, context) - exact) <= BLOCK + 0.15 * exact


def test_chunk_is_at_least_a_block_and_half_of_the_decodes_time_if_they_take_longer_than_the_target():
    slow = Pace(0.05, BLOCK)
    run(slow, Machine(step=0.2, token=0.001), 200)
    assert 0.8 * 100 <= slow.tokens(4, 0) <= 1.25 * 112
    slower = Pace(0.05, BLOCK)
    run(slower, Machine(token=0.5), 200)
    assert slower.tokens(4, 0) == BLOCK


def test_step_that_tenants_share_takes_few_times_what_it_takes_without_prompts():
    quick = Pace(0.05, BLOCK)
    run(quick, Machine(step=0.001, decode=0.0001, token=0.00002), 300)
    alone, shared = quick.tokens(1, 0), quick.tokens(1, 0, is_shared=True)
    assert alone > 4 * shared
    assert 0.007 < 0.0011 + shared * 0.00002 < 0.013
    slow = Pace(0.05, BLOCK)
    run(slow, Machine(), 300)
    assert slow.tokens(1, 0, is_shared=True) == slow.tokens(1, 0)


def test_first_chunks_are_short_until_their_cost_is_known():
    pace = Pace(0.05, BLOCK)
    pace.begin(0.0)
    assert pace.tokens(8, 0) == 4 * BLOCK


def test_pauses_and_interruptions_do_not_count_as_work():
    cost = StepCost()
    machine = Machine()
    rng = random.Random(3)
    for _ in range(300):
        work = StepWork(rng.randint(1, 8), rng.choice([0, 64, 128]), 0.0)
        cost.learn(work, machine.took_s(work))
    before = cost.of(StepWork(8, 64, 0.0))
    cost.learn(StepWork(8, 64, 0.0), 30.0)
    assert cost.of(StepWork(8, 64, 0.0)) < 1.5 * before
    pace = Pace(0.05, BLOCK)
    pace.begin(0.0)
    pace.planned(StepWork(1, 0, 0.0), under_way=0)
    pace.begin(0.01)
    pace.pause()
    pace.begin(500.0)
    assert pace.cost.of(StepWork(1, 0, 0.0)) < 0.02


def test_cost_follows_a_machine_that_becomes_slower():
    pace = Pace(0.05, BLOCK)
    run(pace, Machine(), 300)
    fast = pace.tokens(4, 0)
    run(pace, Machine(step=0.02, decode=0.002, token=0.001), 400, seed=1)
    assert pace.tokens(4, 0) <= 0.6 * fast


def test_time_of_overlapping_steps_is_that_of_the_step_before():
    pace = Pace(0.05, BLOCK)
    works = [StepWork(4, 64 * (number % 3), 100.0) for number in range(300)]
    machine, now_s = Machine(), 0.0
    for number, work in enumerate(works):
        pace.begin(now_s)
        pace.planned(work, under_way=1 if number else 0)
        now_s += machine.took_s(works[max(0, number - 1)])
    for work in works[:3]:
        assert pace.cost.of(work) == pytest.approx(machine.took_s(work), rel=0.1)


# Turns ---------------------------------------------------------------------------------------------


@given(
    wanted=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 500)), max_size=8),
    total=st.integers(0, 600),
    least=st.sampled_from([1, 16]),
)
def test_parts_use_up_the_step_and_no_tenant_has_less_than_its_share_while_another_has_more(
    wanted, total, least
):
    parts = ChunkTurns().divide(total, wanted, least)
    assert all(0 <= part <= tokens for part, (_, tokens) in zip(parts, wanted, strict=True))
    assert sum(parts) == min(total, sum(tokens for _, tokens in wanted))
    by_tenant, needs = {}, {}
    for part, (tenant, tokens) in zip(parts, wanted, strict=True):
        by_tenant[tenant] = by_tenant.get(tenant, 0) + part
        needs[tenant] = needs.get(tenant, 0) + tokens
    for tenant, got in by_tenant.items():
        if got < needs[tenant]:
            most = got + 2 * least + len(by_tenant)
            assert max(by_tenant.values()) <= most
    for tenant in by_tenant:  # the first prompt of a tenant is served first
        own = [(part, tokens) for part, (one, tokens) in zip(parts, wanted, strict=True) if one == tenant]
        for (part, tokens), (later, _) in pairwise(own):
            assert later == 0 or part == tokens


@given(tenants=st.integers(2, 6), prompts=st.lists(st.integers(1, 3), min_size=6, max_size=6))
def test_tenants_take_turns_when_a_step_has_one_portion(tenants, prompts):
    turns = ChunkTurns()
    wanted = [(tenant, 1000) for tenant in range(tenants) for _ in range(prompts[tenant])]
    got = dict.fromkeys(range(tenants), 0)
    for _ in range(5 * tenants):
        for part, (tenant, _) in zip(turns.divide(BLOCK, wanted, BLOCK), wanted, strict=True):
            got[tenant] += part
    assert set(got.values()) == {5 * BLOCK}


# In the engine -------------------------------------------------------------------------------------


def engine_and_loop(machine: Machine, **options) -> tuple[Loop, list[tuple[int, int, float]]]:
    """Return an engine's loop over a machine, and the list of its steps: decodes, tokens, time."""
    steps = []

    class Timed(Loop):
        def turn(self, seconds=0.0):
            before, tokens = self.engine.statistics(), self.runner.computed
            super().turn(0.0)
            if self.engine.statistics().steps > before.steps:
                chunks = self.engine._scheduler._chunked
                decodes = self.runner.computed - tokens - chunks
                took_s = machine.took_s(StepWork(decodes, chunks, 0.0))
                steps.append((decodes, chunks, took_s))
                self.now_s += took_s

    runner = FakeRunner(BLOCK)
    engine = Engine(
        runner,
        slots=8,
        max_batch=8,
        max_batched_tokens=512,
        max_model_len=4000,
        blocks_total=1000,
        block_size=BLOCK,
        vocab_size=13,
        eos_token_ids=[0],
        draw_seed=lambda: 1,
        **options,
    )
    return Timed(engine, runner), steps


LONG = [1 + place % 11 for place in range(3000)]
ENDLESS = Sampling(max_tokens=300, ignore_eos=True)


@pytest.mark.parametrize("target_s", [None, 0.05])
def test_decodes_wait_for_one_short_step_beside_a_long_prompt(target_s):
    tested, steps = engine_and_loop(Machine(pair=0.0), target_step_s=target_s)
    for key in range(4):
        tested.engine.submit(key, [key + 1, 2, 3], ENDLESS)
    for _ in range(30):
        tested.turn()
    tested.engine.submit(9, LONG, Sampling(max_tokens=1, ignore_eos=True))
    tested.run()
    beside = [took_s for decodes, chunk, took_s in steps[30:] if decodes and chunk]
    assert beside
    if target_s is None:
        assert max(beside) > 0.25
    else:
        assert max(beside) < 0.07
        assert sum(beside) / len(beside) > 0.04  # and the time is used
    for key in range(4):
        assert answer([key + 1, 2, 3], ENDLESS, 4000)[0] == tested.token_ids_of[key]
    assert answer(LONG, Sampling(max_tokens=1, ignore_eos=True), 4000)[0] == tested.token_ids_of[9]


def test_prompt_alone_gets_the_whole_step():
    tested, steps = engine_and_loop(Machine(), target_step_s=0.05)
    tested.engine.submit(1, LONG, Sampling(max_tokens=1))
    tested.run()
    assert [chunk for _, chunk, _ in steps] == [512] * 5 + [440]


def test_prompts_have_short_steps_while_another_tenant_is_present():
    one_token = Sampling(max_tokens=1, ignore_eos=True)
    tested, steps = engine_and_loop(Machine(pair=0.0), target_step_s=0.05)
    tested.engine.submit(1, [1, 2], one_token, tenant=2)
    for key in (2, 3, 4):
        tested.engine.submit(key, LONG, one_token, tenant=1)
    tested.run()
    learned = 5
    assert max(took_s for *_, took_s in steps[learned:]) < 0.07
    tested.now_s += 11  # it is not present any more
    del steps[:]
    tested.engine.submit(5, LONG[::-1], one_token, tenant=1)
    tested.run()
    assert [chunk for _, chunk, _ in steps] == [512] * 5 + [440]


def test_new_prompt_of_another_tenant_has_its_part_of_the_step_that_admits_it():
    one_token = Sampling(max_tokens=1, ignore_eos=True)
    tested, steps = engine_and_loop(Machine(), target_step_s=0.05)
    for key in (1, 2):
        tested.engine.submit(key, LONG[key:], one_token, tenant=1)
    tested.turn()
    tested.engine.submit(3, [1, 2, 3], one_token, tenant=2)
    before = len(steps)
    while not tested.token_ids_of.get(3):
        tested.turn()
    assert len(steps) - before == 1


def test_short_prompt_of_another_tenant_does_not_wait_for_the_end_of_long_ones():
    began = {}
    for tenant in (1, 2):
        tested, steps = engine_and_loop(Machine(), target_step_s=0.05)
        tested.engine.submit(0, [1, 2], ENDLESS)
        for _ in range(20):
            tested.turn()
        for key in (1, 2, 3):
            tested.engine.submit(key, LONG, ENDLESS, tenant=1)
        for _ in range(5):
            tested.turn()
        tested.engine.submit(4, LONG[:100], ENDLESS, tenant=tenant)
        before = len(steps)
        while not tested.token_ids_of.get(4):
            tested.turn()
        began[tenant] = len(steps) - before
    assert began[2] <= 8
    assert began[1] > 10 * began[2]
