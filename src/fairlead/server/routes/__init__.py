"""The HTTP server: the only package with its routes and formats."""
