"""Formats of bytes and headers, read and written without I/O."""
