"""Validates requests and converts them to the batch's `SequenceState`. Uses only the limits."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from fairlead._cext.inputbatch import SequenceState
from fairlead.base.job import Sampling
from fairlead.engine.sampling import parameters
from fairlead.language.structured.constraint import Constraint

if TYPE_CHECKING:
    from typing_extensions import Buffer

Prompt: TypeAlias = "Buffer | Sequence[int]"
_LITTLE_ENDIAN = np.dtype("<i4")


class UnknownToken(ValueError):
    """A token id of a request, in the field `param`, that the network does not have."""

    def __init__(self, param: str, token_id: int, vocab_size: int) -> None:
        super().__init__(f"the model has no token {token_id}; its ids are 0...{vocab_size - 1}")
        self.param = param


class RequestValidator:
    """Validates requests. `longest`: prompt + output, in tokens. `draw_seed` is for those without a seed."""

    def __init__(
        self,
        *,
        longest: int,
        vocab_size: int,
        draw_seed: Callable[[], int],
        max_input_tokens: int | None = None,
        max_output_tokens: int | None = None,
    ) -> None:
        self.longest = longest
        self._vocab_size = vocab_size
        self._draw_seed = draw_seed
        self._max_input_tokens = max_input_tokens
        self._most_output = longest if max_output_tokens is None else max_output_tokens

    def accept(
        self,
        key: int,
        prompt: Prompt,
        sampling: Sampling,
        embeddings: "npt.NDArray[np.float32] | None" = None,
    ) -> SequenceState:
        """Return the sequence's state, with `max_tokens` cut to what fits after its prompt.

        key: the sequence's.
        prompt: its token ids.
        sampling: its parameters.
        embeddings: an optional column, a row for each token of the prompt; None: it has none.

        Raises ValueError, TypeError or OverflowError with the reason if it can never run; `UnknownToken` for
        what the parent cannot check where a configuration does not say how large the vocabulary is.
        """
        token_ids = as_token_ids(prompt)
        self._check_length(len(token_ids))
        if sampling.seed is None:
            sampling = msgspec.structs.replace(sampling, seed=self._draw_seed())
        encoded = parameters.TABLE.encode(sampling)
        if embeddings is not None:
            if len(embeddings) != len(token_ids):
                raise ValueError(f"embeddings: {len(embeddings)} for a prompt of {len(token_ids)} tokens")
            encoded = encoded._replace(embeddings=embeddings)
        if sampling.grammar is not None or sampling.reasoning_limit is not None:
            constraint = Constraint(limit=sampling.reasoning_limit, grammar=sampling.grammar)
            encoded = encoded._replace(constraint=constraint)
        self._check_tokens("logit_bias", sampling.logit_bias)
        self._check_tokens("allowed_token_ids", sampling.allowed_token_ids or ())
        max_tokens = min(sampling.max_tokens, self.longest - len(token_ids), self._most_output)
        if sampling.close_at_limit and encoded.constraint is not None:
            encoded.constraint.close_after = max_tokens
        state = SequenceState(
            key,
            token_ids.data,
            max_tokens=max_tokens,
            min_tokens=min(sampling.min_tokens, max_tokens),
            ignore_eos=sampling.ignore_eos,
            stop_token_ids=sampling.stop_token_ids,
            processes_logits=encoded.processes_logits,
            sampling=encoded,
        )
        if not self._is_token(state.largest_id):
            raise UnknownToken("prompt", state.largest_id, self._vocab_size)
        return state

    def _check_length(self, length: int) -> None:
        """Raise ValueError for a prompt that can never run."""
        most = self._max_input_tokens
        if length == 0:
            raise ValueError("the prompt is empty")
        if most is not None and length > most:
            raise ValueError(f"the prompt has {length} tokens; at most {most} are accepted")
        if length >= self.longest:
            raise ValueError(f"the prompt has {length} tokens; with one of output, {self.longest} fit")

    def _check_tokens(self, field: str, ids: Iterable[int]) -> None:
        for token_id in ids:
            if not self._is_token(token_id):
                raise UnknownToken(field, token_id, self._vocab_size)

    def _is_token(self, token_id: int) -> bool:
        return 0 <= token_id < self._vocab_size


def as_token_ids(prompt: Prompt) -> npt.NDArray[np.int32]:
    """Return an array. Raises OverflowError for an id beyond 32 bits, ValueError for a truncated buffer."""
    if isinstance(prompt, bytes | bytearray):
        return np.frombuffer(prompt, _LITTLE_ENDIAN)
    return np.ascontiguousarray(prompt, np.int32)
