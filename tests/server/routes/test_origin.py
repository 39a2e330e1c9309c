"""Which `Host` and `Origin` headers are accepted."""

import socket

import pytest

from fairlead.base.errors import Forbidden
from fairlead.base.formats.headers import FirstHeaders
from fairlead.server.auth.origin import OriginPolicy

EVERYWHERE = OriginPolicy("0.0.0.0")  # only a setting: nothing listens on it
LOOPBACK = OriginPolicy("127.0.0.1")
NAMED = OriginPolicy("Models.example")


def is_right(guard: OriginPolicy, *, strict: bool = True, **headers: str) -> bool:
    pairs = [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()]
    try:
        guard.check(FirstHeaders(pairs), strict=strict)
    except Forbidden:
        return False
    return True


@pytest.mark.parametrize("guard", [LOOPBACK, NAMED, EVERYWHERE, OriginPolicy("::")])
@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8000", "127.0.0.1", "127.8.8.8:1", "[::1]:8000", "app.localhost:80"]
)
def test_names_of_the_loopback_are_accepted_wherever_the_server_listens(guard, host):
    assert is_right(guard, host=host)


@pytest.mark.parametrize("guard", [LOOPBACK, NAMED, EVERYWHERE])
@pytest.mark.parametrize(
    "host",
    [
        "",
        "evil.example",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "evil.example:8000",
        "user@localhost",
        "localhost:8000@evil.example",
        "localhost/evil.example",
        "localhost:x",
        "localhost:99999999",
        "[::1",
        "local host",
        "xlocalhost",
    ],
)
def test_other_names_are_refused(guard, host):
    assert not is_right(guard, host=host)


def test_forwarded_request_proves_nothing_by_a_name_that_the_proxy_may_have_written():
    guard = OriginPolicy("127.0.0.1", ["models.example"])
    for host in ("localhost", "127.0.0.1:8000", "app.localhost", "other.example"):
        with pytest.raises(Forbidden):
            guard.check(FirstHeaders([(b"host", host.encode())]), strict=True, is_forwarded=True)
    with pytest.raises(Forbidden):
        guard.check(FirstHeaders([]), strict=True, is_forwarded=True)
    guard.check(FirstHeaders([(b"host", b"models.example")]), strict=True, is_forwarded=True)
    guard.check(FirstHeaders([(b"host", b"127.0.0.1")]), strict=False, is_forwarded=True)


def test_configured_host_is_accepted_in_upper_and_lower_case():
    assert is_right(NAMED, host="models.EXAMPLE:8000")
    assert not is_right(LOOPBACK, host="models.example:8000")


@pytest.mark.parametrize("guard", [EVERYWHERE, OriginPolicy("::")])
def test_server_on_all_addresses_accepts_every_address_and_the_machines_name(guard):
    for host in ("10.0.0.2:8000", "[fe80::1]:8000", socket.gethostname()):
        assert is_right(guard, host=host)
    assert not is_right(guard, host="10.0.0.2.example")
    assert not is_right(LOOPBACK, host="10.0.0.2:8000")


def test_program_may_omit_host_and_origin():
    assert is_right(LOOPBACK)


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("localhost:8000", "http://localhost:8000"),
        ("localhost", "http://localhost"),
        ("localhost:80", "http://localhost"),
        ("LocalHost:8000", "http://localhost:8000"),
        ("[::1]:8000", "http://[::1]:8000"),
        ("localhost", "https://localhost"),  # a proxy terminates TLS
    ],
)
def test_our_own_pages_are_accepted(host, origin):
    assert is_right(LOOPBACK, host=host, origin=origin)


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("localhost:8000", "http://localhost:3000"),  # another program's page on this machine
        ("localhost:8000", "http://localhost"),
        ("localhost:8000", "http://127.0.0.1:8000"),
        ("localhost:8000", "null"),
        ("localhost:8000", ""),
        ("localhost:8000", "localhost:8000"),
        ("localhost:8000", "file://localhost:8000"),
        ("localhost:8000", "http://localhost:8000.evil.example"),
        ("localhost:8000", "http://evil.example"),
        ("localhost:8000", "http://[::1"),
        ("localhost:8000", "http://localhost:x"),
    ],
)
def test_pages_of_other_origins_are_refused(host, origin):
    assert not is_right(LOOPBACK, host=host, origin=origin)


def test_origin_without_host_is_refused():
    assert not is_right(LOOPBACK, origin="http://localhost:8000")


