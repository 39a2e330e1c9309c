"""Which names are the server's, and which pages are."""

import socket

import pytest

from fairlead.api.call import FirstHeaders
from fairlead.api.origin import Guard
from fairlead.errors import Forbidden

EVERYWHERE = Guard("0.0.0.0")  # nothing is bound to it
LOOPBACK = Guard("127.0.0.1")
NAMED = Guard("Models.example")


def is_right(guard: Guard, **headers: str) -> bool:
    try:
        guard.check(FirstHeaders((name.encode(), value.encode()) for name, value in headers.items()))
    except Forbidden:
        return False
    return True


@pytest.mark.parametrize("guard", [LOOPBACK, NAMED, EVERYWHERE, Guard("::")])
@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8000", "127.0.0.1", "127.8.8.8:1", "[::1]:8000", "app.localhost:80"]
)
def test_the_loopback_has_its_names_wherever_the_server_listens(guard, host):
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
def test_no_other_name_is_right(guard, host):
    assert not is_right(guard, host=host)


def test_the_configured_host_is_right_in_any_case():
    assert is_right(NAMED, host="models.EXAMPLE:8000")
    assert not is_right(LOOPBACK, host="models.example:8000")


@pytest.mark.parametrize("guard", [EVERYWHERE, Guard("::")])
def test_who_listens_everywhere_has_every_address_and_the_machines_name(guard):
    for host in ("10.0.0.2:8000", "[fe80::1]:8000", socket.gethostname()):
        assert is_right(guard, host=host)
    assert not is_right(guard, host="10.0.0.2.example")
    assert not is_right(LOOPBACK, host="10.0.0.2:8000")


def test_a_program_need_not_say_where_it_asks_or_for_whom():
    assert is_right(LOOPBACK)


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("localhost:8000", "http://localhost:8000"),
        ("localhost", "http://localhost"),
        ("localhost:80", "http://localhost"),
        ("LocalHost:8000", "http://localhost:8000"),
        ("[::1]:8000", "http://[::1]:8000"),
        ("localhost", "https://localhost"),  # a proxy in front that speaks TLS
    ],
)
def test_our_own_pages_may(host, origin):
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
def test_no_other_page_may(host, origin):
    assert not is_right(LOOPBACK, host=host, origin=origin)


def test_a_page_that_hides_where_it_asks_may_not():
    assert not is_right(LOOPBACK, origin="http://localhost:8000")


def test_a_refusal_repeats_no_endless_name():
    with pytest.raises(Forbidden) as refused:
        LOOPBACK.check(FirstHeaders([(b"host", b"x" * 50_000)]))
    assert len(str(refused.value)) < 200


BEHIND = Guard("127.0.0.1", ("Models.example",))


@pytest.mark.parametrize("host", ["models.example", "models.EXAMPLE:8443", "localhost:8000"])
def test_a_name_that_is_allowed_is_right_besides_its_own(host):
    assert is_right(BEHIND, host=host)
    assert not is_right(BEHIND, host="other.example")


def test_a_page_of_a_proxy_that_tells_us_another_name_may():
    assert is_right(BEHIND, host="127.0.0.1:8000", origin="https://models.example")
    assert is_right(BEHIND, host="models.example", origin="https://models.example")
    for other in ("https://models.example:8443", "https://evil.example", "https://x.models.example"):
        assert not is_right(BEHIND, host="127.0.0.1:8000", origin=other)
