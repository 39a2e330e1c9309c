"""The commands for keys and usage: each option is in the request that is sent."""

import json

import pytest

from fairlead.server.cli import main
from fairlead.server.console.client import Client

KEY = {
    "id": "key-1",
    "value": "fl-value",
    "name": "ana",
    "expires_at": None,
    "project_id": "ops",
    "user": None,
}
KEY |= {"role": "user", "redacted_value": "fl-v…", "object": "x", "owner": {}}
PAGE = {"data": [KEY], "has_more": False, "last_id": "key-1"}
RESULT = {"model": "small", "num_model_requests": 2, "input_tokens": 3, "output_tokens": 4}
USAGE = {"data": [{"results": [RESULT]}], "has_more": False, "next_page": None}


@pytest.fixture
def sent(monkeypatch):
    """Return the requests that the commands send."""
    requests = []

    def answer(method, document):
        def send(_client, path, body=None):
            requests.append((method, path, body))
            found = document if not path.startswith("/v1/organization/usage") else USAGE
            return json.dumps(PAGE if path.partition("?")[1] and found is KEY else found).encode()

        return send

    monkeypatch.setattr(Client, "post", answer("POST", KEY))
    monkeypatch.setattr(Client, "get", answer("GET", KEY))
    monkeypatch.setattr(Client, "delete", answer("DELETE", KEY))
    return requests


