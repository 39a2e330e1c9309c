"""Addresses at which a client may add no node."""

import pytest

from fairlead.nodes.http.restricted_addresses import is_restricted


@pytest.mark.parametrize(
    "host",
    [
        *("169.254.169.254", "169.254.0.1", "169.254.255.255"),
        *("fe80::1", "FE80::1", "fe80::1%eth0", "febf::ffff"),
        *("100.100.100.200", "168.63.129.16", "192.0.0.192"),
        *("fd00:ec2::254", "fd00:0ec2:0:0:0:0:0:254", "fd20:ce::254", "fd00:42::42"),
        *("::ffff:169.254.169.254", "::ffff:a9fe:a9fe", "::169.254.169.254", "64:ff9b::a9fe:a9fe"),
        *("2002:a9fe:a9fe::1", "::ffff:100.100.100.200"),
        *("metadata.google.internal", "METADATA.google.internal.", "metadata.goog"),
    ],
)
def test_link_local_and_metadata_addresses_are_restricted_in_each_form(host):
    assert is_restricted(host)


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "10.0.0.2", "192.168.1.5", "169.253.255.255", "169.255.0.0", "100.100.100.201"),
        *("::1", "fec0::1", "fd00:ec2::253", "2001:db8::1", "::ffff:10.0.0.2", "64:ff9b::a00:2"),
        *(
            "node.example",
            "google.internal",
            "metadata.google.internal.example",
            "169.254.169.254.nip.io",
            "",
        ),
    ],
)
def test_other_addresses_and_names_are_not(host):
    assert not is_restricted(host)
