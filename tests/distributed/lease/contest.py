"""Contenders over a simulated store and network, in simulated time: what each of them does, step by step.

Each machine has two clocks, of a rate of its own: one that counts suspension, and may jump ahead, and one
that stands still while the machine is suspended. The network may execute an operation long after its sender
has given it up. After each step the rules of a lease are checked.
"""

from itertools import count

from fairlead.distributed.lease.contender import Contender, LeaseRecord, Read, Replace, Wait

DURATION_S = 1.0
STEP_S = DURATION_S / 24
# The clocks' rates differ by less than the margin of a term.
RATES = (1.0, 0.97, 1.03)
# Renewals and polls take a part of the duration; then the record must stay unchanged for a whole duration.
LEADS_WITHIN_S = 1.6 * DURATION_S


class Operation:
    """A read or a write on its way to the store, and the reply to it."""

    def __init__(self, action):
        self.action = action
        self.is_executed = False
        self.reply = None


class Machine:
    """One machine, and the contender that runs on it now."""

    def __init__(self, contest, number, rate):
        self.contest = contest
        self.number = number
        self.rate = rate
        self.jumped_s = 100.0 * number
        self.suspended_s = 0.0
        self.runs = 0
        self.start()

    def start(self):
        """Start a new process."""
        self.runs += 1
        self.contender = self.contest.kind(
            f"{self.number}-{self.runs}",
            DURATION_S,
            self.now_s,
            waited_s=self.waited_s,
            least_epoch=lambda: 1 + int(1000 * self.contest.now_s),
        )
        self.awaited = None
        self.asleep_until_s = 0.0

    def now_s(self):
        return self.rate * self.contest.now_s + self.jumped_s

    def waited_s(self):
        return self.rate * (self.contest.now_s - self.suspended_s)

    def act(self):
        """Do what the process does next unless it waits, as `StoredLease` does."""
        term = self.contender.term
        if term is not None and not term.is_valid():
            self.contender.lose()
            self.start()
        if self.awaited is not None or self.waited_s() < self.asleep_until_s:
            return
        action = self.contender.next_action()
        if isinstance(action, Wait):
            self.asleep_until_s = self.waited_s() + action.wait_s
        else:
            self.awaited = self.contest.send(action)

    def receive(self):
        """Get the reply, if there is one."""
        operation = self.awaited
        if operation is None or not operation.is_executed:
            return
        self.awaited = None
        if isinstance(operation.action, Replace):
            self.contender.replaced(operation.reply)
        elif not self.contender.received(operation.reply):
            self.start()

    def give_up(self):
        """Wait for a reply no longer. The operation stays in the network."""
        if self.awaited is not None:
            self.awaited = None
            self.contender.failed()

    def exchange(self, *, reply_is_lost=False):
        """Do the next operation without a delay."""
        self.act()
        if self.awaited is not None:
            if not self.awaited.is_executed:
                self.contest.execute(self.awaited)
            self.give_up() if reply_is_lost else self.receive()

    def stop(self):
        """End the process by a signal: it releases the lease."""
        self.contender.lose()
        if self.contender.may_hold:
            write = self.contender.release(self.contest.record)
            if write is not None:
                self.contest.replace(write)
        self.start()


class Contest:
    """The machines, and the store. `kind` is the class of contenders."""

    def __init__(self, kind=Contender, machines=3):
        self.kind = kind
        self.now_s = 1.0
        self.record = None
        self.network = []
        self._versions = count(1)
        self._terms = []  # of all leaders so far
        self._ended = set()
        self.machines = [Machine(self, number, RATES[number]) for number in range(machines)]

    def send(self, action):
        operation = Operation(action)
        self.network.append(operation)
        return operation

    def execute(self, operation):
        """Let the store execute an operation."""
        self.network.remove(operation)
        operation.is_executed = True
        if isinstance(operation.action, Read):
            operation.reply = self.record
        else:
            operation.reply = self.replace(operation.action)

    def replace(self, write):
        if self.record != write.previous:
            return None
        version = str(next(self._versions))
        self.record = LeaseRecord(write.holder, write.epoch, write.duration_s, version)
        return self.record

    def check(self):
        """Check the rules."""
        leaders = self.leaders()
        assert len(leaders) <= 1, "there are two leaders"
        assert self._ended.isdisjoint(leaders), "a term that had ended is valid again"
        for term in leaders:
            if term not in self._terms:
                assert all(term.epoch > earlier.epoch for earlier in self._terms), "an epoch has not grown"
                self._terms.append(term)
        self._ended.update(term for term in self._terms if not term.is_valid())

    def leaders(self):
        """Return the terms that are valid now."""
        terms = [machine.contender.term for machine in self.machines]
        return [term for term in terms if term is not None and term.is_valid()]

    def run(self, steps, reached, *, reply_is_lost=False):
        """Let time pass. Only the machines in `reached` have a network, which may lose all replies."""
        for _ in range(steps):
            self.now_s += STEP_S
            for machine in self.machines:
                if machine.number in reached:
                    machine.exchange(reply_is_lost=reply_is_lost)
                else:
                    machine.act()
                self.check()

    def heal(self):
        """Repair the network, and return the seconds until there is a leader."""
        self.network.clear()
        for machine in self.machines:
            machine.give_up()
        began_s = self.now_s
        everyone = {machine.number for machine in self.machines}
        while not self.leaders():
            self.run(1, everyone)
            assert self.now_s - began_s <= LEADS_WITHIN_S, "nothing leads"
        return self.now_s - began_s
