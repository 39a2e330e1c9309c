"""The headers with which llm-d's gateway names a request's tenant, priority and deadline.

They are read only from trusted callers: those with a trusted key, and addresses that the configuration lists.
From all others they are ignored, or any client could be another tenant or skip the queue.
"""

import ipaddress
import re
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from fairlead.base.config import ApiKey, FlowControlConfig
from fairlead.base.errors import InvalidRequest, quoted

# The newest name of each kind comes first, and takes precedence.
FAIRNESS_HEADERS = ("x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id")
OBJECTIVE_HEADERS = ("x-llm-d-inference-objective", "x-gateway-inference-objective")
DEADLINE_HEADERS = ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms")
MAX_NAME_LENGTH = 256
ADDRESS_CACHE_SIZE = 1024

_NAMES = frozenset((*FAIRNESS_HEADERS, *OBJECTIVE_HEADERS, *DEADLINE_HEADERS))
_NAME = re.compile(r"[!-~]([ -~]*[!-~])?")
_MILLISECONDS = re.compile(r"[0-9]{1,10}(\.[0-9]{1,6})?", re.ASCII)

HeaderPairs = Iterable[tuple[bytes, bytes]]


class FlowHints(NamedTuple):
    """What a trusted caller states about a request; None: not stated.

    `fairness_id` names the tenant, `priority` the priority class. `wait_limit_s` is how long it may wait.
    """

    fairness_id: str | None = None
    priority: str | None = None
    wait_limit_s: float | None = None


NO_HINTS = FlowHints()


class FlowControl:
    """Reads the headers. `classes` are the names of the priority classes."""

    def __init__(self, config: FlowControlConfig, classes: Iterable[str]) -> None:
        self._networks = tuple(map(ipaddress.ip_network, config.trusted_addresses))
        self._classes = {name: name for name in classes} | config.objectives
        self._is_trusted = lru_cache(ADDRESS_CACHE_SIZE)(self._is_in_networks)

    def hints(self, api_key: ApiKey | None, address: str | None, headers: HeaderPairs) -> FlowHints:
        """Return the hints of a request. `headers` are all its headers, with names in lower case.

        Raises `InvalidRequest` for a header that is given twice or has an invalid value.
        """
        if not (api_key is not None and api_key.trusted) and not self._is_trusted(address):
            return NO_HINTS
        found: dict[str, str] = {}
        for raw, value in headers:
            name = raw.decode("latin-1")
            if name in _NAMES:
                if name in found:
                    raise InvalidRequest(f"{name}: must not be given twice", param=name)
                found[name] = value.decode("latin-1")
        if not found:
            return NO_HINTS
        objective = _named(found, OBJECTIVE_HEADERS)
        return FlowHints(
            fairness_id=_named(found, FAIRNESS_HEADERS),
            priority=None if objective is None else self._classes.get(objective),
            wait_limit_s=_seconds(found),
        )

    def _is_in_networks(self, address: str | None) -> bool:
        try:
            parsed = ipaddress.ip_address(address or "")
        except ValueError:
            return False
        if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is not None:
            parsed = parsed.ipv4_mapped
        return any(parsed in network for network in self._networks)


def _named(found: dict[str, str], names: tuple[str, ...]) -> str | None:
    """Return the value of the first of the headers that is present and not empty."""
    result = None
    for name in reversed(names):
        if value := found.get(name):
            if len(value) > MAX_NAME_LENGTH or _NAME.fullmatch(value) is None:
                raise InvalidRequest(
                    f"{name}: must be 1 to {MAX_NAME_LENGTH} printable characters of ASCII", param=name
                )
            result = value
    return result


def _seconds(found: dict[str, str]) -> float | None:
    """Return the deadline in seconds; None if it is absent or 0."""
    result = None
    for name in reversed(DEADLINE_HEADERS):
        if value := found.get(name):
            if _MILLISECONDS.fullmatch(value) is None:
                raise InvalidRequest(f"{name}: must be milliseconds, not {quoted(value)}", param=name)
            result = float(value) / 1000 or None
    return result
