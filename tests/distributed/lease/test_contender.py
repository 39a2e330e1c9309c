"""Several contenders under lost, late and repeated operations, pauses, drifting and jumping clocks."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from distributed.lease.contest import DURATION_S, Contest
from fairlead.distributed.lease.contender import Contender, LeaseRecord, Replace
from fairlead.distributed.lease.term import Term
from first_failure import until_first_failure

machine_numbers = st.integers(0, 2)
times_s = st.sampled_from((0.02, 0.1, 0.3, 0.7, 0.95, 1.2, 3.0)).map(lambda part: part * DURATION_S)


class ContestMachine(RuleBasedStateMachine):
    """Any order of steps of three machines, their network and their clocks."""

    kind = Contender

    def __init__(self):
        super().__init__()
        self.contest = Contest(self.kind)

    @rule(
        steps=st.integers(1, 40),
        reached=st.sampled_from(({0, 1, 2}, {0, 1}, {0}, {1}, {2}, set())),
        reply_is_lost=st.booleans(),
    )
    def run(self, steps, reached, reply_is_lost):
        self.contest.run(steps, reached, reply_is_lost=reply_is_lost)

    @rule(number=machine_numbers)
    def act(self, number):
        self.contest.machines[number].act()

    @rule(which=st.integers(0, 20))
    def execute(self, which):
        if self.contest.network:
            self.contest.execute(self.contest.network[which % len(self.contest.network)])

    @rule(number=machine_numbers)
    def receive(self, number):
        self.contest.machines[number].receive()

    @rule(number=machine_numbers)
    def give_up(self, number):
        self.contest.machines[number].give_up()

    @rule(number=machine_numbers, time_s=times_s, others_run=st.booleans())
    def pause(self, number, time_s, others_run):
        """One process does nothing, as after SIGSTOP."""
        if others_run:
            steps = int(time_s / DURATION_S * 24)
            others = [each for each in self.contest.machines if each.number != number]
            for _ in range(steps):
                self.contest.now_s += time_s / max(1, steps)
                for each in others:
                    each.exchange()
                    self.contest.check()
        else:
            self.contest.now_s += time_s

    @rule(time_s=times_s, executed_first=st.booleans(), cut_off_steps=st.sampled_from((0, 30)))
    def delay_renewal(self, time_s, executed_first, cut_off_steps):
        """The next renewal of the leader takes long, to the store or back; then it may be cut off."""
        contest = self.contest
        leaders = [each for each in contest.machines if each.contender.term in contest.leaders()]
        for leader in leaders:
            others = {0, 1, 2} - {leader.number}
            while leader.awaited is None and contest.leaders():
                contest.run(1, others)
            if executed_first and leader.awaited in contest.network:
                contest.execute(leader.awaited)
            self.pause(leader.number, time_s, others_run=True)
            if leader.awaited in contest.network:
                contest.execute(leader.awaited)
            leader.receive()
            contest.run(cut_off_steps, others)

    @rule(number=machine_numbers, time_s=times_s)
    def suspend(self, number, time_s):
        self.contest.now_s += time_s
        self.contest.machines[number].suspended_s += time_s

    @rule(number=machine_numbers, time_s=times_s, runs_alone=st.booleans())
    def jump_ahead(self, number, time_s, runs_alone):
        self.contest.machines[number].jumped_s += time_s
        self.contest.run(5 * runs_alone, {number})

    @rule(number=machine_numbers)
    def kill(self, number):
        self.contest.machines[number].start()

    @rule(number=machine_numbers)
    def stop(self, number):
        self.contest.machines[number].stop()

    @rule()
    def lose_record(self):
        self.contest.record = None

    @rule()
    def heal(self):
        self.contest.heal()

    @invariant()
    def keeps_rules(self):
        self.contest.check()


class TestContest(ContestMachine.TestCase):
    settings = settings(max_examples=100, stateful_step_count=40)


# Mutants: contenders with one mistake each -----------------------------------------------------------


class CountsFromReply(Contender):
    """The term is counted from the reply to a write, not from its sending."""

    def replaced(self, record):
        self._sent_s = self._now_s()
        super().replaced(record)


class RepeatsEpoch(Contender):
    """A new term has the epoch of the record that it replaces."""

    def _write(self, now_s, epoch):
        return super()._write(now_s, min(epoch, max(1, self._record.epoch)) if self._record else epoch)


class ReleasesAnothers(Contender):
    """The lease is released also if another process has it."""

    def release(self, record):
        return record and Replace(record, "", record.epoch, record.duration_s)


class RevivableTerm(Term):
    def extend(self, valid_until_s):
        self._valid_until_s = valid_until_s


class RenewsAfterExpiry(Contender):
    """A term whose time has passed is renewed."""

    def replaced(self, record):
        super().replaced(record)
        if self.term is not None:
            self.term.__class__ = RevivableTerm


class IgnoresRenewals(Contender):
    """Waiting is not begun again when the leader has renewed."""

    def received(self, record):
        before, seen_s = self._record, self._seen_s
        result = super().received(record)
        if before is not None and record is not None and before.holder == record.holder:
            self._seen_s = seen_s
        return result


class WaitsByJumpingClock(Contender):
    """Waiting is measured by the clock that may jump."""

    def __init__(self, *arguments, waited_s, **options):
        super().__init__(*arguments, waited_s=arguments[2], **options)


class LeadsByClaim(Contender):
    """Whatever replaces a missing record leads at once."""

    def next_action(self):
        action = super().next_action()
        if isinstance(action, Replace) and action.previous is None:
            return action._replace(epoch=max(self._highest + 1, self._least_epoch()))
        return action


class LeadsAnyway(Contender):
    """A write that came too late is taken for one that succeeded."""

    def replaced(self, record):
        super().replaced(record or LeaseRecord(self._holder, self._highest + 1, 1.0, "none"))


class NeverTakesOver(Contender):
    """A record of another process is never replaced."""

    def _free_s(self):
        free_s = super()._free_s()
        is_anothers = self._record is not None and self._record.holder not in ("", self._holder)
        return free_s + 10 * DURATION_S if is_anothers else free_s


@pytest.mark.parametrize(
    ("mutant", "violation"),
    [
        (CountsFromReply, "two leaders"),
        (RepeatsEpoch, "has not grown"),
        (ReleasesAnothers, "two leaders"),
        (RenewsAfterExpiry, "valid again"),
        (IgnoresRenewals, "two leaders"),
        (WaitsByJumpingClock, "two leaders"),
        (LeadsByClaim, "two leaders"),
        (LeadsAnyway, "two leaders"),
        (NeverTakesOver, "nothing leads"),
    ],
)
def test_contest_finds_the_mistake(mutant, violation):
    machine = type("Machine", (ContestMachine,), {"kind": mutant})
    search = until_first_failure(settings(stateful_step_count=40), max_examples=500)
    with pytest.raises(AssertionError, match=violation):
        run_state_machine_as_test(machine, settings=search)


def test_claim_on_a_missing_record_leads_when_it_has_been_unchanged_for_the_duration():
    contest = Contest(machines=1)
    contest.run(25, {0})
    assert (contest.record.epoch, contest.leaders()) == (0, [])
    contest.run(6, {0})
    assert [term.epoch for term in contest.leaders()] == [contest.record.epoch]


def test_leader_whose_clock_jumps_ahead_ends_its_term_and_standby_does_not_take_over_early():
    contest = Contest()
    contest.heal()
    (leader,) = [machine for machine in contest.machines if machine.contender.term is not None]
    standby = contest.machines[leader.number - 1]
    standby.jumped_s += 100 * DURATION_S
    contest.run(24, {0, 1, 2})
    assert contest.leaders() == [leader.contender.term]
    leader.jumped_s += 100 * DURATION_S
    assert contest.leaders() == []
    contest.heal()


def test_raised_epoch_of_a_leader_is_written_with_its_next_renewal_and_exceeded_by_the_next_leader():
    contest = Contest()
    contest.heal()
    (leading,) = [each for each in contest.machines if each.contender.term in contest.leaders()]
    (term,) = contest.leaders()
    high = term.epoch + 10**9
    assert term.raise_epoch(high)
    leading.contender.failed()  # it reads the record, which has the earlier epoch
    contest.run(24, {0, 1, 2})
    assert contest.leaders() == [term]
    assert (term.epoch, contest.record.epoch) == (high, high)
    leading.start()
    contest.heal()
    (successor,) = contest.leaders()
    assert successor.epoch > high
    assert not term.raise_epoch(high + 1)


def test_epoch_is_never_lowered():
    term = Term(5)
    assert term.raise_epoch(3)
    assert term.epoch == 5
