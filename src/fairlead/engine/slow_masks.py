"""Keeps slow masks out of steps.

A mask says which tokens a constrained sequence may choose next. Most take some 10 µs and are filled in the
step that chooses (`sampling.token_masks`). What takes longer than a share of the step is found in threads
while steps go on without its sequence, which takes part again when it has its mask.

The owners of constrained sequences divide a step's share: each may use an equal part, and what the others
have left of theirs in the step before. So another's many masks do not make a sequence wait for a thread.
Example: 2 ms; A has forty masks of 0.1 ms, and B has one. A gets 1.9 ms, and B its mask, wherever it is in
the batch.
"""

from collections import defaultdict
from collections.abc import Hashable
from functools import partial

from fairlead.engine.sequence import Sequence
from fairlead.language.structured.constraint import Constraint
from fairlead.language.structured.turn_pool import TurnPool

THREADS = 2
SHARE = 0.25
LEAST_BUDGET_S = 0.002
"""What the masks of a step may take together: this share of the step before, and at least so much."""

_LONGEST_STEP_S = 0.5  # a longer one was waiting, or a long prompt


class SlowMasks:
    """Decides which constrained sequences a step has to wait for.

    The time of a mask is expected to be that of the one before it. The order of the calls is `begin_step`,
    then `admits` once for each constrained sequence of the step, then
    `admit_drafts` once for each that has drafts.
    """

    def __init__(self, *, share: float = SHARE, least_budget_s: float = LEAST_BUDGET_S) -> None:
        self._share = share
        self._least_budget_s = least_budget_s
        self._budget_s = 0.0
        # By owner, what the masks of this step and of the one before take together.
        self._used_s: defaultdict[Hashable, float] = defaultdict(float)
        self._before_s: dict[Hashable, float] = {}
        self._all_before_s = 0.0
        self._begun_at_s: float | None = None
        self._pool = TurnPool(THREADS, "slow masks")
        self._finding: dict[int, Constraint] = {}  # by the sequence's key

    def begin_step(self, now_s: float) -> None:
        """Begin to plan a step."""
        before_s = 0.0 if self._begun_at_s is None else min(now_s - self._begun_at_s, _LONGEST_STEP_S)
        self._begun_at_s = now_s
        self._budget_s = max(self._least_budget_s, self._share * before_s)
        self._before_s, self._used_s = self._used_s, defaultdict(float)
        self._all_before_s = sum(self._before_s.values())

    def begin_pause(self) -> None:
        """Mark that no step has begun: the time until the next one does not count as a step's."""
        self._begun_at_s = None

    def admits(self, sequence: Sequence) -> bool:
        """Return whether the step may choose a token of this sequence. If not, its mask is being found."""
        constraint = sequence.constraint
        if constraint is None or constraint.matcher is None:
            return True
        if constraint.ahead is not None:
            if not constraint.ahead.done():
                return False
            self._finding.pop(sequence.key, None)
            return True
        if constraint.expected_s <= self._left_s(constraint.owner) and not self._is_locked(constraint.lexer):
            self._used_s[constraint.owner] += constraint.expected_s
            return True
        tokens = sequence.tokens
        if tokens.num_tokens == tokens.prompt_length + tokens.output_length:
            # Else its last token is of a step under way, and not known yet.
            new = tokens.tokens_view()[tokens.prompt_length + constraint.consumed :].tolist()
            constraint.ahead = self._pool.submit(constraint.owner, partial(constraint.find, new))
            self._finding[sequence.key] = constraint
        return False

    def admit_drafts(self, sequence: Sequence, most: int) -> int:
        """Return after how many of a sequence's drafts, at most `most`, the step may choose a token."""
        constraint = sequence.constraint
        if constraint is None or constraint.matcher is None:
            return most
        if constraint.ahead is not None:
            return 0
        if constraint.expected_s > 0:
            most = min(most, max(0, int(self._left_s(constraint.owner) / constraint.expected_s)))
        self._used_s[constraint.owner] += most * constraint.expected_s
        return most

    def forget(self, sequence: Sequence) -> None:
        """Stop finding a mask for a sequence that has ended."""
        constraint = self._finding.pop(sequence.key, None)
        if constraint is not None and constraint.ahead is not None:
            constraint.ahead.cancel()

    def close(self) -> None:
        """End the threads."""
        self._pool.close()

    def _left_s(self, owner: Hashable) -> float:
        """Return how long the next masks of an owner may take in this step."""
        others_s = self._all_before_s - self._before_s.get(owner, 0.0)
        owners = len(self._before_s) + (owner not in self._before_s)
        return max(self._budget_s / owners, self._budget_s - others_s) - self._used_s.get(owner, 0.0)

    def _is_locked(self, lexer: Hashable) -> bool:
        """Return whether a thread uses this lexer, which makes others of the same grammar wait."""
        return lexer is not None and any(
            one.lexer == lexer and one.ahead is not None and not one.ahead.done()
            for one in self._finding.values()
        )
