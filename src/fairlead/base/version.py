"""The installed version, read once: each call of `importlib.metadata.version` reads a file."""

from importlib.metadata import version

VERSION = version("fairlead")
