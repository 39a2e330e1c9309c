"""Requests for tests of the board: open ones, and ones that have ended."""

from typing import Any

from fairlead.generation.metrics.requests import EndedRequest
from fairlead.router.dispatch.open_jobs import OpenJob


def ended(tenant: str = "ana", **fields: Any) -> EndedRequest:
    """Return a request that waited 1 s, had its first token after 2 s and its end after 10 s, at 1000 s."""
    values: dict[str, Any] = {
        "request_id": f"of-{tenant}",
        "owner": f"key-{tenant}",
        "model": "m",
        "node": "n",
        "outcome": "success",
        "ended_at": 1000.0,
        "wait_s": 1.0,
        "first_token_s": 2.0,
        "took_s": 10.0,
        "token_gap_s": 0.1,
        "tokens": 81,
        "seats": 1,
        "attempts": 1,
    }
    return EndedRequest(tenant=tenant, **(values | fields))


def waiting(tenant: str = "ana", **fields: Any) -> OpenJob:
    """Return a request that has waited for 5 s."""
    values: dict[str, Any] = {
        "request_id": f"open-{tenant}",
        "team": "",
        "team_weight": 1.0,
        "owner": f"key-{tenant}",
        "model": "m",
        "priority": 1,
        "state": "waiting",
        "node": None,
        "position": 1,
        "estimated_wait_s": 3,
        "age_s": 5.0,
        "wait_s": 5.0,
        "first_token_s": None,
        "prompt_tokens": 7,
        "tokens": 0,
        "seats": 0,
    }
    return OpenJob(tenant=tenant, **(values | fields))


def running(tenant: str = "ana", **fields: Any) -> OpenJob:
    """Return a request that waited 1 s and has run for 4 s."""
    held: dict[str, Any] = {"state": "running", "node": "n", "position": None, "wait_s": 1.0, "seats": 1}
    return waiting(tenant, **(held | fields))
