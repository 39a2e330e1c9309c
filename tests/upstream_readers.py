"""The readers of other servers' responses."""

from fairlead.base.upstream_events import UpstreamReader
from fairlead.server.routes.route_table import ROUTES, dialects_of

READERS: dict[str, UpstreamReader] = {dialect.path: dialect.reader for dialect in dialects_of(ROUTES)}
"""By the path of their dialect."""

CHAT_READER = READERS["/v1/chat/completions"]
