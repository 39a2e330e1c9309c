"""The networks: one file per architecture, over shared layers."""
