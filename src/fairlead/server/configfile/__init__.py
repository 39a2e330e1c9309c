"""Reads a configuration file into a `Config`: YAML, types, and llama-swap's spellings."""

from fairlead.server.configfile.read import ConfigFileError, Reading, read_config

__all__ = ["ConfigFileError", "Reading", "read_config"]
