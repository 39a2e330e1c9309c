"""A client that sends mutated requests to every route of a running server, and checks its responses."""
