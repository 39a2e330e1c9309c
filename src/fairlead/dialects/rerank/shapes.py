"""Responses about pairs of texts, as in `dialects/shapes.py`."""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from fairlead.dialects.shapes import PromptUsage


class ScoredText(msgspec.Struct, frozen=True):
    """A document of a request."""

    text: str


class RankedDocument(msgspec.Struct, frozen=True):
    """A document's relevance: for embedding models a cosine, else a score that depends on the model.

    `index` is its place in the request. `document` is absent with `return_documents: false`.
    """

    index: int
    relevance_score: float
    document: ScoredText | UnsetType = UNSET


class Ranking(msgspec.Struct, frozen=True):
    """A ranking.

    id: The job's id.
    model: The model that compared the texts.
    results: The documents, the most relevant one first.
    usage: Token counts of all texts.
    """

    id: str
    model: str
    results: list[RankedDocument]
    usage: PromptUsage


class PairScore(msgspec.Struct, frozen=True):
    """The score of one pair of texts: for embedding models a cosine, else one that depends on the model."""

    index: int
    object: Literal["score"]
    score: float


class ScoreList(msgspec.Struct, frozen=True):
    """Scores.

    id: The job's id.
    object: The kind of this object.
    created: Its time, in seconds since 1970.
    model: The model that compared the texts.
    data: The scores, in the order of the pairs.
    usage: Token counts of all texts.
    """

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[PairScore]
    usage: PromptUsage
