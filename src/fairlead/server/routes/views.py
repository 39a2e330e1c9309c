"""The objects that have the views of the route table, made from the services."""

from collections.abc import Sequence
from functools import partial

from fairlead.generation.metrics.job_metrics import FrontCounts
from fairlead.generation.metrics.snapshot import Overview
from fairlead.generation.pipeline import GenerationPipeline
from fairlead.generation.services import Services
from fairlead.router.quotas.access import Authenticator
from fairlead.server.auth.cors import Cors
from fairlead.server.auth.request_auth import RequestAuth
from fairlead.server.batches.routes import BatchRoutes
from fairlead.server.dashboard.pages import Dashboard
from fairlead.server.organization.budgets import BudgetRoutes
from fairlead.server.organization.keys import KeyRoutes
from fairlead.server.organization.usage import UsageRoutes
from fairlead.server.responses.routes import ResponseRoutes
from fairlead.server.routes.admin import Admin
from fairlead.server.routes.board import BoardRoutes
from fairlead.server.routes.events import Events
from fairlead.server.routes.fleet import FleetRoutes
from fairlead.server.routes.generate import GenerationViews
from fairlead.server.routes.llama_cpp import LlamaCppRoutes
from fairlead.server.routes.media import MediaRoutes
from fairlead.server.routes.metrics import Metrics
from fairlead.server.routes.models import ModelRoutes
from fairlead.server.routes.ollama import OllamaRoutes
from fairlead.server.routes.openapi import OpenApi
from fairlead.server.routes.queue import QueueRoutes
from fairlead.server.routes.request import View
from fairlead.server.routes.request_reader import RequestReader
from fairlead.server.routes.route import Route
from fairlead.server.routes.tokenize import Tokens
from fairlead.server.routes.upstream import UpstreamRoute


class Views:
    """The views of the routes, as methods of these objects.

    services: The state of the server.
    routes: The rows of the route table, for `/openapi.json`.
    reader: Reads requests, and has the jobs.
    auth: Checks what only operators may do.
    cors: Says which pages of other servers may send requests.
    authenticator: Says whether the key of a batch is still valid, and has the keys of other people.
    """

    def __init__(
        self,
        services: Services,
        routes: Sequence[Route],
        reader: RequestReader,
        auth: RequestAuth,
        cors: Cors,
        authenticator: Authenticator,
    ) -> None:
        self._gateway, self._auth, self._unread = services.gateway, auth, reader.unread
        pipeline = GenerationPipeline(reader.jobs)
        self._generation = GenerationViews(reader, pipeline)
        self._journal = services.journal
        overview = Overview(
            services.fleet,
            services.counts or self.counts,
            ready=services.ready,
            queue_statistics=services.queue_statistics,
        )  # shared: rates are computed between snapshots
        self.events = Events(overview.snapshot, services.draining, services.scope_of)
        self.responses = ResponseRoutes(reader, pipeline)
        self.batches = BatchRoutes(reader, pipeline, authenticator)
        self._objects = (
            self.responses,
            self.responses.conversations,
            self.batches,
            ModelRoutes(reader.jobs),
            Tokens(reader),
            self._generation,
            LlamaCppRoutes(reader.jobs),
            UpstreamRoute(reader, cors),
            MediaRoutes(reader, cors),
            QueueRoutes(reader),
            BoardRoutes(reader, authenticator),
            FleetRoutes(reader),
            Admin(services),
            KeyRoutes(reader),
            BudgetRoutes(reader),
            UsageRoutes(services),
            Metrics(services, overview, self.responses.totals, reader.unread),
            OpenApi(routes),
            OllamaRoutes(reader, self._generation, auth),
            Dashboard(),
            self.events,
        )

    def counts(self) -> FrontCounts:
        """Return what this process has counted, including the tokens of running jobs so far."""
        return FrontCounts(
            self._gateway.statistics(),
            dict(self._auth.refusals()),
            dict(self._unread.dropped()),
            self._journal(),
        )

    def of(self, route: Route) -> View:
        """Return the view of a route."""
        if route.view is None:
            assert route.dialect is not None
            return partial(self._generation.respond, dialect=route.dialect)
        name = route.view.__name__
        (found,) = (each for each in self._objects if getattr(type(each), name, None) is route.view)
        view: View = getattr(found, name)
        return view
