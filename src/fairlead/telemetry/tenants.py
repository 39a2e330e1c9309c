"""The names of tenants in logs, metrics and traces.

A tenant is a user's name or a client's address. Unless the configuration says `tenantNames: plain`, it is
shown as a keyed hash. Without the key, an address could be found by hashing all of them.
"""

import hashlib
import secrets
from functools import lru_cache

from fairlead.config import Config

HASH_BYTES = 6
REMEMBERED = 4096


class TenantNames:
    """Maps tenants to shown names, each to the same one as long as the server runs.

    With API keys the names also survive restarts, because the hash is keyed with them.
    """

    def __init__(self, config: Config) -> None:
        keys = "\0".join(sorted(api_key.key for api_key in config.api_keys))
        self._key = hashlib.blake2b(keys.encode()).digest() if keys else secrets.token_bytes(32)
        self._shown = lru_cache(REMEMBERED)(self._plain if config.tenant_names == "plain" else self._hashed)

    def shown(self, tenant: str) -> str:
        """Return the shown name. It has no characters that could end a line or control a terminal."""
        return self._shown(tenant)

    def _hashed(self, tenant: str) -> str:
        encoded = tenant.encode(errors="surrogatepass")
        return hashlib.blake2b(encoded, key=self._key, digest_size=HASH_BYTES).hexdigest()

    def _plain(self, tenant: str) -> str:
        return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in tenant)
