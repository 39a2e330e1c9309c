"""The bodies and answers of the routes under `/v1/organization`, in OpenAI's forms with further members."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from fairlead.base.config import Role
from fairlead.base.config.store import Money

Name = Annotated[str, Meta(min_length=1, max_length=200)]
Count = Annotated[int, Meta(ge=1, le=2**53)]
Period = Annotated[int, Meta(ge=1, le=100 * 366 * 86_400)]
PROJECT = "default"
"""The project of keys without a team, in OpenAI's routes."""


class CreateKeyRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/organization/api_keys`. The fields after `hash` are those of `apiKeys` in a configuration."""

    name: Name
    project_id: Name | None = None
    expires_in_seconds: Period | None = None
    hash: Annotated[str, Meta(pattern="^sha256:[0-9a-f]{64}$")] | None = None
    """Of a key that exists elsewhere, instead of a new one."""
    redacted_value: Annotated[str, Meta(max_length=100)] | None = None
    user: Name | None = None
    role: Role = "user"
    priority: str | None = None
    models: tuple[Name, ...] = ()
    trusted: bool = False
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    concurrent: Count | None = None
    tokens_per_day: Count | None = None
    tokens_per_month: Count | None = None
    cost_per_day: Money | None = None
    cost_per_month: Money | None = None


class CreateAdminKeyRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/organization/admin_api_keys`."""

    name: Name
    expires_in_seconds: Period | None = None


class RotateKeyRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/organization/api_keys/{key_id}/rotate`."""

    overlap_seconds: Annotated[int, Meta(ge=0, le=366 * 86_400)] = 86_400
    """How long the key's earlier values stay valid."""


class KeyObject(msgspec.Struct, frozen=True, kw_only=True):
    """An API key. `value` is there only when it was made: the server keeps a hash of it.

    Times are in seconds since 1970. `last_used_at` is always null: uses are counted by the hour, in usage.
    """

    object: Literal["organization.admin_api_key", "organization.project.api_key"]
    id: str
    name: str
    redacted_value: str
    created_at: int
    expires_at: int | None
    last_used_at: None = None
    owner: dict[str, Any]
    project_id: str
    user: str | None
    role: Role
    priority: str | None
    models: tuple[str, ...]
    trusted: bool
    requests_per_minute: int | None
    tokens_per_minute: int | None
    concurrent: int | None
    tokens_per_day: int | None
    tokens_per_month: int | None
    cost_per_day: float | None
    cost_per_month: float | None
    secrets: int
    """How many of its values are valid: more than 1 after it was rotated."""
    value: str | UnsetType = UNSET


class KeyList(msgspec.Struct, frozen=True, kw_only=True):
    """A page of keys, the newest last."""

    object: Literal["list"] = "list"
    data: list[KeyObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedKey(msgspec.Struct, frozen=True, kw_only=True):
    """A key that was revoked."""

    object: str
    id: str
    deleted: bool = True


class UsageBucket(msgspec.Struct, frozen=True, kw_only=True):
    """A span of time, in seconds since 1970, and what was counted in it."""

    object: Literal["bucket"] = "bucket"
    start_time: int
    end_time: int
    results: list[dict[str, Any]]


class UsagePage(msgspec.Struct, frozen=True, kw_only=True):
    """A page of buckets."""

    object: Literal["page"] = "page"
    data: list[UsageBucket]
    has_more: bool
    next_page: str | None


class SetBudgetRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/organization/budgets`: of a user or of a team. What is not given is not limited."""

    user: Name | None = None
    team: Name | None = None
    tokens_per_day: Count | None = None
    tokens_per_month: Count | None = None
    cost_per_day: Money | None = None
    cost_per_month: Money | None = None


class BudgetUseObject(msgspec.Struct, frozen=True, kw_only=True):
    """A limit of a budget, and what is used of it.

    kind: What is limited.
    limit: The limit.
    used: What is spent of it, and what running requests have reserved. It may exceed the limit.
    renews_at: When nothing of it is used again, in seconds since 1970.
    """

    kind: Literal["tokens_per_day", "tokens_per_month", "cost_per_day", "cost_per_month"]
    limit: float
    used: float
    renews_at: int


class BudgetObject(msgspec.Struct, frozen=True, kw_only=True):
    """The budget of a user, a team or a key, and what is used of it.

    source: Where it is set; `file` is the configuration. That of a key is where the key is.
    api_key_name: The name of a key in the store, or the user of another key.
    """

    object: Literal["organization.budget"] = "organization.budget"
    id: str
    user: str | None
    team: str | None
    api_key_id: str | None
    api_key_name: str | None
    source: Literal["file", "store"]
    tokens_per_day: int | None
    tokens_per_month: int | None
    cost_per_day: float | None
    cost_per_month: float | None
    uses: tuple[BudgetUseObject, ...]


class BudgetList(msgspec.Struct, frozen=True, kw_only=True):
    """All budgets of users, teams and keys."""

    object: Literal["list"] = "list"
    data: list[BudgetObject]


class DeletedBudget(msgspec.Struct, frozen=True, kw_only=True):
    """A budget that was removed from the store. That of the configuration is in force, if there is one."""

    object: Literal["organization.budget.deleted"] = "organization.budget.deleted"
    id: str
    deleted: bool = True


class SetSpendLimitRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/organization/projects/{project_id}/spend_limit`: cents in a month."""

    currency: Literal["USD"]
    interval: Literal["month"]
    threshold_amount: Annotated[int, Meta(ge=1, le=10**11)]


class SpendLimitEnforcement(msgspec.Struct, frozen=True):
    """Whether the limit is reached: `enforcing`."""

    status: Literal["inactive", "enforcing"]


class SpendLimit(msgspec.Struct, frozen=True, kw_only=True):
    """What a project may spend in a month, in cents of the currency of prices."""

    object: Literal["project.spend_limit"] = "project.spend_limit"
    currency: Literal["USD"] = "USD"
    interval: Literal["month"] = "month"
    threshold_amount: int
    enforcement: SpendLimitEnforcement


class DeletedSpendLimit(msgspec.Struct, frozen=True, kw_only=True):
    """A spend limit that was removed."""

    object: Literal["project.spend_limit.deleted"] = "project.spend_limit.deleted"
    deleted: bool = True
