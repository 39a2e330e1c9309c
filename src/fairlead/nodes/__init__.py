"""Nodes, which generate answers: the engine, started commands and remote servers behind one protocol."""
