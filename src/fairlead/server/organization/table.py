"""The rows of the route table for keys, budgets and usage."""

from functools import partial

from fairlead.server.organization.budgets import BudgetRoutes
from fairlead.server.organization.keys import KeyRoutes
from fairlead.server.organization.schemas import (
    BudgetList,
    BudgetObject,
    CreateAdminKeyRequest,
    CreateKeyRequest,
    DeletedBudget,
    DeletedKey,
    DeletedSpendLimit,
    KeyList,
    KeyObject,
    RotateKeyRequest,
    SetBudgetRequest,
    SetSpendLimitRequest,
    SpendLimit,
    UsagePage,
)
from fairlead.server.organization.usage import UsageRoutes
from fairlead.server.routes.route import Permission, Route, group

_KEYS = "/v1/organization/api_keys"
_ADMIN_KEYS = "/v1/organization/admin_api_keys"
_PROJECT_KEYS = "/v1/organization/projects/{project_id}/api_keys"
_BUDGETS = "/v1/organization/budgets"
_SPEND_LIMIT = "/v1/organization/projects/{project_id}/spend_limit"

_PAGES = {
    "after": "The id of the key before the first one to return.",
    "limit": "Maximum number of keys, 1 to 100. Default: 20.",
    "order": "asc, or desc: the newest first. Default: asc.",
}
_USAGE = {
    "start_time": "The first second, since 1970. It is rounded down to the beginning of a bucket.",
    "end_time": "The second after the last one. Default: now.",
    "bucket_width": "1m, 1h or 1d. Default: 1d. Minutes are kept for 48 hours.",
    "group_by": "May be repeated: project_id (the team), user_id, api_key_id, model, batch, route, outcome; "
    "service_tier and api_source, of which there is one each.",
    "batch": "true: only lines of batches; false: all others. Default: both.",
    "project_ids": "Only of these teams. May be repeated.",
    "user_ids": "Only of these users. May be repeated.",
    "api_key_ids": "Only of these keys. May be repeated.",
    "models": "Only of these models. May be repeated.",
    "limit": "Maximum number of buckets. Default: 7 of a day, 24 of an hour, 60 of a minute.",
    "page": "The next_page of the response before.",
}
_COSTS = _USAGE | {
    "bucket_width": "1d.",
    "group_by": "May be repeated: project_id (the team), line_item (the model), api_key_id, user_id, batch; "
    "api_source, of which there is one.",
    "line_items": "Only of these models, as `models`. May be repeated.",
    "limit": "Maximum number of buckets, 1 to 180. Default: 7.",
}

_admin = partial(Route, permission=Permission.ADMIN)
_usage = partial(
    Route, method="GET", permission=Permission.STRICT, answer=UsagePage, errors=(400, 501, 503), query=_USAGE
)

