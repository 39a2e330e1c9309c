"""Scores of pairs of texts, as in vLLM's API: `POST /v1/score`."""

from typing import Annotated

from msgspec import Meta

from fairlead.base.config import Limits
from fairlead.base.job import Delta
from fairlead.dialects.body import BodyParser, invalid_field
from fairlead.dialects.dialect import AnswerContext, Dialect, GenerationRequest, TextPairs
from fairlead.dialects.fields import TEXT_OR_TEXTS, NonEmpty, describe_alternatives
from fairlead.dialects.openai.common import (
    OpenAIErrors,
    TruncationFields,
    encode,
    prompt_usage,
    truncation_of,
)
from fairlead.dialects.openai.events import ChunkReader
from fairlead.dialects.rerank.comparison import check_texts, scores_of
from fairlead.dialects.rerank.shapes import PairScore, ScoreList
from fairlead.dialects.unserved import COMPARISON, capturing, refuse_unserved

TextOrTexts = NonEmpty | Annotated[list[NonEmpty], Meta(extra_json_schema={"minItems": 1})]
_NAMES = (("text_1", "text_2"), ("queries", "documents"))


class ScoreRequest(TruncationFields, frozen=True, kw_only=True):
    """`POST /v1/score`. One text is compared with each of several, or each text with the one at its place.

    text_1: The first texts.
    text_2: The second texts.
    queries: Another name for the first texts.
    documents: Another name for the second texts.
    """

    text_1: TextOrTexts | None = None
    text_2: TextOrTexts | None = None
    queries: TextOrTexts | None = None
    documents: TextOrTexts | None = None


_parse = BodyParser(capturing(ScoreRequest, COMPARISON))


class ScoreDialect(OpenAIErrors, Dialect):
    """Scores, for embedding models and for those that score pairs. `options`: the number of first texts."""

    path = "/v1/score"
    body_type = describe_alternatives(
        ScoreRequest,
        {"text_1": TEXT_OR_TEXTS, "text_2": TEXT_OR_TEXTS},
        {"queries": TEXT_OR_TEXTS, "documents": TEXT_OR_TEXTS},
    )
    answer_type = ScoreList
    refused_fields = COMPARISON
    job_prefix = "score"
    reader = ChunkReader()

    def decode(self, body: bytes, limits: Limits) -> GenerationRequest:
        """Return the request in a body."""
        request = _parse(body, limits)
        refuse_unserved(request, COMPARISON)
        pairs = _pairs_of(request)
        return GenerationRequest(
            embed=True,
            pairs=pairs,
            truncation=truncation_of(request.truncate_prompt_tokens, request.truncation_side or "right"),
            options=len(pairs.firsts),
        )

    def write_response(self, context: AnswerContext, deltas: list[Delta]) -> bytes:
        """Return the scores in the order of the pairs."""
        job = context.job
        scores = enumerate(scores_of(context, context.options, deltas))
        data = [PairScore(index, "score", score) for index, score in scores]
        return encode(ScoreList(job.id, "list", context.created, job.model, data, prompt_usage(job)))


def _pairs_of(request: ScoreRequest) -> TextPairs:
    """Return the texts, under either pair of names. Raises `InvalidRequest`."""
    given = {
        name: value for names in _NAMES for name in names if (value := getattr(request, name)) is not None
    }
    names = _NAMES[1] if not given.keys().isdisjoint(_NAMES[1]) else _NAMES[0]
    if others := given.keys() - set(names):
        raise invalid_field(min(others), f"cannot be combined with {names[0]} and {names[1]}")
    for name in names:
        if name not in given:
            raise invalid_field(name, "is missing")
    texts = [[given[name]] if isinstance(given[name], str) else given[name] for name in names]
    for name, listed in zip(names, texts, strict=True):
        check_texts(name, listed)
    firsts, seconds = texts
    if len(firsts) not in (1, len(seconds)):
        reason = f"must have one text, or as many as {names[1]}: {len(firsts)} and {len(seconds)}"
        raise invalid_field(names[0], reason)
    return TextPairs(firsts, seconds, names)
