"""Clients of models that compare texts: one that makes embeddings, and one that scores pairs."""

import dataclasses
import struct

from fairlead.base.job import Delta
from fairlead.language.text.embedding import EmbeddingSettings
from fairlead.language.text.scoring import ScoringSettings
from server.routes.conftest import client_of

RERANK, RERANK_2, SCORE = "/v1/rerank", "/v2/rerank", "/v1/score"
# By text: its vector. The first one is the query's.
VECTORS = {"q": [3.0, 4.0], "same": [0.6, 0.8], "half": [4.0, 3.0], "none": [4.0, -3.0], "less": [-3.0, -4.0]}
COSINES = {"same": 1.0, "half": 0.96, "none": 0.0, "less": -1.0}
ASK = {"model": "small", "query": "q", "documents": ["none", "same", "less", "half"]}


def embedder_client(model, *keys, **services):
    """Return a client of a model with the vectors VECTORS."""
    embedder = dataclasses.replace(model, embedding=EmbeddingSettings(2, normalized=False))
    texts = {tuple(model.encode_prompt(text)): vector for text, vector in VECTORS.items()}

    def script(job):
        """Return the vectors, the last text's first."""
        vectors = [texts.get(tuple(ids), [1.0, 0.0]) for ids in job.prompts]
        return [
            [Delta(index, finish_reason="stop", vector=struct.pack("<2f", *vectors[index]))]
            for index in reversed(range(job.sequences))
        ]

    return client_of(embedder, *keys, gateway_script=script, **services)


def scorer_client(model):
    """Return a client of a model that scores a pair by the number of its tokens."""
    return client_of(
        dataclasses.replace(model, scoring=ScoringSettings(uses_template=False, is_probability=True)),
        gateway_script=lambda job: [
            [Delta(index, finish_reason="stop", vector=struct.pack("<f", len(ids)))]
            for index, ids in enumerate(job.prompts)
        ],
    )
