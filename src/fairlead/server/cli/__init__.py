"""The command line. It is fast to import: a command imports what it needs when it runs."""

from fairlead.server.cli.program import main

__all__ = ["main"]
