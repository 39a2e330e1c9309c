"""The HTTP server: the only package that knows its routes and formats."""
