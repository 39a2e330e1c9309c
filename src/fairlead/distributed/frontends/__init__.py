"""The dispatcher and its fronts as separate processes: the messages between them, and both ends."""
