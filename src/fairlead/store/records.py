"""What the store keeps: values without behaviour. Amounts of money are whole billionths of the currency.

Usage is counted by hour, and for some days also by minute. A job belongs to the time at which it ended.
"""

from collections.abc import Iterable
from operator import add

import msgspec
from msgspec.structs import astuple

from fairlead.base.config import ApiKey, Budget, KeyLimits, Role

HOUR_S, MINUTE_S = 3600, 60
NANO = 1_000_000_000
"""Billionths in one unit of the currency."""
NO_MINUTE = -1


class UsageKey(msgspec.Struct, frozen=True, array_like=True, order=True):
    """What is counted apart.

    hour: its first second, since 1970.
    key: the API key's id; "": none.
    user: the user, as tenant; "": the key has none, or there is no key.
    team: the key's team; "": none.
    model: the model's name.
    route: the path of the route; of one with parameters, the part before them.
    outcome: success, client_left, or an error's code.
    batch: it was a line of a batch.
    minute: that of the hour, from 0; `NO_MINUTE`: it is counted by the hour only.
    """

    hour: int
    key: str = ""
    user: str = ""
    team: str = ""
    model: str = ""
    route: str = ""
    outcome: str = ""
    batch: bool = False
    minute: int = NO_MINUTE

    @property
    def at(self) -> int:
        """The first second of its minute, or of its hour."""
        return self.hour + MINUTE_S * max(0, self.minute)


class UsageCounts(msgspec.Struct, frozen=True, array_like=True):
    """Sums over jobs.

    requests: how many jobs.
    prompt_tokens: tokens of prompts whose answers have begun.
    cached_tokens: how many of these were cached.
    generated_tokens: tokens of answers.
    seat_ms: milliseconds for which seats were held, all seats together.
    wait_ms: milliseconds for which jobs waited for their first seats.
    cost_nano: the price, in billionths of the currency.
    budget_tokens: how many tokens count for budgets of tokens.
    """

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    seat_ms: int = 0
    wait_ms: int = 0
    cost_nano: int = 0
    budget_tokens: int = 0

    def __add__(self, other: "UsageCounts") -> "UsageCounts":
        """Return the sums."""
        return UsageCounts(*map(add, astuple(self), astuple(other)))


UsageRow = tuple[UsageKey, UsageCounts]


class UsageBatch(msgspec.Struct, frozen=True, array_like=True):
    """Counts to be written once. A writer numbers its batches from 1, and sends them in order.

    writer: unique to one run of a process.
    number: higher than all before of the writer.
    rows: what to add; each key occurs once.
    """

    writer: str
    number: int
    rows: tuple[UsageRow, ...]


class Spent(msgspec.Struct, frozen=True, array_like=True):
    """What a key, user or team has spent in a period.

    period: a day, 2026-11-28, or a month, 2026-11, in UTC.
    subject: `key:ID`, `user:NAME` or `team:NAME`.
    tokens: those that count for budgets.
    cost_nano: in billionths of the currency.
    """

    period: str
    subject: str
    tokens: int
    cost_nano: int


class UsageQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which usage to return, and in which sums.

    start: the first second of the first bucket.
    end: the second after the last bucket.
    width_s: the seconds of a bucket: a multiple of an hour, or of a minute where minutes are kept.
    group_by: the fields of `UsageKey` that are kept apart; all others are summed up.
    filters: by field, the values that count; a field without an entry: all.
    own: only rows of this key or this user, whichever matches: (key, user); None: all rows.
    """

    start: int
    end: int
    width_s: int = HOUR_S
    group_by: tuple[str, ...] = ()
    filters: dict[str, tuple[str | int, ...]] = {}
    own: tuple[str, str] | None = None


class Secret(msgspec.Struct, frozen=True):
    """One of the texts that a stored key's clients may send.

    sha256: its SHA-256, in hexadecimal digits. Secrets are made here from 256 random bits, so a slow hash
        would protect nothing.
    shown: its beginning and end, to tell it from others.
    expires_at: in seconds since 1970; None: with the key.
    """

    sha256: str
    shown: str
    expires_at: float | None = None


class StoredKey(msgspec.Struct, frozen=True, kw_only=True):
    """An API key that the store has, without its secrets' texts.

    id: names it in the log, in errors and in the API; see `router.quotas.access.key_id`.
    name: given by the person who has made it.
    secrets: the newest last.
    team: its team, or project in OpenAI's words; "": none.
    created_at: in seconds since 1970.
    expires_at: the same; None: never.
    revoked_at: the same; None: it is valid.
    The other fields are those of `ApiKey`.
    """

    id: str
    name: str
    secrets: tuple[Secret, ...]
    created_at: float
    team: str = ""
    user: str | None = None
    role: Role = "user"
    priority: str | None = None
    models: tuple[str, ...] = ()
    trusted: bool = False
    limits: KeyLimits = KeyLimits()
    budget: Budget = Budget()
    expires_at: float | None = None
    revoked_at: float | None = None

    def is_valid(self, now: float) -> bool:
        """Return whether it is neither revoked nor expired at a time, in seconds since 1970."""
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)

    def api_key(self) -> ApiKey:
        """Return it as the key of its requests. It is the same for all secrets, so they share limits.

        The id of an `ApiKey` follows from its hash, so that is the first secret's.
        """
        return ApiKey(
            hash=f"sha256:{self.secrets[0].sha256}",
            user=self.user,
            team=self.team or None,
            trusted=self.trusted,
            priority=self.priority,
            models=self.models,
            limits=self.limits,
            budget=self.budget,
            role=self.role,
        )


class AddKey(msgspec.Struct, frozen=True, tag="add"):
    """Add a key. It is refused if one of its secrets exists."""

    key: StoredKey


class RotateKey(msgspec.Struct, frozen=True, tag="rotate"):
    """Give a key another secret. The others stay valid until `until`, in seconds since 1970."""

    id: str
    secret: Secret
    until: float


class RevokeKey(msgspec.Struct, frozen=True, tag="revoke"):
    """End a key's validity at a time, in seconds since 1970."""

    id: str
    at: float


KeyChange = AddKey | RotateKey | RevokeKey


class SetBudget(msgspec.Struct, frozen=True):
    """Set the budget of a user or a team.

    subject: `user:NAME` or `team:NAME`.
    budget: replaces the one before; None: the store has none any more.
    """

    subject: str
    budget: Budget | None


class KeySet(msgspec.Struct, frozen=True):
    """All stored keys, and the stored budgets of users and teams. `revision` grows with each change."""

    revision: int = 0
    keys: tuple[StoredKey, ...] = ()
    budgets: dict[str, Budget] = {}

    def with_key(self, key: StoredKey, revision: int) -> "KeySet":
        """Return the set after a change of a key."""
        others = (each for each in self.keys if each.id != key.id)
        return msgspec.structs.replace(self, revision=revision, keys=(*others, key))

    def with_budget(self, change: SetBudget, revision: int) -> "KeySet":
        """Return the set after a change of a budget."""
        budgets = {name: budget for name, budget in self.budgets.items() if name != change.subject}
        if change.budget is not None:
            budgets[change.subject] = change.budget
        return msgspec.structs.replace(self, revision=revision, budgets=budgets)


def changed(key: StoredKey, change: RotateKey | RevokeKey) -> StoredKey:
    """Return a key after a change."""
    if isinstance(change, RevokeKey):
        return msgspec.structs.replace(key, revoked_at=change.at)
    earlier = (
        msgspec.structs.replace(secret, expires_at=min(change.until, secret.expires_at or change.until))
        for secret in key.secrets
    )
    return msgspec.structs.replace(key, secrets=(*earlier, change.secret))


def sums(rows: Iterable[UsageRow]) -> dict[UsageKey, UsageCounts]:
    """Return the sum of the counts of each key."""
    found: dict[UsageKey, UsageCounts] = {}
    for key, counts in rows:
        found[key] = found[key] + counts if key in found else counts
    return found
