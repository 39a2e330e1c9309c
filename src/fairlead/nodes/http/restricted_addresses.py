"""Addresses that only the configuration may name as nodes: link-local ones, and clouds' metadata services.

A metadata service gives credentials of the machine to every program on it, and a machine's neighbours on the
link have no names that anybody could check. A server that relays requests to them, and returns what they
answer, would give both to its clients.
"""

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

_LINK_LOCAL = (IPv4Network("169.254.0.0/16"), IPv6Network("fe80::/10"))
_METADATA = frozenset(
    map(
        ip_address,
        (
            "100.100.100.200",  # Alibaba Cloud
            "168.63.129.16",  # Azure
            "192.0.0.192",  # Oracle Cloud
            "fd00:ec2::254",  # Amazon
            "fd20:ce::254",  # Google Cloud
            "fd00:42::42",  # Scaleway
        ),
    )
)
_METADATA_NAMES = frozenset({"metadata.google.internal", "metadata.goog", "instance-data.ec2.internal"})
# IPv6 networks whose last 32 bits are an IPv4 address: mapped, compatible, and translated (NAT64).
_WITH_IPV4 = (IPv6Network("::ffff:0:0/96"), IPv6Network("::/96"), IPv6Network("64:ff9b::/96"))
_LAST_BITS = 2**32 - 1


def is_restricted(host: str) -> bool:
    """Return whether a host is such an address, in its usual spelling, or a name of a metadata service.

    Other names and spellings are checked as the addresses that they are resolved to.
    """
    try:
        address = ip_address(host)
    except ValueError:
        return host.lower().rstrip(".") in _METADATA_NAMES
    forms: list[IPv4Address | IPv6Address] = [address]
    if isinstance(address, IPv6Address):
        if address.sixtofour is not None:
            forms.append(address.sixtofour)
        if any(address in network for network in _WITH_IPV4):
            forms.append(IPv4Address(int(address) & _LAST_BITS))
        forms.append(IPv6Address(int(address)))  # without its zone, which also counts in a comparison
    return any(form in _METADATA or any(form in network for network in _LINK_LOCAL) for form in forms)
