"""A model's child process: the frames, and both ends of the connection."""