def test_refusal_does_not_repeat_a_long_name():
    with pytest.raises(Forbidden) as refused:
        LOOPBACK.check(FirstHeaders([(b"host", b"x" * 50_000)]), strict=True)
    assert len(str(refused.value)) < 200


BEHIND = OriginPolicy("127.0.0.1", ("Models.example",))


@pytest.mark.parametrize("host", ["models.example", "models.EXAMPLE:8443", "localhost:8000"])
def test_allowed_name_is_accepted_besides_the_servers_own(host):
    assert is_right(BEHIND, host=host)
    assert not is_right(BEHIND, host="other.example")


def test_page_of_an_allowed_proxy_that_rewrites_host_is_accepted():
    assert is_right(BEHIND, host="127.0.0.1:8000", origin="https://models.example")
    assert is_right(BEHIND, host="models.example", origin="https://models.example")
    for other in ("https://models.example:8443", "https://evil.example", "https://x.models.example"):
        assert not is_right(BEHIND, host="127.0.0.1:8000", origin=other)


# Unless checked strictly ----------------------------------------------------------------------------

ADDRESSES = ("10.0.0.2:8000", "192.168.1.5", "[fe80::1]:8000", "8.8.8.8")
# Names that a page may have on a local network, or, as `ai`, on the internet.
UNPROVEN_NAMES = (
    "ai",
    "ai:8000",
    "ai.",
    "ai.local",
    "fairlead",  # a container, or a service of Kubernetes
    "fairlead_upstream:8000",  # an upstream of nginx
    "host.docker.internal:8000",
    "fairlead.default.svc",
    "fairlead.default.svc.cluster.local",
    "box.lan",
    "box.home.arpa",
    "box.internal",
    "test",
)


@pytest.mark.parametrize("guard", [LOOPBACK, NAMED, EVERYWHERE])
@pytest.mark.parametrize("host", ADDRESSES)
def test_all_addresses_are_accepted_unless_checked_strictly(guard, host):
    assert is_right(guard, strict=False, host=host)
    assert not is_right(LOOPBACK, host=host)


@pytest.mark.parametrize("guard", [LOOPBACK, NAMED, EVERYWHERE])
@pytest.mark.parametrize("host", UNPROVEN_NAMES)
@pytest.mark.parametrize("strict", [True, False])
def test_names_outside_public_dns_are_refused_unless_they_are_allowed(guard, host, strict):
    assert not is_right(guard, strict=strict, host=host)
    if not host.endswith("."):
        allowed = OriginPolicy("127.0.0.1", (host.partition(":")[0],))
        assert is_right(allowed, strict=strict, host=host)


@pytest.mark.parametrize("guard", [LOOPBACK, NAMED, EVERYWHERE])
@pytest.mark.parametrize(
    "host",
    [
        "",
        "evil.example",
        "evil.example:8000",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "10.0.0.2.example",
        "local.evil.example",
        "user@localhost",
        "localhost:8000@evil.example",
        "localhost/evil.example",
        "localhost:x",
        "[::1",
        "local host",
        "evil.example.",
        "evil\xe9",
        "x" * 300,
    ],
)
def test_malformed_or_public_name_is_always_refused(guard, host):
    assert not is_right(guard, strict=False, host=host)


@pytest.mark.parametrize("origin", ["null", "http://evil.example", "http://localhost:3000", "", "file://"])
def test_page_of_another_server_is_refused(origin):
    assert not is_right(LOOPBACK, strict=False, host="localhost:8000", origin=origin)
    for site in ("cross-site", "same-site", "none", ""):
        headers = {"host": "localhost:8000", "origin": origin, "sec_fetch_site": site}
        assert not is_right(LOOPBACK, strict=False, **headers)


def test_page_behind_a_proxy_that_rewrites_host_is_accepted_if_same_origin():
    headers = {"host": "127.0.0.1:8000", "origin": "https://chat.example", "sec_fetch_site": "same-origin"}
    assert is_right(LOOPBACK, strict=False, **headers)
    assert not is_right(LOOPBACK, strict=True, **headers)
    assert not is_right(LOOPBACK, strict=False, **headers | {"host": "chat.example"})


def test_number_of_remembered_hosts_is_bounded():
    for number in range(1000):
        is_right(LOOPBACK, strict=False, host=f"{number}.evil.example")
    assert LOOPBACK._allows_host.cache_info().currsize <= 256
