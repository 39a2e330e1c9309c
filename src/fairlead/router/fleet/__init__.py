"""All models and nodes of this server: loads, evictions, membership, status, reloading."""
