"""The client's address behind reverse proxies: which lists are believed, and how far."""

import ipaddress
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead.server.listener.forwarded import FORWARDED_BYTES, MOST_HOPS, ClientAddress, TrustedProxies

PROXY = "10.0.0.1"
proxies = TrustedProxies(["10.0.0.0/8", "2001:db8:1::/48", "127.0.0.1"])


def client(
    *headers: tuple[str, str], peer: str | None = PROXY, trusted: TrustedProxies = proxies
) -> ClientAddress:
    return trusted.client(peer, [(name.encode(), value.encode("latin-1")) for name, value in headers])


def for_list(*values: str, **options) -> str | None:
    found = client(*[("x-forwarded-for", value) for value in values], **options)
    assert found.is_forwarded
    return found.address


def forwarded(*values: str, **options) -> str | None:
    found = client(*[("forwarded", value) for value in values], **options)
    assert found.is_forwarded
    return found.address


def test_peer_is_the_client_of_a_request_that_was_not_forwarded():
    assert client() == ClientAddress(PROXY, is_forwarded=False)
    assert client(("x-real-ip", "192.0.2.1")) == ClientAddress(PROXY, is_forwarded=False)
    assert client(peer=None) == ClientAddress(None, is_forwarded=False)


def test_headers_of_other_peers_are_not_believed_but_show_that_the_request_was_forwarded():
    for name, value in (("x-forwarded-for", "192.0.2.1"), ("forwarded", "for=192.0.2.1")):
        found = client((name, value), peer="192.0.2.99")
        assert found == ClientAddress("192.0.2.99", is_forwarded=True)
    assert for_list("192.0.2.1", peer="127.0.0.1", trusted=TrustedProxies()) == "127.0.0.1"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["192.0.2.1"], "192.0.2.1"),
        (["8.8.8.8, 192.0.2.1"], "192.0.2.1"),
        (["8.8.8.8", "192.0.2.1"], "192.0.2.1"),
        (["127.0.0.1, 192.0.2.1"], "192.0.2.1"),
        (["192.0.2.1, 10.0.0.7,10.0.0.8"], "192.0.2.1"),
        (["192.0.2.1, 10.0.0.7", "10.0.0.8", "127.0.0.1"], "192.0.2.1"),
        (["evil, 192.0.2.1 , 10.9.9.9"], "192.0.2.1"),
        (["10.0.0.7, 10.0.0.8"], "10.0.0.7"),
        (["127.0.0.1"], "127.0.0.1"),
        (["192.0.2.1:4711"], "192.0.2.1"),
        (["2001:db8::1"], "2001:db8::1"),
        (["[2001:db8::1]"], "2001:db8::1"),
        (["[2001:DB8::1]:443"], "2001:db8::1"),
        (["192.0.2.1, 2001:db8:1::5"], "192.0.2.1"),
        (["::ffff:192.0.2.1"], "192.0.2.1"),
        (["192.0.2.1, ::ffff:10.0.0.5"], "192.0.2.1"),
        (["192.0.2.1,", ""], "192.0.2.1"),
        ([" ", ",,"], PROXY),
        (["unknown"], None),
        (["_hidden"], None),
        (["192.0.2.1, unknown, 10.0.0.7"], None),
        (["192.0.2.1,,10.0.0.7"], None),
        (["192.0.2.1:"], None),
        (["192.0.2.1:port"], None),
        (["192.0.2.1:999999"], None),
        (["[192.0.2.1]"], None),
        (["[2001:db8::1"], None),
        (["[2001:db8::1]x"], None),
        (["fe80::1%eth0"], None),
        (["192.0.2.256"], None),
        (["0x7f000001"], None),
        (["2130706433"], None),
        (["127.1"], None),
        (["010.0.0.1"], None),
        (["\u00b9.0.0.1"], None),
        (["1" * 60_000], None),
        ([", ".join(["10.0.0.7"] * MOST_HOPS)], "10.0.0.7"),
        ([", ".join(["10.0.0.7"] * (MOST_HOPS + 1))], None),
        (["x" * 50_000 + ", 192.0.2.1"], "192.0.2.1"),
        (["evil"] * 99 + ["192.0.2.1"], "192.0.2.1"),
    ],
)
def test_client_is_the_last_address_that_is_no_proxys(values, expected):
    assert for_list(*values) == expected


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["for=192.0.2.1"], "192.0.2.1"),
        (["For=192.0.2.1;proto=https;by=10.0.0.1"], "192.0.2.1"),
        (['proto=https; for=192.0.2.1 ;host="a,b;c"'], "192.0.2.1"),
        (['for="192.0.2.1:4711"'], "192.0.2.1"),
        (['for="[2001:db8::1]:4711"'], "2001:db8::1"),
        (['for="[2001:db8::1]"'], "2001:db8::1"),
        ([r'for="192.0.2.\1"'], "192.0.2.1"),
        (["for=8.8.8.8, for=192.0.2.1"], "192.0.2.1"),
        (["for=8.8.8.8", "for=192.0.2.1, for=10.0.0.7"], "192.0.2.1"),
        (["for=192.0.2.1,"], "192.0.2.1"),
        (["", "for=192.0.2.1"], "192.0.2.1"),
        ([" ; , "], PROXY),
        (["for=unknown"], None),
        (["for=_hidden"], None),
        (["for=_SEVKISEK, for=10.0.0.7"], None),
        (["for=192.0.2.1, proto=https"], None),
        (["for=192.0.2.1;for=192.0.2.2"], None),
        (["for=192.0.2.1:4711"], None),
        (["for=[2001:db8::1]"], None),
        (["for=2001:db8::1"], None),
        (["for = 192.0.2.1"], None),
        (["192.0.2.1"], None),
        (["for="], None),
        (['for="192.0.2.1'], None),
        # A client tries to hide what the proxy appends in a quoted string that it has begun.
        (['for=8.8.8.8;by="x', "for=192.0.2.1"], None),
        (['for=8.8.8.8;by="x', 'for=192.0.2.1;by="y"'], None),
        (['for=8.8.8.8;by="x', 'for="[2001:db8::1]"'], None),
        (['for=8.8.8.8;by="x\\', 'for=192.0.2.1;by="y"'], None),
        (["for=10.0.0.7," * 400, "for=192.0.2.1"], None),
    ],
)
def test_forwarded_is_read_as_in_its_rfc(values, expected):
    assert forwarded(*values) == expected


