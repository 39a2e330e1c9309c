"""A server of several processes: the supervisor, which people start, and its children of each role."""
