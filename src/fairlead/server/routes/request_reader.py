"""What the views read of a request: its body, its caller, and who asks for a change."""

from collections.abc import Callable
from typing import TypeVar

import msgspec

from fairlead.base.config import Limits
from fairlead.base.requester import Requester
from fairlead.dialects import body as bodies
from fairlead.dialects.fields import CommonFields
from fairlead.generation.caller import Caller
from fairlead.generation.job_service import JobService
from fairlead.generation.metrics.tenants import TenantNames
from fairlead.router.quotas.access import owner_of
from fairlead.server.routes.request import Request
from fairlead.server.routes.request_body import BodyMemory
from fairlead.server.routes.request_caller import identify, owner_so_far, tenant_so_far
from fairlead.server.routes.unread import UnreadAnswers
from fairlead.server.routes.uploads import Uploads

Parsed = TypeVar("Parsed")


class RequestReader:
    """Reads requests. Has the memory of bodies and of unread answers, and the space for forms.

    jobs: Runs the jobs of the callers.
    """

    def __init__(self, jobs: JobService) -> None:
        config = jobs.services.config
        self.jobs = jobs
        self.body_memory = BodyMemory(config.limits.bodies_bytes)
        self.uploads = Uploads(config.limits)
        self._tenant_names = TenantNames(config)
        self.unread = UnreadAnswers(config.limits.answers_bytes, self._tenant_names.shown)
        self._queue = config.queue

    async def take(self, request: Request, parse: Callable[[bytes, Limits], Parsed]) -> tuple[bytes, Parsed]:
        """Return the raw and the parsed body. Raises as `IncomingBody.read` and `Offload.parse` do."""
        body = await request.read()
        request.body_bytes = len(body)
        return body, await self.jobs.offload.parse(tenant_so_far(request), body, parse)

    async def read(self, request: Request, decoder: msgspec.json.Decoder[Parsed]) -> Parsed:
        """Return the parsed body. Raises as `take` does."""
        return (await self.take(request, lambda body, limits: bodies.parse(body, decoder, limits)))[1]

    def identify(
        self, request: Request, envelope: CommonFields | None = None, *, header_prefix: str = ""
    ) -> Caller:
        """Return the caller of a request, as `request_caller.identify` does."""
        return identify(request, self._queue, envelope, header_prefix=header_prefix)

    def requester(self, request: Request) -> Requester:
        """Return who sends the request, for what it ends, and for the log lines about what it changes."""
        tenant, key = self._tenant_names.shown(tenant_so_far(request)), owner_of(request.api_key)
        return Requester(tenant, key, request.request_id, owner_so_far(request))
