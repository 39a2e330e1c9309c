"""The command line. It is fast to import: a command imports what it needs when it runs."""

from fairlead.cli.program import main

__all__ = ["main"]
