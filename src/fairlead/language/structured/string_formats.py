"""The formats of strings that are enforced, as regular expressions. Any other format is an annotation.

They are those that OpenAI documents for structured outputs, and `uri`. They hold for a whole text.
"""

from collections.abc import Mapping

_HOUR, _MINUTE = "(?:[01][0-9]|2[0-3])", "[0-5][0-9]"
_FRACTION = "(?:\\.[0-9]{1,9})?"
_ZONE = f"(?:[zZ]|[+-]{_HOUR}:{_MINUTE})"

_LEAP_YEAR = "(?:[0-9][0-9](?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = (
    "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)


def _leap_seconds() -> str:
    """Return what matches a second 60, which is at 23:59 UTC, with offsets of whole quarters of an hour."""
    ways = [f"23:59:60{_FRACTION}(?:[zZ]|[+-]00:00)"]
    for sign, direction in (("\\+", 1), ("-", -1)):
        for offset in range(15, 24 * 60, 15):
            hour, minute = divmod((23 * 60 + 59 + direction * offset) % (24 * 60), 60)
            zone = f"{sign}{offset // 60:02}:{offset % 60:02}"
            ways.append(f"{hour:02}:{minute:02}:60{_FRACTION}{zone}")
    return "|".join(ways)


_TIME = f"(?:{_HOUR}:{_MINUTE}:{_MINUTE}{_FRACTION}{_ZONE}|{_leap_seconds()})"

_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = rf"{_OCTET}(?:\.{_OCTET}){{3}}"
_GROUP = "[0-9a-fA-F]{1,4}"
_LAST_32 = f"(?:{_GROUP}:{_GROUP}|{_IPV4})"


def _ipv6() -> str:
    """Return the expression of RFC 3986, where `::` stands for one group or more."""
    ways = [f"(?:{_GROUP}:){{6}}{_LAST_32}"]
    for before in range(6):
        head = f"(?:{_GROUP}(?::{_GROUP}){{0,{before - 1}}})?" if before else ""
        ways.append(f"{head}::(?:{_GROUP}:){{{5 - before}}}{_LAST_32}")
    ways.append(f"(?:{_GROUP}(?::{_GROUP}){{0,5}})?::{_GROUP}")
    ways.append(f"(?:{_GROUP}(?::{_GROUP}){{0,6}})?::")
    return f"(?:{'|'.join(ways)})"


_IPV6 = _ipv6()
# Labels with hyphens at both the third and the fourth place are those of Punycode (RFC 5890, 2.3.1). Whether
# one is valid is beyond an expression, so none is written.
_END, _INNER = "[a-zA-Z0-9]", "[a-zA-Z0-9-]"
_LABEL = f"{_END}(?:{_INNER}{{0,2}}{_END}|{_INNER}(?:{_END}{_INNER}|-{_END}){_INNER}{{0,58}}{_END})?"
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,126}}"
MOST_OF_HOSTNAME = 253
_ATOM = "[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]+"
_UNRESERVED = "a-zA-Z0-9._~!$&'()*+,;="


def _uri_characters(more: str, least: str = "*") -> str:
    return f"(?:[{_UNRESERVED}{more}-]|%[0-9a-fA-F]{{2}}){least}"


_SEGMENTS = f"(?:/{_uri_characters(':@')})*"
_ADDRESS = rf"\[(?:{_IPV6}|v[0-9a-fA-F]+\.[{_UNRESERVED}:-]+)\]"
_AUTHORITY = rf"(?:{_uri_characters(':')}@)?(?:{_ADDRESS}|{_uri_characters('')})(?::[0-9]*)?"
_URI = (
    rf"[a-zA-Z][a-zA-Z0-9+.-]*:(?://{_AUTHORITY}{_SEGMENTS}|/?{_uri_characters(':@', '+')}{_SEGMENTS}|/)?"
    rf"(?:\?{_uri_characters(':@/?')})?(?:#{_uri_characters(':@/?')})?"
)


def _duration() -> str:
    """Return the expression of RFC 3339, where no unit between two others is left out."""
    number = "[0-9]{1,9}"
    time = f"T(?:{number}H(?:{number}M(?:{number}S)?)?|{number}M(?:{number}S)?|{number}S)"
    date = f"(?:{number}Y(?:{number}M(?:{number}D)?)?|{number}M(?:{number}D)?|{number}D)"
    return f"P(?:{date}(?:{time})?|{time}|{number}W)"


FORMATS: Mapping[str, str] = {
    name: f"^(?:{expression})$"
    for name, expression in {
        "date": _DATE,
        "time": _TIME,
        "date-time": f"{_DATE}[tT]{_TIME}",
        "duration": _duration(),
        "email": rf"{_ATOM}(?:\.{_ATOM})*@(?:{_HOST}|\[{_IPV4}\])",
        "hostname": _HOST,
        "ipv4": _IPV4,
        "ipv6": _IPV6,
        "uuid": "[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}",
        "uri": _URI,
    }.items()
}
