"""The readers of other servers' responses."""

from fairlead.api.route_table import ROUTES, dialects_of
from fairlead.upstream_events import UpstreamReader

READERS: dict[str, UpstreamReader] = {dialect.path: dialect.reader for dialect in dialects_of(ROUTES)}
"""By the path of their dialect."""

CHAT_READER = READERS["/v1/chat/completions"]
