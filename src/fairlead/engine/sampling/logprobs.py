"""Log-probabilities of tokens, from rows of logits. Imports torch only for logits that are its tensors."""

import numpy as np

from fairlead.engine.arrays import Array

LEAST_LOGPROB = -9999.0
"""Reported for −inf, which JSON cannot express."""

_LARGEST = np.finfo(np.float32).max
_RUN = 128  # tokens of which the highest is found at once


def log_probabilities(logits: Array, ids: Array, most: int) -> tuple[Array, Array, Array, Array]:
    """Return columns for each row of `logits` [R, V], float32, which may be overwritten.

    Returns the log-probabilities of `ids` [R] and their ranks, where 1 is the likeliest: [R] each; and the
    `most` largest log-probabilities with their ids, descending: [R, min(most, V)] each. A row with a NaN has
    NaN for the first.
    """
    if not isinstance(logits, np.ndarray):
        from fairlead.engine.sampling import torch_sampler

        return torch_sampler.log_probabilities(logits, ids, most)
    rows, most = len(logits), min(most, logits.shape[1])
    chosen, ranks = np.empty(rows, np.float32), np.empty(rows, np.int64)
    top, top_ids = np.empty((rows, most), np.float32), np.empty((rows, most), np.int64)
    for row, (values, token) in enumerate(zip(logits, ids.tolist(), strict=True)):
        with np.errstate(all="ignore"):  # NaN and infinite logits are results, not errors
            np.minimum(values, _LARGEST, out=values)
            highest = values.max()
            total = highest + np.float32(np.log(np.exp(values - highest).sum(dtype=np.float64)))
            best = find_highest(values, most)
            chosen[row] = values[token] - total
            ranks[row] = np.count_nonzero(values >= values[token])
            top[row], top_ids[row] = values[best] - total, best
    return chosen, ranks, top, top_ids


def find_highest(values: np.ndarray, count: int) -> np.ndarray:
    """Return the indices of the `count` highest of `values` [V], descending; equal ones in their order.

    The highest of each run of tokens bound the result: as many values as runs are at least the lowest of
    them. With `count` = 2 and runs of 3, [5 1 2 | 9 8 0 | 4 4 3] has the highest 5, 9, 4; the second of these
    is 5, and only 5, 9 and 8 are compared.
    """
    if count == 0:
        return np.empty(0, np.int64)
    runs = len(values) // _RUN
    if runs >= count:
        highest = values[: runs * _RUN].reshape(runs, _RUN).max(1)
        bound = np.partition(highest, runs - count)[runs - count]
        candidates = np.flatnonzero(values >= bound)
    else:
        candidates = np.arange(len(values))
    if len(candidates) < count:  # a NaN is neither above nor below a bound
        return np.arange(count)
    order = np.argsort(-values[candidates], kind="stable")[:count]
    return candidates[order]
