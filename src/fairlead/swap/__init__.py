"""Eviction policies: which models are unloaded for which. Pure."""
