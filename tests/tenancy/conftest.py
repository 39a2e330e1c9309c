"""The fixtures of the HTTP API, through which quotas are also tested."""

from api.conftest import chat, client, client_with, log, model

__all__ = ["chat", "client", "client_with", "log", "model"]
