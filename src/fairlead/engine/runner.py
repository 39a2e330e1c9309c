"""Runs steps over a model and its KV cache: the device half's side of `fairlead.engine.step.Runner`.

Independent of the queue, the wire protocol and text; blocks are assigned before. `launch` does not wait for a
CUDA device: `wait` fetches a step's results.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from fairlead._cext.inputbatch import InputBatch, Step
from fairlead.engine.arrays import Array, inference, upload
from fairlead.engine.backend import Forward, staging
from fairlead.engine.input_columns import InputColumns
from fairlead.engine.inputs import Inputs, out_of_vocabulary_rows
from fairlead.engine.prompt_scores import PendingScores, PromptRows
from fairlead.engine.sampling.logits_processors import SampledRows
from fairlead.engine.sampling.sampler import PendingSamples, Sampler
from fairlead.engine.step import SampledTokens

if TYPE_CHECKING:
    from typing_extensions import Buffer

STEPS_AT_ONCE = 2  # one runs, one is prepared


class ModelRunner:
    """`fairlead.engine.step.Runner` over one model. The rows of its steps must have their blocks.

    With `overlaps`, a step may be launched before the results of the previous one were fetched. A token that
    is still unknown is −1 − (its index among that step's samples), and is replaced on the device.
    """

    def __init__(
        self,
        forward: Forward,
        eos_token_ids: tuple[int, ...],
        *,
        overlaps: bool = False,
        arenas: "Sequence[Buffer] | int" = STEPS_AT_ONCE,
    ) -> None:
        self.forward = forward
        self.overlaps = overlaps
        self.samples_several = forward.samples_several
        self.columns = forward.columns
        self.arenas = arenas
        self._eos_token_ids = eos_token_ids
        self._sampler: Sampler | None = None
        self._input_columns = InputColumns(forward.device)
        self._latest: Array | None = None  # tokens chosen by the previous step
        self._previous: PendingSamples | None = None
        self._stage = staging(forward)

    def launch(self, step: Step, batch: InputBatch) -> "LaunchedStep":
        """Run all tokens of a step through the layers; logits are made only for sampled and scored tokens."""
        with inference(self.forward.device):
            return self._launch(step, batch)

    def _launch(self, step: Step, batch: InputBatch) -> "LaunchedStep":
        forward = self.forward
        sampler = self._sampler_of(batch)
        if (update := sampler.update_state()) is not None:
            self._input_columns.update_state(update)
        inputs = self._input_columns.add_to(self._stage(step, batch, self._latest))
        prompts = PromptRows.of(step, batch, inputs) if step.rows > step.decodes else None
        if prompts is not None:
            inputs = msgspec.structs.replace(inputs, scored_tokens=prompts.tokens)
        logits = forward(inputs)
        scores = prompts.score(logits[step.samples :]) if prompts is not None else None
        logits = logits[: step.samples]
        last = inputs.token_ids
        if step.samples < len(last):  # else every token is sampled after
            last = last[upload(inputs.sample_tokens, forward.device)]
        slots, positions = np.asarray(step.sample_slots), np.asarray(step.positions)
        last_ids = self._last_ids(step, inputs) if sampler.constrains else None
        ids = np.asarray(step.input_ids) if step.drafts else None
        tokens = inputs.sample_tokens
        rows = SampledRows(slots, positions[tokens] + 1, last, last_ids, tokens, ids)
        samples = sampler.sample(logits, rows, processes_logits=step.processes_logits)
        self._latest, self._previous = samples.tokens, samples
        return LaunchedStep(samples, out_of_vocabulary_rows(batch, slots, forward.vocab_size), scores)

    def release(self, blocks: Sequence[Sequence[int]]) -> None:
        """Return the memory of free blocks, by KV cache group, to the system where the device can."""
        for group, ids in enumerate(blocks):
            self.forward.release(group, ids)

    def _sampler_of(self, batch: InputBatch) -> Sampler:
        if self._sampler is None or self._sampler.batch is not batch:
            self._sampler = Sampler(batch, self.forward.vocab_size, self._eos_token_ids)
            self._input_columns = InputColumns(self.forward.device)
        return self._sampler

    def _last_ids(self, step: Step, inputs: Inputs) -> np.ndarray:
        """Return the token before each sample. Waits for the previous step, not for this one."""
        last: np.ndarray = np.asarray(step.input_ids)[inputs.sample_tokens]
        late = last < 0
        if late.any():
            assert self._previous is not None
            last = last.copy()
            last[late] = self._previous.wait_for_tokens()[-1 - last[late]]
        return last


class LaunchedStep:
    """`fairlead.engine.step.PendingStep` of this runner."""

    def __init__(
        self, samples: PendingSamples, errors: dict[int, str], scores: PendingScores | None = None
    ) -> None:
        self._samples = samples
        self._errors = errors
        self._scores = scores

    def wait(self) -> SampledTokens:
        sampled = self._samples.wait()
        if self._scores is not None:
            sampled = msgspec.structs.replace(sampled, prompt_scores=self._scores.wait())
        if not self._errors:
            return sampled
        token_ids = np.array(sampled.token_ids)
        token_ids[list(self._errors)] = -1
        logprobs = {index: one for index, one in sampled.logprobs.items() if index not in self._errors}
        errors = {**sampled.errors, **self._errors}
        return msgspec.structs.replace(
            sampled,
            token_ids=token_ids.data,
            logprobs=logprobs,
            errors=errors,
            complete=sampled.complete - self._errors.keys(),
        )
