"""What determines the draw of each row: its parameters, and its random number. Imports no torch.

A draw's random number depends only on the sequence's seed and the token's position, so the rest of the batch
cannot change it.
"""

import msgspec
import numpy as np

GREEDY_BELOW = 1e-5
"""Lower temperatures are greedy, because dividing by them overflows."""


class RowParameters(msgspec.Struct, frozen=True):
    """The parameters that S rows are drawn with.

    `columns`: arrays [S] by parameter; one that is absent is off in all rows. `seed` (uint64) and `positions`
    (of the token to choose) determine the draw.
    """

    columns: dict[str, np.ndarray]
    positions: np.ndarray

    def get(self, name: str) -> np.ndarray | None:
        """Return a parameter's values [S]; None if it is off in all rows."""
        return self.columns.get(name)

    def of(self, rows: np.ndarray) -> "RowParameters":
        """Return the parameters of some rows."""
        columns = {name: column[rows] for name, column in self.columns.items()}
        return RowParameters(columns, self.positions[rows])


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return a float64 in [0, 1) of 48 bits for each (seed, position): splitmix64 used as a hash."""
    state = _mix(seeds.astype(np.uint64))
    state = _mix(state + positions.astype(np.uint64) * np.uint64(0x9E37_79B9_7F4A_7C15))
    return np.asarray((state >> np.uint64(16)).astype(np.float64) * 2.0**-48)


def _mix(state: np.ndarray) -> np.ndarray:
    """Scramble 64-bit integers, one to one, so that results of neighbors are unrelated."""
    state = state + np.uint64(0x9E37_79B9_7F4A_7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return np.asarray(state ^ (state >> np.uint64(31)))


def effective_top_k(top_k: np.ndarray, vocabulary: int) -> np.ndarray:
    """Return the numbers of tokens to keep [R], int64; 0 where all are kept."""
    return np.where((top_k > 0) & (top_k < vocabulary), top_k, 0).astype(np.int64)


def least_scores(min_p: np.ndarray) -> np.ndarray:
    """Return the scores [R], float32, of tokens that are `min_p` times as likely as the likeliest."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.log(min_p.astype(np.float64)).astype(np.float32))
