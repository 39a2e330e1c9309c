"""Several leases of one store, each held again whenever it was lost: whether there are two leaders."""

from contextlib import contextmanager

import trio

from fairlead.distributed.lease import LeaseLost


class Election:
    """Runs leases, and checks at each new term that no other is valid and that its epoch is the highest.

    A term becomes valid only at its beginning, so that nothing else must be checked.
    """

    def __init__(self):
        self.terms = []
        self._scopes = {}

    def leaders(self):
        """Return the terms that are valid now."""
        return [term for term in self.terms if term.is_valid()]

    async def run(self, make_lease):
        """Hold a lease, each time as a new process would, until cancelled."""
        while True:
            try:
                with unwrapped_loss():
                    async with trio.open_nursery() as nursery:
                        term = await nursery.start(make_lease().hold)
                        assert self.leaders() == [], "there are two leaders"
                        assert all(term.epoch > earlier.epoch for earlier in self.terms), "epochs must grow"
                        self.terms.append(term)
                        self._scopes[term] = nursery.cancel_scope
            except LeaseLost:
                """Another term begins."""

    def stop_leader(self):
        """End the leader by a signal, if there is one: it releases the lease."""
        for term in self.leaders():
            self._scopes[term].cancel()

    async def wait_for_leader(self, within_s):
        """Wait until there is a leader; fail after that time."""
        await until(self.leaders, within_s)


async def until(holds, within_s=10.0):
    """Wait until the condition holds; fail after that time."""
    with trio.fail_after(within_s):
        while True:
            if holds():
                return
            await trio.sleep(0.01)


@contextmanager
def unwrapped_loss():
    """Raise `LeaseLost` of a group as it is."""
    try:
        yield
    except* LeaseLost:
        raise LeaseLost from None
