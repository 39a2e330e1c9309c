"""Who has requested a change of models, nodes or jobs: a value for log lines, which crosses processes."""

import msgspec


class Requester(msgspec.Struct, frozen=True):
    """Who sends a request.

    `tenant`: the tenant that it counts for, as logs show it (see `telemetry.tenants`).
    `key`: the key's id (see `tenancy.access.key_id`); "" without keys.
    `request_id`: the request's own.
    `owner`: whose jobs it may end: of a trusted key, those of one user (see `tenancy.access.requester_of`).
    """

    tenant: str
    key: str = ""
    request_id: str = ""
    owner: str = ""


def who(by: Requester | None) -> dict[str, str]:
    """Return the fields of a log line that name the requester; none for the server's own decisions."""
    return {} if by is None else {"tenant": by.tenant, "key": by.key, "request_id": by.request_id}
