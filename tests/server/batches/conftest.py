"""Fixtures of the tests of batches: those of the routes."""

from server.routes.conftest import client_with, model

__all__ = ["client_with", "model"]
