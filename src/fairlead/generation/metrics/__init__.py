"""Snapshots, metrics, logs and traces of the server."""
