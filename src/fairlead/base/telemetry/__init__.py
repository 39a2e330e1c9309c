"""The log: what is written, and the thread that writes it."""
