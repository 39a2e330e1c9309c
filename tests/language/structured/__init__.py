"""A package, because a benchmark has the same name."""
