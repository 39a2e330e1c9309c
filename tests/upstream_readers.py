"""The readers of other servers' responses."""

from fairlead.api.routes import DIALECTS
from fairlead.upstream_events import UpstreamReader

READERS: dict[str, UpstreamReader] = {dialect.path: dialect.reader for dialect in DIALECTS}
"""By the path of their dialect."""

CHAT_READER = READERS["/v1/chat/completions"]
