"""Settings of Python, of its garbage collector and of the environment; lines of child processes."""
