"""The names of tenants in logs, metrics and traces.

A tenant is a user's name or a client's address. Unless the configuration has `tenantNames: plain`, it is
shown as a keyed hash. From a hash without a key, an address could be found by hashing all addresses.
"""

import hashlib
import secrets
from functools import lru_cache

from fairlead.base.config import Config
from fairlead.base.errors import printable

HASH_BYTES = 6
CACHE_SIZE = 4096


_KEY_OF_THIS_RUN = secrets.token_bytes(32)


class TenantNames:
    """Maps tenants to shown names, which stay the same as long as the server runs.

    With API keys they also stay the same after a restart, because the hash is keyed with the API keys.
    """

    def __init__(self, config: Config) -> None:
        keys = "\0".join(sorted(api_key.key or api_key.hash for api_key in config.api_keys))
        self._key = hashlib.blake2b(keys.encode()).digest() if keys else _KEY_OF_THIS_RUN
        self._shown = lru_cache(CACHE_SIZE)(printable if config.tenant_names == "plain" else self._hashed)

    def shown(self, tenant: str) -> str:
        """Return the shown name, without characters that could end a line or control a terminal."""
        return self._shown(tenant)

    def _hashed(self, tenant: str) -> str:
        encoded = tenant.encode(errors="surrogatepass")
        return hashlib.blake2b(encoded, key=self._key, digest_size=HASH_BYTES).hexdigest()
