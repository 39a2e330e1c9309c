"""Log-probabilities of prompts: a step's logits, evaluated at the prompts' own next tokens.

The scheduler bounds how many tokens of such prompts a step has, and so the logits in memory. Like the
sampler, this does not wait for the device before `PendingScores.wait`.
"""

from typing import NamedTuple

import numpy as np

from fairlead._cext.inputbatch import InputBatch, Step
from fairlead.base.job import TokenLogprob
from fairlead.engine.arrays import Array, Arriving, device_of, upload
from fairlead.engine.inputs import Inputs
from fairlead.engine.sampling.logprobs import LEAST_LOGPROB, log_probabilities
from fairlead.engine.step import PromptScores


class _Chunk(NamedTuple):
    """A row's tokens from `position` on, and how many alternatives its sequence requests for each."""

    key: int
    position: int
    length: int
    alternatives: int


class PromptRows:
    """The P tokens of a step that need logits to score prompts.

    `tokens`: their indices among the step's tokens; `next_ids`: the token after each in its prompt.
    """

    def __init__(self, chunks: list[_Chunk], tokens: np.ndarray, next_ids: np.ndarray) -> None:
        self.tokens = tokens
        self._chunks = chunks
        self._next_ids = next_ids

    @classmethod
    def of(cls, step: Step, batch: InputBatch, inputs: Inputs) -> "PromptRows | None":
        """Return those of a step, or None. Decodes have none: the token after a prompt's last is output."""
        chunks, tokens, next_ids = [], [], []
        for row in range(step.decodes, step.rows):
            state = batch.state(int(inputs.slots[row]))
            alternatives = state.sampling.parameters.prompt_logprobs
            if alternatives is None:
                continue
            first, end = inputs.query_starts[row : row + 2].tolist()
            position = int(inputs.sequence_lengths[row]) - (end - first)
            length = min(end - first, state.prompt_length - 1 - position)
            if length > 0:
                chunks.append(_Chunk(state.key, position, length, alternatives))
                tokens.append(np.arange(first, first + length))
                next_ids.append(np.array(state.tokens_view()[position + 1 : position + 1 + length]))
        return cls(chunks, np.concatenate(tokens), np.concatenate(next_ids)) if chunks else None

    def score(self, logits: Array) -> "PendingScores":
        """Start scoring the tokens by their `logits` [P, V], which may be overwritten."""
        if not isinstance(logits, np.ndarray):
            logits = logits.float()
        return PendingScores(self._chunks, logits, self._next_ids)


class PendingScores:
    """Scores that the device may still be computing; `wait` returns them."""

    def __init__(self, chunks: list[_Chunk], logits: Array, next_ids: np.ndarray) -> None:
        self._chunks = chunks
        self._next_ids = next_ids
        vocabulary = logits.shape[1]
        # An id outside the vocabulary fails its sequence when it samples (`out_of_vocabulary_rows`).
        ids = upload(next_ids.clip(0, vocabulary - 1).astype(np.int64), device_of(logits))
        most = max(chunk.alternatives for chunk in chunks)
        self._arriving = Arriving(log_probabilities(logits, ids, most))

    def wait(self) -> dict[int, PromptScores]:
        """Return the scores by sequence key."""
        logprobs, ranks, top, top_ids = self._arriving.wait()
        found, first = {}, 0
        for chunk in self._chunks:
            rows = slice(first, first + chunk.length)
            first += chunk.length
            if np.isnan(logprobs[rows]).any():
                found[chunk.key] = PromptScores(
                    chunk.position, [], "the model's logits are not numbers (NaN)"
                )
                continue
            listed = [
                TokenLogprob(
                    token_id, logprob, tuple(zip(ids[: chunk.alternatives], likeliest, strict=False)), rank
                )
                for token_id, logprob, rank, likeliest, ids in zip(
                    self._next_ids[rows].tolist(),
                    logprobs[rows].clip(min=LEAST_LOGPROB).tolist(),
                    ranks[rows].tolist(),
                    top[rows].clip(min=LEAST_LOGPROB).tolist(),
                    top_ids[rows].tolist(),
                    strict=True,
                )
            ]
            found[chunk.key] = PromptScores(chunk.position, listed)
        return found
