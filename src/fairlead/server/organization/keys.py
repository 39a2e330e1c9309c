"""The views of keys in the store: list, make, rotate, revoke. For administrators, without a restart.

A key's value is in the response that makes it, and nowhere else: the store has its hash. The response is sent
when the change is in the store and in force in every front.
"""

import secrets
import time
from hashlib import sha256
from typing import Any

import msgspec
import structlog

from fairlead.base.config import Budget, KeyLimits
from fairlead.base.errors import InvalidRequest, NotFound, NotServed, StoreUnavailable, quoted
from fairlead.base.requester import who
from fairlead.dialects.body import invalid_field
from fairlead.server.organization.schemas import (
    PROJECT,
    CreateAdminKeyRequest,
    CreateKeyRequest,
    DeletedKey,
    KeyList,
    KeyObject,
    RotateKeyRequest,
)
from fairlead.server.routes.request import Request, Response, json_response
from fairlead.server.routes.request_reader import RequestReader
from fairlead.store.records import AddKey, KeyChange, RevokeKey, RotateKey, Secret, StoredKey
from fairlead.store.store import StoreAccess

PAGE = 20
MOST = 100
NO_STORE = "this server keeps no keys and no usage: its configuration has `store: none`"

_create_decoder = msgspec.json.Decoder(CreateKeyRequest)
_create_admin_decoder = msgspec.json.Decoder(CreateAdminKeyRequest)
_rotate_decoder = msgspec.json.Decoder(RotateKeyRequest)

logger = structlog.get_logger("fairlead.server.organization")


def store_of(access: StoreAccess | None) -> StoreAccess:
    """Return the store. Raises `NotServed` if there is none."""
    if access is None:
        raise NotServed(NO_STORE)
    return access


class KeyRoutes:
    """The views of `/v1/organization/api_keys`, `admin_api_keys`, and `projects/{project_id}/api_keys`."""

    def __init__(self, reader: RequestReader) -> None:
        self._reader = reader
        self._services = reader.jobs.services

    # All keys: our own routes ------------------------------------------------------------------------

    async def list_keys(self, request: Request) -> Response:
        """Return all keys that are valid, or those of one project."""
        project = request.query("project_id")
        keys = [key for key in self._valid() if project is None or project_of(key) == project]
        return _page(request, keys)

    async def create_key(self, request: Request) -> Response:
        """Make a key."""
        body = await self._reader.read(request, _create_decoder)
        return await self._create(request, body)

    async def key(self, request: Request) -> Response:
        """Return a key."""
        return json_response(shown(self._find(request)))

    async def rotate_key(self, request: Request) -> Response:
        """Give a key another value; those before it stay valid for some time."""
        body = await self._reader.read(request, _rotate_decoder)
        key = self._find(request)
        value = new_value()
        change = RotateKey(key.id, _secret(value), time.time() + body.overlap_seconds)
        changed = await self._change(request, change, "key rotated")
        return json_response(shown(changed, value))

    async def delete_key(self, request: Request) -> Response:
        """Revoke a key. Its requests that run are not ended."""
        return await self._delete(request, self._find(request))

    # Administrators' keys, in OpenAI's form ----------------------------------------------------------

    async def admin_keys(self, request: Request) -> Response:
        """Return the keys with the role admin."""
        return _page(request, [key for key in self._valid() if key.role == "admin"])

    async def create_admin_key(self, request: Request) -> Response:
        """Make a key with the role admin."""
        body = await self._reader.read(request, _create_admin_decoder)
        given = CreateKeyRequest(name=body.name, expires_in_seconds=body.expires_in_seconds, role="admin")
        return await self._create(request, given)

    async def admin_key(self, request: Request) -> Response:
        """Return a key with the role admin."""
        return json_response(shown(self._find(request, is_admin=True)))

    async def delete_admin_key(self, request: Request) -> Response:
        """Revoke a key with the role admin."""
        return await self._delete(request, self._find(request, is_admin=True))

    # The keys of a project, which is a team, in OpenAI's form ----------------------------------------

    async def project_keys(self, request: Request) -> Response:
        """Return the keys of a project."""
        project = request.path_parameters["project_id"]
        keys = [key for key in self._valid() if project_of(key) == project and key.role != "admin"]
        return _page(request, keys)

    async def project_key(self, request: Request) -> Response:
        """Return a key of a project."""
        return json_response(shown(self._find(request, is_admin=False)))

    async def delete_project_key(self, request: Request) -> Response:
        """Revoke a key of a project."""
        return await self._delete(request, self._find(request, is_admin=False))

    # What they share ---------------------------------------------------------------------------------

    def _valid(self) -> list[StoredKey]:
        """Return the keys that are valid now, the oldest first. Raises `NotServed` and `StoreUnavailable`."""
        keys = store_of(self._services.store).keys
        if keys is None:
            raise StoreUnavailable
        now = time.time()
        return sorted(
            (key for key in keys.keys if key.is_valid(now)), key=lambda key: (key.created_at, key.id)
        )

    def _find(self, request: Request, *, is_admin: bool | None = None) -> StoredKey:
        """Return the key of the path. Raises `NotFound`, also for one of another kind or project."""
        key_id, project = request.path_parameters["key_id"], request.path_parameters.get("project_id")
        for key in self._valid():
            if (
                key.id == key_id
                and is_admin in (None, key.role == "admin")
                and project in (None, project_of(key))
            ):
                return key
        raise NotFound(
            f"there is no valid key {quoted(key_id)} in the store; those of files are changed there"
        )

    async def _create(self, request: Request, body: CreateKeyRequest) -> Response:
        if request.api_key is None:
            raise InvalidRequest(
                "this server has no administrator, so every client may use it: start it with --admin-key, or "
                "give a key in apiKeys `role: admin`, before others are made"
            )
        value = None if body.hash is not None else new_value()
        key = self._new(body, value)
        changed = await self._change(request, AddKey(key), "key added")
        return json_response(shown(changed, value))

    def _new(self, body: CreateKeyRequest, value: str | None) -> StoredKey:
        """Return a key as requested. Raises `InvalidRequest` for settings that contradict each other."""
        classes = self._services.config.queue.classes
        if body.priority is not None and body.priority not in classes:
            raise invalid_field("priority", f"must be one of {', '.join(classes)}")
        if body.hash is not None:
            secret = Secret(body.hash.removeprefix("sha256:"), body.redacted_value or "…")
        elif body.redacted_value is not None or value is None:
            raise invalid_field("redacted_value", "is for keys with a hash")
        else:
            secret = _secret(value)
        now = time.time()
        key = StoredKey(
            id=f"key-{secret.sha256[:16]}",
            name=body.name,
            secrets=(secret,),
            created_at=now,
            team="" if body.project_id in (None, PROJECT) else body.project_id,
            user=body.user,
            role=body.role,
            priority=body.priority,
            models=body.models,
            trusted=body.trusted,
            limits=KeyLimits(body.requests_per_minute, body.tokens_per_minute, body.concurrent),
            budget=Budget(body.tokens_per_day, body.tokens_per_month, body.cost_per_day, body.cost_per_month),
            expires_at=None if body.expires_in_seconds is None else now + body.expires_in_seconds,
        )
        for fault in key.api_key().contradictions():
            raise invalid_field(str(fault.path[0]), fault.message)
        return key

    async def _delete(self, request: Request, key: StoredKey) -> Response:
        await self._change(request, RevokeKey(key.id, time.time()), "key revoked")
        return json_response(DeletedKey(object=f"{_kind(key)}.deleted", id=key.id))

    async def _change(self, request: Request, change: KeyChange, event: str) -> StoredKey:
        key = await store_of(self._services.store).change_key(change)
        logger.info(event, changed_key=key.id, **who(self._reader.requester(request)))
        return key


