"""The types of responses about pairs of texts, for `/openapi.json`, as in `dialects/shapes.py`."""

from typing import Literal

import msgspec

from fairlead.dialects.shapes import PromptUsage


class ScoredText(msgspec.Struct, frozen=True):
    """A document of a request."""

    text: str


class RankedDocument(msgspec.Struct, frozen=True):
    """A document's relevance: for embedding models a cosine, else a score that depends on the model."""

    index: int
    relevance_score: float
    document: ScoredText | None = None


class Ranking(msgspec.Struct, frozen=True):
    """The documents, the most relevant one first. `index`: the place in the request."""

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
    """The scores, in the order of the pairs."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[PairScore]
    usage: PromptUsage
