"""Sorting documents by their relevance, as in the APIs of Jina, Cohere and vLLM: `POST /v1/rerank`."""

from typing import Annotated, NamedTuple

import msgspec
from msgspec import UNSET, Meta

from fairlead.base.config import Limits
from fairlead.base.job import Delta
from fairlead.dialects.body import BodyParser
from fairlead.dialects.dialect import AnswerContext, Dialect, GenerationRequest, TextPairs
from fairlead.dialects.fields import Count, NonEmpty
from fairlead.dialects.openai.common import (
    OpenAIErrors,
    TruncationFields,
    encode,
    prompt_usage,
    truncation_of,
)
from fairlead.dialects.openai.events import ChunkReader
from fairlead.dialects.rerank.comparison import check_texts, scores_of
from fairlead.dialects.rerank.shapes import RankedDocument, Ranking, ScoredText
from fairlead.dialects.unserved import COMPARISON, capturing, refuse_unserved


class TextDocument(msgspec.Struct, frozen=True):
    """A document in the form of an object, of which only the text is read."""

    text: NonEmpty


class RerankRequest(TruncationFields, frozen=True, kw_only=True):
    """`POST /v1/rerank`.

    query: What the documents are compared with.
    documents: The texts to sort.
    top_n: How many documents to list; 0: all, the default.
    return_documents: List their texts, too, which is the default.
    """

    query: NonEmpty
    documents: Annotated[list[NonEmpty | TextDocument], Meta(extra_json_schema={"minItems": 1})]
    top_n: Count | None = None
    return_documents: bool | None = None


class RerankOptions(NamedTuple):
    """How a ranking is written. `documents` is None if their texts are not listed."""

    top_n: int
    documents: list[str] | None


_parse = BodyParser(capturing(RerankRequest, COMPARISON))


class RerankDialect(OpenAIErrors, Dialect):
    """Reranking, for embedding models and for those that score pairs of texts."""

    path = "/v1/rerank"
    body_type = RerankRequest
    answer_type = Ranking
    refused_fields = COMPARISON
    job_prefix = "rerank"
    reader = ChunkReader()

    def decode(self, body: bytes, limits: Limits) -> GenerationRequest:
        """Return the request in a body."""
        request = _parse(body, limits)
        refuse_unserved(request, COMPARISON)
        documents = [one if isinstance(one, str) else one.text for one in request.documents]
        check_texts("query", [request.query])
        check_texts("documents", documents)
        shown = documents if request.return_documents is not False else None
        return GenerationRequest(
            embed=True,
            truncation=truncation_of(request.truncate_prompt_tokens, request.truncation_side or "right"),
            pairs=TextPairs([request.query], documents, ("query", "documents")),
            options=RerankOptions(request.top_n or len(documents), shown),
        )

    def write_response(self, context: AnswerContext, deltas: list[Delta]) -> bytes:
        """Return the documents, sorted by their scores; those with equal ones keep their order."""
        options, job = context.options, context.job
        scores = list(scores_of(context, 1, deltas))
        ranking = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)[: options.top_n]
        results = [
            RankedDocument(
                index,
                scores[index],
                UNSET if options.documents is None else ScoredText(options.documents[index]),
            )
            for index in ranking
        ]
        return encode(Ranking(job.id, job.model, results, prompt_usage(job)))


class CohereRerankDialect(RerankDialect):
    """The same under the path of Cohere's second version."""

    path = "/v2/rerank"
