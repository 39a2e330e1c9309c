"""Continuous batching over a paged KV cache. Knows tokens, not text."""
