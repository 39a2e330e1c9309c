"""A model that is a function, and a runner that reads what it computes from out of a fake KV cache.

Two sequences that share a block, a chunk at the wrong place or a lost token change the answer.
"""

from collections.abc import Sequence as ReadOnlySequence

from fairlead.engine.sequence import Plan
from fairlead.engine.step import Pick
from fairlead.job import Sampling

VOCABULARY = 13
EOS = 0


def next_token(token_ids: ReadOnlySequence[int]) -> int:
    """What comes after these tokens."""
    state = 7
    for token_id in token_ids:
        state = (state * 31 + token_id + 1) % 10_007
    return state % VOCABULARY


def answer(prompt: ReadOnlySequence[int], sampling: Sampling, longest: int) -> tuple[list[int], str]:
    """The whole output and its finish reason, by the plainest of loops."""
    output: list[int] = []
    stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else {EOS})
    while len(output) < sampling.max_tokens and len(prompt) + len(output) < longest:
        output.append(next_token([*prompt, *output]))
        if output[-1] in stops and len(output) >= sampling.min_tokens:
            return output, "stop"
    return output, "length"


class FakeRunner:
    """Runs a plan at `launch`; `wait` gives the picks."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._cache: dict[tuple[int, int], int] = {}
        self._picks: list[Pick | None] = []

    def launch(self, plan: Plan) -> "FakeRunner":
        self._picks = []
        for chunk in plan.chunks:
            (blocks,) = chunk.sequence.block_ids
            places = [
                (blocks[position // self._block_size], position % self._block_size)
                for position in range(chunk.start + chunk.count)
            ]
            for position in range(chunk.start, chunk.start + chunk.count):
                self._cache[places[position]] = chunk.sequence.token_ids[position]
            seen = [self._cache[place] for place in places]
            self._picks.append(Pick(next_token(seen)) if chunk.samples else None)
        return self

    def wait(self) -> list[Pick | None]:
        return self._picks
