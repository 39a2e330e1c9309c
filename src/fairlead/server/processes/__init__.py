"""The composition of each process of a server that has several."""
