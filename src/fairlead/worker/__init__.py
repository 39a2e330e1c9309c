"""A model in a child process: the frames, and both ends."""
