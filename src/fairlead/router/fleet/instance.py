"""One instance of a local model, and when a model is started again after its death."""

import trio

from fairlead.base.backoff import Backoff
from fairlead.nodes.model_process import ModelProcess

FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 30.0
HEALTHY_AFTER_S = 60.0


class Instance:
    """One instance, from the decision to load it until its processes are gone: `ended` is set then.

    `settled` is set when it is loaded or has ended.
    `node` runs it, once it may start. Loading began at `began_at` and ended at `ready_at`, by Trio's clock.
    """

    def __init__(self) -> None:
        self.scope = trio.CancelScope()
        self.ended = trio.Event()
        self.settled = trio.Event()
        self.node: ModelProcess | None = None
        self.was_ready = False
        self.began_at = 0.0
        self.ready_at = 0.0

    @property
    def stuck(self) -> str | None:
        """Why it was given up as stuck; None if it was not."""
        return None if self.node is None else self.node.stuck


class Restarts:
    """Whether a model is to be restarted, and after which pause. Pauses double until an instance stays up.

    `is_due` is set when an instance dies, and reset once the model is loaded or unloaded. If another model
    uses its memory in the meantime, it is not missing any more, but may still be restarted.
    """

    def __init__(self) -> None:
        self.is_due = False
        self._is_given_up = False
        self._backoff = Backoff(FIRST_BACKOFF_S, LONGEST_BACKOFF_S)

    @property
    def is_missing(self) -> bool:
        """Whether the model should be loaded and is not."""
        return self.is_due and not self._is_given_up

    def cancel(self) -> None:
        """Do not restart the model."""
        self.is_due = self._is_given_up = False

    def give_up(self) -> None:
        """Stop counting the model as missing, if a restart is due."""
        self._is_given_up = self.is_due

    def ran(self, duration_s: float) -> None:
        """Start again with the shortest pause if an instance was ready for long enough."""
        if duration_s > HEALTHY_AFTER_S:
            self._backoff.reset()

    def next_backoff_s(self) -> float:
        """Return the pause before the next restart, and double it, up to `LONGEST_BACKOFF_S`."""
        return self._backoff.take()
