"""Reads a configuration file into a `Config`: YAML, types, llama-swap's ways of saying things."""

from fairlead.configfile.read import ConfigFileError, Reading, read_config

__all__ = ["ConfigFileError", "Reading", "read_config"]
