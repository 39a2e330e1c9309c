"""The fields of a request that nothing reads, which are named in the header `Warning` of its answer.

A client with a misspelt field, or one of another server, learns that it had no effect. Fields that are
ignored without harm (`unserved.IGNORED`) are not named.
"""

import re
import typing
from collections.abc import Iterable
from typing import Any

import msgspec

from fairlead.dialects.fields import CommonFields
from fairlead.dialects.unserved import IGNORED

MAX_NAMES = 8
MAX_NAME_CHARS = 40
_UNSAFE = re.compile(r"[^A-Za-z0-9_.\[\]-]")
_names = msgspec.json.Decoder(dict[str, msgspec.Raw])


def known_fields(body_type: Any, *others: Iterable[str]) -> frozenset[str]:
    """Return the names of a body's fields in JSON, of those that the server reads of every body, and others.

    body_type: The type of the body.
    others: Fields that are refused or have no effect.
    """
    if typing.get_origin(body_type) is typing.Annotated:
        body_type = typing.get_args(body_type)[0]
    names = (field.encode_name for field in msgspec.structs.fields(body_type))
    return frozenset(names).union(CommonFields.__struct_fields__, IGNORED, *others)


def unread_fields(body: bytes | msgspec.Raw, known: frozenset[str], *, within: str = "") -> tuple[str, ...]:
    """Return the names of the fields of an object that are not `known`, those that are null excepted.

    `within`: the path of the object, with a dot at its end. The body has been parsed before.
    """
    try:
        fields = _names.decode(body)
    except msgspec.MsgspecError:  # a lone surrogate, or an `options` that is null
        return ()
    return tuple(
        within + name for name, value in fields.items() if name not in known and bytes(value) != b"null"
    )


def warning_of(names: tuple[str, ...]) -> str:
    """Return the value of the header (RFC 7234, 5.5), with characters that are safe in any log."""
    shown = [_UNSAFE.sub("?", name[:MAX_NAME_CHARS]) for name in names[:MAX_NAMES]]
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return f'299 - "fields without effect: {", ".join(shown)}{more}"'
