"""Environment variables: an empty one is the same as an unset one.

Service files and Compose pass `NAME=` where nothing is configured. Libraries differ in what they make of it:
OpenSSL finds no certificates with an empty SSL_CERT_FILE, and the client of the Hugging Face hub writes its
cache into the working directory with an empty HF_HOME. So such variables are removed before anything reads
them, and models' processes do not get them either.
"""

import os
from collections.abc import MutableMapping

# Not CUDA_VISIBLE_DEVICES, which hides all devices if it is empty, and nothing that Fairlead does not use.
_PREFIXES = ("FAIRLEAD_", "HF_", "HUGGING_FACE_", "KUBERNETES_", "OTEL_")
_NAMES = frozenset(
    (
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
        *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "XDG_CACHE_HOME"),
        *("NOTIFY_SOCKET", "NO_COLOR", "CC"),
    )
)


def remove_empty(environment: MutableMapping[str, str] = os.environ) -> None:
    """Remove the empty variables that Fairlead and its libraries read."""
    for name, text in list(environment.items()):
        if not text and (name.startswith(_PREFIXES) or name.upper() in _NAMES):
            del environment[name]
