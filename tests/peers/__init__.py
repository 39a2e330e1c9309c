"""A package, because `bench/peers.py` has the same name."""