ORGANIZATION_ROUTES = group(
    "organization",
    _admin(
        method="GET",
        path=_KEYS,
        view=KeyRoutes.list_keys,
        summary="List the keys in the store, the newest last.",
        answer=KeyList,
        errors=(400, 501, 503),
        query={**_PAGES, "project_id": "Only those of this team; default: of none."},
    ),
    _admin(
        method="POST",
        path=_KEYS,
        view=KeyRoutes.create_key,
        summary="Make a key, which is valid at once in all processes. Its value is in this response only.",
        body=CreateKeyRequest,
        answer=KeyObject,
        errors=(501, 503),
    ),
    _admin(
        method="GET",
        path=f"{_KEYS}/{{key_id}}",
        view=KeyRoutes.key,
        summary="Describe a key.",
        answer=KeyObject,
        errors=(404, 501, 503),
    ),
    _admin(
        method="POST",
        path=f"{_KEYS}/{{key_id}}/rotate",
        view=KeyRoutes.rotate_key,
        summary="Give a key another value. Those before it stay valid for some time.",
        body=RotateKeyRequest,
        answer=KeyObject,
        errors=(404, 501, 503),
    ),
    _admin(
        method="DELETE",
        path=f"{_KEYS}/{{key_id}}",
        view=KeyRoutes.delete_key,
        summary="Revoke a key, at once in all processes. Its requests that run are not ended.",
        answer=DeletedKey,
        errors=(404, 501, 503),
    ),
    _admin(
        method="GET",
        path=_ADMIN_KEYS,
        view=KeyRoutes.admin_keys,
        summary="List the keys with the role admin, as in OpenAI's API.",
        answer=KeyList,
        errors=(400, 501, 503),
        query=_PAGES,
    ),
    _admin(
        method="POST",
        path=_ADMIN_KEYS,
        view=KeyRoutes.create_admin_key,
        summary="Make a key with the role admin, as in OpenAI's API.",
        body=CreateAdminKeyRequest,
        answer=KeyObject,
        errors=(501, 503),
    ),
    _admin(
        method="GET",
        path=f"{_ADMIN_KEYS}/{{key_id}}",
        view=KeyRoutes.admin_key,
        summary="Describe a key with the role admin.",
        answer=KeyObject,
        errors=(404, 501, 503),
    ),
    _admin(
        method="DELETE",
        path=f"{_ADMIN_KEYS}/{{key_id}}",
        view=KeyRoutes.delete_admin_key,
        summary="Revoke a key with the role admin.",
        answer=DeletedKey,
        errors=(404, 501, 503),
    ),
    _admin(
        method="GET",
        path=_PROJECT_KEYS,
        view=KeyRoutes.project_keys,
        summary="List the keys of a team, as those of a project in OpenAI's API.",
        answer=KeyList,
        errors=(400, 404, 501, 503),
        query=_PAGES,
    ),
    _admin(
        method="GET",
        path=f"{_PROJECT_KEYS}/{{key_id}}",
        view=KeyRoutes.project_key,
        summary="Describe a key of a team.",
        answer=KeyObject,
        errors=(404, 501, 503),
    ),
    _admin(
        method="DELETE",
        path=f"{_PROJECT_KEYS}/{{key_id}}",
        view=KeyRoutes.delete_project_key,
        summary="Revoke a key of a team.",
        answer=DeletedKey,
        errors=(404, 501, 503),
    ),
    _admin(
        method="GET",
        path=_BUDGETS,
        view=BudgetRoutes.list_budgets,
        summary="List the budgets of users, teams and keys in force, also those of the configuration, "
        "and what is used of them.",
        answer=BudgetList,
        errors=(501, 503),
    ),
    _admin(
        method="POST",
        path=_BUDGETS,
        view=BudgetRoutes.set_budget,
        summary="Set the budget of a user or a team, which is in force at once in all processes. It replaces "
        "that of the configuration.",
        body=SetBudgetRequest,
        answer=BudgetObject,
        errors=(501, 503),
    ),
    _admin(
        method="GET",
        path=f"{_BUDGETS}/{{budget_id}}",
        view=BudgetRoutes.budget,
        summary="Describe the budget of a user, a team or a key.",
        answer=BudgetObject,
        errors=(404, 501, 503),
    ),
    _admin(
        method="DELETE",
        path=f"{_BUDGETS}/{{budget_id}}",
        view=BudgetRoutes.remove_budget,
        summary="Remove a budget from the store. That of the configuration is in force then.",
        answer=DeletedBudget,
        errors=(404, 501, 503),
    ),
    _admin(
        method="GET",
        path=_SPEND_LIMIT,
        view=BudgetRoutes.spend_limit,
        summary="Return the money that a team may spend in a month, as OpenAI's limit of a project.",
        answer=SpendLimit,
        errors=(404, 501, 503),
    ),
    _admin(
        method="POST",
        path=_SPEND_LIMIT,
        view=BudgetRoutes.set_spend_limit,
        summary="Set the money that a team may spend in a month.",
        body=SetSpendLimitRequest,
        answer=SpendLimit,
        errors=(404, 501, 503),
    ),
    _admin(
        method="DELETE",
        path=_SPEND_LIMIT,
        view=BudgetRoutes.remove_spend_limit,
        summary="Remove the limit of a team's money in a month from the store.",
        answer=DeletedSpendLimit,
        errors=(404, 501, 503),
    ),
    _usage(
        path="/v1/organization/usage/completions",
        view=UsageRoutes.completions,
        summary="Return the usage of routes that generate text, in buckets; text/csv if Accept names it. "
        "Operators read all usage, others their own.",
    ),
    _usage(
        path="/v1/organization/usage/embeddings",
        view=UsageRoutes.embeddings,
        summary="The same for routes that compute embeddings and scores.",
    ),
    _usage(
        path="/v1/organization/usage/audio_speeches",
        view=UsageRoutes.audio_speeches,
        summary="The same for the route that speaks texts. Characters are not counted.",
    ),
    _usage(
        path="/v1/organization/costs",
        view=UsageRoutes.costs,
        summary="Return what was spent on models with a price, by day.",
        query=_COSTS,
    ),
)