OPTIONS = {
    "--team": ("ops", "project_id", "ops"),
    "--user": ("ana", "user", "ana"),
    "--role": ("operator", "role", "operator"),
    "--priority": ("high", "priority", "high"),
    "--models": ("small", "models", ("small",)),
    "--tokens-per-day": ("2M", "tokens_per_day", 2_000_000),
    "--tokens-per-month": ("500k", "tokens_per_month", 500_000),
    "--cost-per-day": ("1.5", "cost_per_day", 1.5),
    "--cost-per-month": ("9", "cost_per_month", 9.0),
    "--requests-per-minute": ("7", "requests_per_minute", 7),
    "--tokens-per-minute": ("8", "tokens_per_minute", 8),
    "--concurrent": ("3", "concurrent", 3),
    "--expires": ("90d", "expires_in_seconds", 90 * 86_400),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_option_of_a_new_key_is_sent(sent, option):
    text, field, value = OPTIONS[option]
    assert main(["keys", "add", "ana", option, text]) == 0
    ((_, path, body),) = sent
    assert path == "/v1/organization/api_keys"
    assert body == {"name": "ana", "role": "user", "trusted": False} | {field: value}


def test_new_key_may_be_trusted_and_is_printed_once(sent, capsys):
    assert main(["keys", "add", "ana", "--trusted"]) == 0
    assert sent[0][2]["trusted"]
    assert capsys.readouterr().out == "fl-value\n"
    assert main(["keys", "add", "ana", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["value"] == "fl-value"


@pytest.mark.parametrize(
    "words",
    [
        ["--expires", "soon"],
        ["--expires", "0"],
        ["--tokens-per-day", "many"],
        ["--concurrent", "0"],
        ["--role", "root"],
        ["--cost-per-day", "-1"],
    ],
)
def test_faulty_option_is_refused(sent, words):
    assert main(["keys", "add", "ana", *words]) == 2
    assert sent == []


def test_key_is_rotated_shown_and_revoked(sent, capsys):
    assert main(["keys", "rotate", "a/b", "--overlap", "1h", "--json"]) == 0
    assert main(["keys", "show", "key-1", "--json"]) == 0
    assert main(["keys", "show", "key-1"]) == 0
    assert main(["keys", "revoke", "key-1"]) == 0
    base = "/v1/organization/api_keys"
    assert [request[:2] for request in sent] == [
        ("POST", f"{base}/a%2Fb/rotate"),
        ("GET", f"{base}/key-1"),
        ("GET", f"{base}/key-1"),
        ("DELETE", f"{base}/key-1"),
    ]
    assert sent[0][2] == {"overlap_seconds": 3600}
    assert "project_id: ops" in capsys.readouterr().out


def test_keys_of_a_team_are_listed(sent, capsys):
    assert main(["keys", "list", "--team", "ops"]) == 0
    assert sent[0][1].endswith("limit=100&project_id=ops")
    assert "key-1" in capsys.readouterr().out
    assert main(["keys", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [KEY]


def test_usage_is_summed_up_over_days_and_kinds(sent, capsys):
    assert main(["usage", "--by", "model", "--days", "3", "--json"]) == 0
    assert len(sent) == 3
    assert all("group_by=model" in path for _, path, _ in sent)
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["model"], row["num_model_requests"], row["input_tokens"]) == ("small", 6, 9)


# Budgets ---------------------------------------------------------------------------------------------

BUDGET = {
    "id": "budget-1",
    "user": None,
    "team": "ops",
    "source": "store",
    "tokens_per_day": 2_000_000,
    "uses": [{"kind": "tokens_per_day", "limit": 2_000_000, "used": 1500, "renews_at": 1}],
    **dict.fromkeys(("api_key_id", "api_key_name", "tokens_per_month", "cost_per_day", "cost_per_month")),
}
OF_FILE = BUDGET | {
    "id": "budget-2",
    "user": "portal/ana",
    "team": None,
    "source": "file",
    "cost_per_day": 1.5,
    "uses": [{"kind": "cost_per_day", "limit": 1.5, "used": 0.25, "renews_at": 1}],
}
OF_KEY = OF_FILE | {"id": "budget-3", "user": None, "api_key_id": "key-1"}


@pytest.fixture
def budgets(monkeypatch):
    """Return the requests that the commands for budgets send."""
    requests = []
    monkeypatch.setattr(
        Client, "get", lambda _, path: json.dumps({"data": [BUDGET, OF_FILE, OF_KEY]}).encode()
    )
    monkeypatch.setattr(
        Client, "post", lambda _, path, body: requests.append((path, body)) or json.dumps(BUDGET).encode()
    )
    monkeypatch.setattr(Client, "delete", lambda _, path: requests.append((path, None)) or b"{}")
    return requests


def test_budget_is_set_with_each_limit_that_is_given(budgets, capsys):
    words = ["--tokens-per-day", "2M", "--tokens-per-month", "9k", "--cost-per-day", "1.5"]
    assert main(["budgets", "set", "--team", "ops", *words, "--cost-per-month", "7", "--json"]) == 0
    limits = {
        "tokens_per_day": 2_000_000,
        "tokens_per_month": 9000,
        "cost_per_day": 1.5,
        "cost_per_month": 7.0,
    }
    assert budgets == [("/v1/organization/budgets", {"team": "ops", **limits})]
    assert json.loads(capsys.readouterr().out) == BUDGET


@pytest.mark.parametrize(
    "words",
    [
        ["set", "--team", "ops"],
        ["set", "--tokens-per-day", "2M"],
        ["set", "--team", "ops", "--user", "ana", "--tokens-per-day", "2M"],
        ["set", "--team", "ops", "--tokens-per-day", "two"],
        ["set", "--team", "ops", "--cost-per-day", "0"],
        ["remove"],
    ],
)
def test_faulty_command_for_a_budget_sends_nothing(budgets, words, capsys):
    assert main(["budgets", *words]) == 2
    assert budgets == []
    assert capsys.readouterr().err


def test_budgets_are_listed_with_where_they_are_set_and_what_is_used(budgets, capsys):
    assert main(["budgets", "list"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert lines == [
        ["team", "ops", "store", "1,500/2,000,000"],
        ["user", "portal/ana", "file", "0.25/1.5"],
        ["key", "key-1", "file", "0.25/1.5"],
    ]
    assert main(["budgets", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [BUDGET, OF_FILE, OF_KEY]


def test_only_budgets_of_the_store_are_removed(budgets, capsys):
    assert main(["budgets", "remove", "--team", "ops"]) == 0
    assert budgets == [("/v1/organization/budgets/budget-1", None)]
    assert main(["budgets", "remove", "--user", "portal/ana"]) == 1
    assert "no budget in the server's store" in capsys.readouterr().err
