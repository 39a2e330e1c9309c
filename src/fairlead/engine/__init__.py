"""Continuous batching over a paged KV cache. Works on token ids, not on text."""
