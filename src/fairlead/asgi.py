"""The server as an ASGI application, under the name that people give other servers: `fairlead.asgi:app`."""

from fairlead.server.asgi import app, create_app

__all__ = ["app", "create_app"]