def new_value() -> str:
    """Return a key that nobody can guess: 256 random bits."""
    return f"fl-{secrets.token_urlsafe(32)}"


def project_of(key: StoredKey) -> str:
    """Return a key's project: its team."""
    return key.team or PROJECT


def shown(key: StoredKey, value: str | None = None) -> KeyObject:
    """Return a key as clients see it; `value` if it has just been made."""
    now = time.time()
    valid = [secret for secret in key.secrets if secret.expires_at is None or now < secret.expires_at]
    created = int(key.created_at)
    owner: dict[str, Any] = {
        "object": "organization.user",
        "id": key.user or key.id,
        "name": key.user or key.name,
        "created_at": created,
        "role": "owner" if key.role == "admin" else "member",
    }
    is_admin = key.role == "admin"
    return KeyObject(
        object="organization.admin_api_key" if is_admin else "organization.project.api_key",
        id=key.id,
        name=key.name,
        redacted_value=key.secrets[-1].shown,
        created_at=created,
        expires_at=None if key.expires_at is None else int(key.expires_at),
        owner={"type": "user", **owner} if is_admin else {"type": "user", "user": owner},
        project_id=project_of(key),
        user=key.user,
        role=key.role,
        priority=key.priority,
        models=key.models,
        trusted=key.trusted,
        **msgspec.structs.asdict(key.limits),
        **msgspec.structs.asdict(key.budget),
        secrets=len(valid),
        value=msgspec.UNSET if value is None else value,
    )


def _kind(key: StoredKey) -> str:
    return "organization.admin_api_key" if key.role == "admin" else "organization.project.api_key"


def _secret(value: str) -> Secret:
    return Secret(sha256(value.encode()).hexdigest(), f"{value[:6]}…{value[-4:]}")


def _page(request: Request, keys: list[StoredKey]) -> Response:
    """Return the page of keys that `after`, `limit` and `order` mean."""
    limit, order, after = request.query("limit") or str(PAGE), request.query("order"), request.query("after")
    if not (limit.isascii() and limit.isdecimal() and 1 <= int(limit) <= MOST):
        raise invalid_field("limit", f"must be a number from 1 to {MOST}")
    if order not in (None, "asc", "desc"):
        raise invalid_field("order", "must be asc or desc")
    if order == "desc":
        keys.reverse()
    if after is not None:
        at = next((index for index, key in enumerate(keys) if key.id == after), None)
        if at is None:
            raise invalid_field("after", f"there is no key {quoted(after)} in this list")
        keys = keys[at + 1 :]
    data = [shown(key) for key in keys[: int(limit)]]
    return json_response(
        KeyList(
            data=data,
            first_id=data[0].id if data else None,
            last_id=data[-1].id if data else None,
            has_more=len(keys) > len(data),
        )
    )
