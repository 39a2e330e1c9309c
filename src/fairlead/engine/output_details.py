"""What the engine reports for a sequence besides its new token. Pure: uses no runner and no memory."""

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

import msgspec
import numpy as np

from fairlead._cext.inputbatch import Committed
from fairlead.base.job import FinishReason, TokenLogprob
from fairlead.base.messages import Output
from fairlead.engine.scheduler import StepScheduler
from fairlead.engine.sequence import Sequence
from fairlead.engine.step import PromptScores, SampledTokens


class OutputDetails(msgspec.Struct):
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
        """Return an `Output` with these details and these tokens."""
        return Output(
            key,
            token_ids,
            self.logprobs,
            finish_reason,
            stop_token,
            prompt_logprobs=self.prompt_logprobs,
            cached_tokens=self.cached_tokens,
        )


NO_DETAILS = OutputDetails()


class TokensOf:
    """The tokens of each sequence in a `Committed`, by its index there."""

    def __init__(self, committed: Committed) -> None:
        self._tokens = committed.tokens
        self._counts = committed.counts
        self._ends = np.asarray(committed.counts).cumsum() if len(self._tokens) > len(self._counts) else None

    def __getitem__(self, index: int) -> list[int]:
        if self._ends is None:
            return [self._tokens[index]]
        end = int(self._ends[index])
        return self._tokens[end - self._counts[index] : end].tolist()


class StepDetails(NamedTuple):
    """By index in `Committed` for sequences with new tokens; by key for those still in prefill."""

    of_tokens: dict[int, OutputDetails]
    of_prompts: dict[int, OutputDetails]


def step_details(
    sampled: SampledTokens,
    committed: Committed,
    scheduler: StepScheduler,
    sequences: Mapping[int, Sequence],
) -> StepDetails:
    """Return the details of a committed step, each reported once. Sequences that have ended get none."""
    of_tokens: defaultdict[int, OutputDetails] = defaultdict(OutputDetails)
    of_prompts: dict[int, OutputDetails] = {}
    cached = scheduler.cached
    if not (sampled.logprobs or sampled.prompt_scores or cached):
        return StepDetails({}, {})
    indices = {key: index for index, key in enumerate(committed.keys)}
    if sampled.logprobs:
        of_rows = np.arange(len(committed.keys)).repeat(np.asarray(committed.counts)).tolist()
        for sample, index in zip(committed.samples, of_rows, strict=True):
            if (logprob := sampled.logprobs.get(sample)) is not None:
                of_tokens[index].logprobs.append(logprob)
    for key, scores in sampled.prompt_scores.items():
        if (sequence := sequences.get(key)) is not None:
            details = (
                of_tokens[indices[key]] if key in indices else of_prompts.setdefault(key, OutputDetails())
            )
            details.error = scores.error
            details.prompt_logprobs = _unreported(sequence, scores)
    for key in [key for key in cached if key in indices]:
        of_tokens[indices[key]].cached_tokens = cached.pop(key)
    return StepDetails(of_tokens, of_prompts)


def _unreported(sequence: Sequence, scores: PromptScores) -> list[TokenLogprob]:
    """Return the scores not reported yet: a preempted sequence computes its prompt again."""
    assert sequence.scored is not None
    new = scores.logprobs[max(0, sequence.scored - 1 - scores.position) :]
    sequence.scored += len(new)
    return new
