"""Eviction policies: which models are unloaded so that another can be loaded. Pure."""
