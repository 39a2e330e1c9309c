"""The operators' views of nodes and models: list, logs, load, unload, add, drain, remove.

A key needs a role for them, which the route table names, and an operator's key may be for some models only;
without keys, every client may use them. Nodes read the content of jobs: only an administrator may add any.
"""

import re
from contextlib import suppress
from functools import partial

import msgspec
import structlog

from fairlead.base.config import ConfigError, NodeConfig
from fairlead.base.config.spelling import dotted, spelled
from fairlead.base.errors import FairleadError, InvalidRequest, NotFound, quoted
from fairlead.base.requester import who
from fairlead.dialects.shapes import RemovedNode
from fairlead.nodes.processes.output import ProcessOutput
from fairlead.router.fleet.status import ModelStatus, NodeStatus
from fairlead.server.routes.process_logs import ProcessLogs
from fairlead.server.routes.request import Request, Response, json_response
from fairlead.server.routes.request_reader import RequestReader
from fairlead.server.routes.schemas import AddNodeRequest, LoadModelRequest, UnloadModelRequest

_load_decoder = msgspec.json.Decoder(LoadModelRequest)
_unload_decoder = msgspec.json.Decoder(UnloadModelRequest)
_node_decoder = msgspec.json.Decoder(AddNodeRequest)
_WORD = re.compile(r"\w+")

logger = structlog.get_logger("fairlead.server.routes")


class FleetRoutes:
    """The views of `/models/load`, `/models/unload`, `/models/{name}/logs`, `/nodes` and below."""

    def __init__(self, reader: RequestReader) -> None:
        self._reader = reader
        self._models = reader.jobs.models
        self._services = reader.jobs.services
        self._fleet = self._services.fleet
        self._logs = ProcessLogs(self._services.draining)

    async def load(self, request: Request) -> Response:
        """Load a model; respond when it is ready, with its status."""
        body = await self._reader.read(request, _load_decoder)
        model = self._find(request, body.model)
        await self._fleet.load(model, by=self._reader.requester(request))
        await self._services.refresh()
        return json_response(self._model(model))

    async def unload(self, request: Request) -> Response:
        """Unload a model; respond when its process has ended. With `force` its jobs fail, else they finish.

        Requests that wait for it get a 409; with `?wait=true` they wait for the next load.
        """
        body = await self._reader.read(request, _unload_decoder)
        model = self._find(request, body.model)
        await self._fleet.unload(
            model,
            force=bool(body.force),
            wait=_flag(request, "wait"),
            by=self._reader.requester(request),
        )
        await self._services.refresh()
        return json_response(self._model(model))

    async def logs(self, request: Request) -> Response:
        """Return the output of a model's processes; with `?follow=true` also their later output."""
        model = self._find(request, request.path_parameters["name"])
        follows = _flag(request, "follow")
        await self._services.refresh()
        output = self._fleet.output(model)
        logger.info("log read", model=model, follows=follows, **who(self._reader.requester(request)))
        if not follows:
            return self._logs.kept(output)
        return self._logs.follow(request, output, partial(self._is_current, model, output))

    def _is_current(self, model: str, output: ProcessOutput) -> bool:
        """Return whether the model still has this output; a reload may remove it."""
        with suppress(FairleadError):
            return self._fleet.output(model) is output
        return False

    async def nodes(self, request: Request) -> Response:
        """Return every node that the caller may see, local and remote, without its API key."""
        await self._services.refresh()
        return json_response(self._services.scope_of(request.api_key).of_nodes(self._fleet.nodes()))

    async def add_node(self, request: Request) -> Response:
        """Add a remote server as a node, until this server stops; respond after its first probe."""
        body = await self._reader.read(request, _node_decoder)
        await self._fleet.add_node(_configuration(body), by=self._reader.requester(request))
        await self._services.refresh()
        return json_response(self._node(body.id), 201)

    async def remove_node(self, request: Request) -> Response:
        """Remove a node; respond when the jobs it runs are finished."""
        node_id = request.path_parameters["node_id"]
        await self._fleet.remove_node(node_id, by=self._reader.requester(request))
        return json_response(RemovedNode(node_id, "node", deleted=True))

    async def drain_node(self, request: Request) -> Response:
        """Give a node no more jobs; respond at once."""
        node_id = request.path_parameters["node_id"]
        await self._fleet.drain_node(node_id, by=self._reader.requester(request))
        await self._services.refresh()
        return json_response(self._node(node_id))

    def _find(self, request: Request, name: str | None) -> str:
        """Return a model as `ModelAccess.find` does, but refuse a selector: its choice would be arbitrary."""
        if name is not None and self._models.selectors.has(name):
            raise InvalidRequest(f"model: {quoted(name)} stands for several models; name one", param="model")
        return self._models.find(request.api_key, name)

    def _model(self, name: str) -> ModelStatus:
        status = self._fleet.model(name)
        if status is None:  # removed by a reload
            raise NotFound(f"the model {quoted(name)} does not exist any more", param="model")
        return status

    def _node(self, node_id: str) -> NodeStatus:
        for status in self._fleet.nodes():
            if status.id == node_id:
                return status
        raise NotFound(f"the node {quoted(node_id)} does not exist any more")


def _flag(request: Request, name: str) -> bool:
    """Return a query parameter that is true or false; false if absent."""
    value = request.query(name)
    if value not in (None, "true", "false"):
        raise InvalidRequest(f"{name}: must be true or false, not {quoted(value)}", param=name)
    return value == "true"


def _configuration(body: AddNodeRequest) -> NodeConfig:
    """Return the node's configuration. Raises `InvalidRequest`, with the request's names of the fields."""
    given = {name: value for name, value in msgspec.structs.asdict(body).items() if value is not None}
    try:
        return NodeConfig(**given)
    except ConfigError as error:
        fault = error.faults[0]
        names = {spelled(name): name for name in body.__struct_fields__}
        param = dotted((names.get(str(fault.path[0]), fault.path[0]), *fault.path[1:]))
        # A fault's message may name other fields, too.
        message = _WORD.sub(lambda word: names.get(word[0], word[0]), fault.message)
        raise InvalidRequest(f"{param}: {message}", param=param) from None
