"""The types of the bodies of the operators' routes, with the ranges of their fields."""

from typing import Annotated

import msgspec
from msgspec import Meta

from fairlead.base.config.fleet import MAX_ID_LENGTH
from fairlead.base.config.models import Dialects
from fairlead.dialects.fields import PositiveCount


class LoadModelRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /models/load`."""

    model: str


class UnloadModelRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /models/unload`. With `force` the model's jobs fail; otherwise they finish first."""

    model: str
    force: bool | None = None


NodeId = Annotated[str, Meta(extra_json_schema={"minLength": 1, "maxLength": MAX_ID_LENGTH})]
HttpUrl = Annotated[str, Meta(extra_json_schema={"format": "uri"})]


class AddNodeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /nodes`: a remote server, with the fields of `nodes` in a configuration file (`NodeConfig`).

    Unknown fields are refused: a node with a misspelled `api_key` would be unusable.

    id: The node's name.
    url: The server's URL.
    api_key: The key to send to it; None: it needs none.
    seats: Requests that it gets at the same time; None: the default of nodes.
    models: The models that it is used for; None: all that it lists.
    model_names: Its own names of models, by the names here.
    dialects: The APIs that it speaks; None: the default of nodes.
    api_path: The path of its API behind the URL, in the place of /v1; None: as `apiPath` of a node.
    """

    id: NodeId
    url: HttpUrl
    api_key: str | None = None
    seats: PositiveCount | None = None
    models: tuple[str, ...] | None = None
    model_names: dict[str, str] | None = None
    dialects: Annotated[Dialects, Meta(extra_json_schema={"minItems": 1})] | None = None
    api_path: str | None = None
