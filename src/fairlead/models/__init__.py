"""The networks: one file an architecture, over shared layers."""