def test_client_is_unknown_where_the_two_headers_differ():
    both = [("x-forwarded-for", "192.0.2.1"), ("forwarded", "for=192.0.2.1")]
    assert client(*both) == ClientAddress("192.0.2.1", is_forwarded=True)
    spoofed = [("forwarded", "for=127.0.0.1"), ("x-forwarded-for", "192.0.2.1")]
    assert client(*spoofed) == ClientAddress(None, is_forwarded=True)
    assert client(("forwarded", ""), both[0]) == ClientAddress("192.0.2.1", is_forwarded=True)


def test_unix_socket_is_trusted_only_if_listed():
    assert for_list("192.0.2.1", peer=None, trusted=TrustedProxies(["unix"])) == "192.0.2.1"
    assert for_list("192.0.2.1", peer="", trusted=TrustedProxies(["unix"])) == "192.0.2.1"
    assert for_list("192.0.2.1", peer=None) is None
    assert for_list("192.0.2.1", peer="nonsense") == "nonsense"


def test_ipv4_peer_of_a_socket_for_both_families_is_recognized():
    assert for_list("192.0.2.1", peer="::ffff:10.0.0.1") == "192.0.2.1"


@pytest.mark.parametrize(
    "headers",
    [
        [("x-forwarded-for", "," * 60_000)],
        [("x-forwarded-for", "10.0.0.7," * 7_000)],
        [("x-forwarded-for", "1." * 30_000)],
        [("forwarded", ";" * 60_000)],
        [("forwarded", 'for="' + "\\a" * 30_000)],
        [("forwarded", ("a=" * FORWARDED_BYTES)[:FORWARDED_BYTES])],
        [("forwarded", ('a="' * FORWARDED_BYTES)[:FORWARDED_BYTES])],
        [("forwarded", (" " * FORWARDED_BYTES)[: FORWARDED_BYTES - 1] + "x")],
    ],
)
def test_long_lists_take_milliseconds(headers):
    began = time.process_time()
    client(*headers)
    assert time.process_time() - began < 0.1


pieces = st.sampled_from(
    [*("for=", "192.0.2.1", "10.0.0.7", "[2001:db8::1]", "_x", "unknown", ":1", "by=a"), *',;" \\=', "\x80"]
)


@given(
    claimed=st.lists(pieces, max_size=12).map("".join),
    appended=st.sampled_from(['"203.0.113.5:1"', "203.0.113.5"]),
)
def test_no_beginning_of_a_list_replaces_the_address_that_the_proxy_appends(claimed, appended):
    assert for_list(claimed, appended.strip('"')) == "203.0.113.5"
    assert for_list(f"{claimed},{appended.strip(chr(34))}") == "203.0.113.5"
    assert forwarded(claimed, f"for={appended}") in ("203.0.113.5", None)
    assert forwarded(f"{claimed}, for={appended};proto=http") in ("203.0.113.5", None)


@given(text=st.text(st.characters(max_codepoint=255), max_size=40))
def test_any_text_gives_an_address_or_none(text):
    for address in (for_list(text), forwarded(text)):
        assert address is None or ipaddress.ip_address(address)


@pytest.mark.parametrize("entry", ["", "proxy.example", "10.0.0.1/8", "10.0.0.0/33", "UNIX", "unix:/run/a"])
def test_entry_that_is_no_network_is_refused(entry):
    with pytest.raises(ValueError, match=r"."):
        TrustedProxies([entry])
