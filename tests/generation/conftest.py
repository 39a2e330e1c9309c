"""What the tests of the generation share with those of the routes."""

from server.routes.conftest import model

__all__ = ["model"]
