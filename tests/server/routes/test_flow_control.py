"""The headers of llm-d's gateway: tenant, class and deadline, of trusted callers only."""

import pytest

from fairlead.base.config import ApiKey, Config, ConfigError, FlowControlConfig, QueueConfig
from fairlead.base.errors import InvalidRequest
from fairlead.server.auth.flow_control import NO_HINTS, FlowControl, FlowHints

GATEWAY = "10.1.2.3"
CHAT = "/v1/chat/completions"
CONFIG = FlowControlConfig(trusted_addresses=("10.0.0.0/8", "fd00::/8"), objectives={"premium": "high"})
PLAIN = ApiKey("sk-plain", user="alice")
PORTAL = ApiKey("sk-portal", user="portal", trusted=True, priority="high")
FAIRNESS, OLD_FAIRNESS = "x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id"
OBJECTIVE, OLD_OBJECTIVE = "x-llm-d-inference-objective", "x-gateway-inference-objective"
DEADLINE, OLD_DEADLINE = "x-llm-d-slo-ttft-ms", "x-slo-ttft-ms"


def hints(*pairs, api_key=None, address=GATEWAY, config=CONFIG):
    control = FlowControl(config, QueueConfig().classes)
    return control.hints(
        api_key, address, [(name.encode(), value.encode("latin-1")) for name, value in pairs]
    )


async def job(client_with, chat, headers, *keys, key=None, address=GATEWAY, path=CHAT, **changes):
    """Return the job that a chat with these headers became."""
    config = Config(models=(), api_keys=keys, flow_control=CONFIG)
    client = client_with(*keys, config=config, **changes)
    if key is not None:
        headers = {"Authorization": f"Bearer {key.key}", **headers}
    reply = await client.post(path, chat(), headers=headers, client=(address, 4711))
    assert reply.status == 200, reply.body
    return client.gateway.job


@pytest.mark.parametrize("bypasses_quart", [True, False])
async def test_headers_of_the_gateway_name_tenant_class_and_deadline(client_with, chat, bypasses_quart):
    headers = {FAIRNESS: "team-a", OBJECTIVE: "premium", DEADLINE: "1500"}
    found = await job(client_with, chat, headers, bypasses_quart=bypasses_quart)
    assert (found.tenant, found.priority, found.wait_limit_s) == ("gateway/team-a", 0, 1.5)


async def test_headers_of_a_trusted_key_name_tenants_of_its_own(client_with, chat):
    headers = {OLD_FAIRNESS: "team-a", OLD_OBJECTIVE: "low", OLD_DEADLINE: "20"}
    found = await job(client_with, chat, headers, PORTAL, key=PORTAL, address="192.0.2.7")
    assert (found.tenant, found.priority, found.wait_limit_s) == ("portal/team-a", 2, 0.02)


@pytest.mark.parametrize("address", ["192.0.2.7", "11.0.0.1", "2001:db8::1", "not an address"])
async def test_headers_of_others_are_ignored_whatever_is_in_them(client_with, chat, address):
    headers = {FAIRNESS: "\xff" * 1000, OBJECTIVE: "premium", DEADLINE: "-1"}
    found = await job(client_with, chat, headers, PLAIN, key=PLAIN, address=address)
    assert (found.tenant, found.priority, found.wait_limit_s) == ("alice", 1, None)


async def test_class_of_the_gateway_is_at_most_the_one_that_the_key_allows(client_with, chat):
    found = await job(client_with, chat, {OBJECTIVE: "premium"}, PLAIN, key=PLAIN)
    assert (found.tenant, found.priority) == ("alice", 1)


async def test_gateway_comes_before_the_client_s_own_headers(client_with, chat):
    headers = {FAIRNESS: "team-a", "X-OpenWebUI-User-Id": "eve", OBJECTIVE: "low", "X-Priority": "high"}
    found = await job(client_with, chat, headers)
    assert (found.tenant, found.priority) == ("gateway/team-a", 2)


@pytest.mark.parametrize(
    ("header", "value"),
    [
        (FAIRNESS, "x" * 257),
        (OLD_FAIRNESS, "caf\xe9"),
        (FAIRNESS, " "),
        (OBJECTIVE, "a\tb"),
        (OLD_OBJECTIVE, "x" * 257),
        (DEADLINE, "-1"),
        (DEADLINE, "soon"),
        (DEADLINE, "1e3"),
        (OLD_DEADLINE, "nan"),
        (OLD_DEADLINE, "9" * 11),
        (DEADLINE, "1.2345678"),
        (DEADLINE, "\u00b2"),
    ],
)
async def test_bad_value_of_a_trusted_caller_is_a_400_that_names_the_header(client_with, chat, header, value):
    client = client_with(config=Config(models=(), flow_control=CONFIG))
    reply = await client.post(CHAT, chat(), headers={header: value}, client=(GATEWAY, 4711))
    assert (reply.status, reply.error["param"]) == (400, header)
    assert header in reply.error["message"]
    assert client.gateway.jobs == []


@pytest.mark.parametrize("header", [FAIRNESS, OBJECTIVE, DEADLINE])
def test_header_that_is_given_twice_is_refused(header):
    """One may be the gateway's and the other the client's."""
    with pytest.raises(InvalidRequest, match=f"{header}: must not be given twice"):
        hints((header, "1"), (header, "1"))
    assert hints((header, "1"), (header, "2"), address="192.0.2.7") == NO_HINTS


def test_new_names_come_before_old_ones():
    names = [(OLD_FAIRNESS, "old"), (FAIRNESS, "new"), (OLD_OBJECTIVE, "low"), (OBJECTIVE, "premium")]
    expected = FlowHints("new", "high", 1.0)
    assert hints(*names, (OLD_DEADLINE, "5000"), (DEADLINE, "1000")) == expected


def test_empty_and_unknown_values_are_the_same_as_none():
    assert hints((FAIRNESS, ""), (OBJECTIVE, "unknown"), (DEADLINE, "0")) == NO_HINTS
    assert hints((OBJECTIVE, "normal")) == FlowHints(priority="normal")
    assert hints((DEADLINE, "9999999999.5")).wait_limit_s == 9_999_999.9995


def test_addresses_of_both_families_are_compared():
    name = (FAIRNESS, "a")
    assert hints(name, address="::ffff:10.0.0.1").fairness_id == "a"
    assert hints(name, address="fd00::1").fairness_id == "a"
    assert [hints(name, address=each) for each in (None, "", "::1")] == [NO_HINTS] * 3
    assert hints(name, config=FlowControlConfig()) == NO_HINTS


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"trusted_addresses": ("10.0.0.1/8",)}, r"flowControl\.trustedAddresses\[0\]"),
        ({"trusted_addresses": ("gateway",)}, r"flowControl\.trustedAddresses\[0\]"),
        ({"objectives": {"premium": "urgent"}}, r"flowControl\.objectives\.premium: must be one of high"),
    ],
)
def test_configuration_that_has_no_effect_is_refused(settings, fault):
    with pytest.raises(ConfigError, match=fault):
        Config(models=(), flow_control=FlowControlConfig(**settings))
