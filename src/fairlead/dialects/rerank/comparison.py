"""What the routes that compare texts share: their limits, and the scores of an answer's pairs.

An embedding model makes a vector of each text, and a score is the cosine of two. A model that scores pairs
makes one number of each pair.
"""

import math
from collections.abc import Iterator, Sequence
from operator import mul

from fairlead.base.job import Delta
from fairlead.dialects.body import invalid_field
from fairlead.dialects.dialect import AnswerContext
from fairlead.dialects.openai.embeddings import MAX_INPUTS, numbers_of


def check_texts(field: str, texts: Sequence[str]) -> None:
    """Raise `InvalidRequest` of `field` for no texts, too many, or an empty one."""
    if not texts:
        raise invalid_field(field, "is empty")
    if len(texts) > MAX_INPUTS:
        raise invalid_field(field, f"{len(texts)} texts are too many: a request may have {MAX_INPUTS}")
    if "" in texts:
        raise invalid_field(field, "has an empty text")


def scores_of(context: AnswerContext, firsts: int, deltas: Sequence[Delta]) -> Iterator[float]:
    """Yield the score of each pair; `firsts`: how many first texts the request has, one or one for each pair.

    Raises `NodeFailed` for a vector of another length than the model's.
    """
    model = context.own_model
    if model.scoring is not None:
        for delta in deltas:
            (number,) = numbers_of(delta.vector, 1)
            yield model.scoring.score(number)
        return
    assert model.embedding is not None
    width = model.embedding.width
    first = numbers_of(deltas[0].vector, width)
    for index, delta in enumerate(deltas[firsts:]):
        if firsts > 1:
            first = numbers_of(deltas[index].vector, width)
        yield _cosine(first, numbers_of(delta.vector, width))


def _cosine(first: tuple[float, ...], second: tuple[float, ...]) -> float:
    """Return the cosine of the angle between two vectors; 0 if one has no direction."""
    length = math.hypot(*first) * math.hypot(*second)
    # Rounding must not lead to more than 1.
    return max(-1.0, min(1.0, sum(map(mul, first, second)) / length)) if length else 0.0
