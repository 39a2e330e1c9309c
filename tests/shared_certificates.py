"""Makes all httpx clients of a process share one TLS context.

To read the certificate authorities takes 26 ms, which each new client would do. Tests connect without TLS, or
give a context of their own.
"""

from functools import cache
from typing import Any

from httpx._transports import default

_create_ssl_context = default.create_ssl_context
_usual_context = cache(_create_ssl_context)


def _shared_context(verify: Any = True, cert: Any = None, trust_env: bool = True) -> Any:
    if verify is True and cert is None:
        return _usual_context(trust_env=trust_env)
    return _create_ssl_context(verify=verify, cert=cert, trust_env=trust_env)


def install() -> None:
    """Share the context from now on."""
    default.create_ssl_context = _shared_context
