"""The command line. Importing it is cheap: a command imports what it needs when it runs."""

from fairlead.cli.program import main

__all__ = ["main"]
