"""What the engine reports for a sequence besides its new token. Pure: uses no runner and no memory."""

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from fairlead._cext.inputbatch import Committed, Step
from fairlead.engine.scheduler import StepScheduler
from fairlead.engine.sequence import Sequence
from fairlead.engine.step import PromptScores, SampledTokens
from fairlead.job import FinishReason, TokenLogprob
from fairlead.messages import Output


class Note(msgspec.Struct):
    """What is reported for a sequence. With an `error` it has failed, and nothing else is reported."""

    logprobs: list[TokenLogprob] = []
    prompt_logprobs: list[TokenLogprob] = []
    cached_tokens: int = 0
    error: str | None = None

    def output(
        self,
        key: int,
        token_ids: list[int],
        finish_reason: FinishReason | None = None,
        stop_token: int | None = None,
    ) -> Output:
        """Return an `Output` with this note and these tokens."""
        return Output(
            key,
            token_ids,
            self.logprobs,
            finish_reason,
            stop_token,
            prompt_logprobs=self.prompt_logprobs,
            cached_tokens=self.cached_tokens,
        )


class TokenCounts(NamedTuple):
    """Notes of sequences with a new token, by its index in `Committed`; of those still in prefill, by key."""

    of_tokens: dict[int, Note]
    of_prompts: dict[int, Note]


def take_notes(
    step: Step,
    picks: SampledTokens,
    committed: Committed,
    scheduler: StepScheduler,
    sequences: Mapping[int, Sequence],
) -> TokenCounts:
    """Return the notes of a committed step, each reported once. Sequences that have ended get none."""
    of_tokens: defaultdict[int, Note] = defaultdict(Note)
    of_prompts: dict[int, Note] = {}
    cached = scheduler.cached
    if not (picks.logprobs or picks.prompt_scores or cached):
        return TokenCounts({}, {})
    places = {key: place for place, key in enumerate(committed.keys)}
    for sample, logprob in picks.logprobs.items():
        # If the slot has a new sequence, that one was not in this step and is not in `places`.
        sequence = scheduler.running_in(step.sample_slots[sample])
        if sequence is not None and sequence.key in places:
            of_tokens[places[sequence.key]].logprobs.append(logprob)
    for key, scores in picks.prompt_scores.items():
        if (sequence := sequences.get(key)) is not None:
            note = of_tokens[places[key]] if key in places else of_prompts.setdefault(key, Note())
            note.error = scores.error
            note.prompt_logprobs = _untold(sequence, scores)
    for key in [key for key in cached if key in places]:
        of_tokens[places[key]].cached_tokens = cached.pop(key)
    return TokenCounts(of_tokens, of_prompts)


def _untold(sequence: Sequence, scores: PromptScores) -> list[TokenLogprob]:
    """Return the scores not reported yet: a preempted sequence computes its prompt again."""
    assert sequence.scored is not None
    new = scores.logprobs[max(0, sequence.scored - 1 - scores.position) :]
    sequence.scored += len(new)
    return new
