"""Comparison of texts: reranking and scoring."""
