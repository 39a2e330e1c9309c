"""The operators' routes for nodes and models: list, logs, load, unload, add, drain, remove.

Any valid key may use them, for the models which that key may use; without keys, every client may. Nodes are
for all models, and read the content of jobs: only a key for all models may change them. Pages of other
servers may not use these routes: see `origin`.
"""

import re
from contextlib import suppress
from functools import partial

import msgspec
from quart import Quart, g, request
from quart import Response as QuartResponse

from fairlead.api.exchange import quart_json_response, response_of
from fairlead.api.job_service import JobService
from fairlead.api.process_logs import ProcessLogs, wants_to_follow
from fairlead.api.request import Request
from fairlead.api.schemas import AddNodeRequest, LoadModelRequest, UnloadModelRequest
from fairlead.api.scope import scope_of
from fairlead.config import ConfigError, NodeConfig
from fairlead.config.spelling import dotted, spelled
from fairlead.errors import FairleadError, Forbidden, InvalidRequest, NotFound, quoted
from fairlead.fleet.status import ModelStatus, NodeStatus
from fairlead.process.output import ProcessOutput

_load_decoder = msgspec.json.Decoder(LoadModelRequest)
_unload_decoder = msgspec.json.Decoder(UnloadModelRequest)
_node_decoder = msgspec.json.Decoder(AddNodeRequest)
_WORD = re.compile(r"\w+")


class FleetRoutes:
    """The routes `/models/load`, `/models/unload`, `/models/{name}/logs`, `/nodes` and below."""

    # Their rules, for which `Host` and `Origin` are checked strictly.
    RULES = frozenset(
        {
            "/models/load",
            "/models/unload",
            "/models/<path:name>/logs",
            "/nodes",
            "/nodes/<path:node_id>",
            "/nodes/<path:node_id>/drain",
        }
    )

    def __init__(self, edge: JobService) -> None:
        self._edge = edge
        self._fleet = edge.services.fleet
        self._logs = ProcessLogs(edge.services.draining)

    def add_to(self, app: Quart) -> None:
        """Register the routes."""
        for rule, view, method in (
            ("/models/load", self.load, "POST"),
            ("/models/unload", self.unload, "POST"),
            ("/models/<path:name>/logs", self.logs, "GET"),
            ("/nodes", self.nodes, "GET"),
            ("/nodes", self.add_node, "POST"),
            ("/nodes/<path:node_id>", self.remove_node, "DELETE"),
            ("/nodes/<path:node_id>/drain", self.drain_node, "POST"),
        ):
            assert rule in self.RULES
            app.add_url_rule(rule, view_func=view, methods=[method])

    async def load(self) -> QuartResponse:
        """Load a model; respond when it is ready, with its status."""
        wanted = await self._edge.read(g.call, _load_decoder)
        model = self._find(wanted.model)
        await self._fleet.load(model)
        return quart_json_response(self._model(model))

    async def unload(self) -> QuartResponse:
        """Unload a model; respond when its process has ended. With `force` its jobs fail, else they finish.

        Requests that wait for it get a 409; with `?wait=true` they wait for the next load.
        """
        wanted = await self._edge.read(g.call, _unload_decoder)
        model = self._find(wanted.model)
        await self._fleet.unload(model, force=bool(wanted.force), wait=_flag("wait"))
        return quart_json_response(self._model(model))

    async def logs(self, name: str) -> QuartResponse:
        """Return the output of a model's processes; with `?follow=true` also their later output."""
        model = self._find(name)
        follows = wants_to_follow(request.args.get("follow"))
        output = self._fleet.output(model)
        if not follows:
            return response_of(self._logs.kept(output))
        return response_of(self._logs.follow(g.call, output, partial(self._is_current, model, output)))

    def _is_current(self, model: str, output: ProcessOutput) -> bool:
        """Return whether the model still has this output; a reload may remove it."""
        with suppress(FairleadError):
            return self._fleet.output(model) is output
        return False

    async def nodes(self) -> QuartResponse:
        """Return every node that the caller may see, local and remote, without its API key."""
        return quart_json_response(
            scope_of(self._edge.services, g.call.api_key).of_nodes(self._fleet.nodes())
        )

    async def add_node(self) -> QuartResponse:
        """Add a remote server as a node, until this server stops; respond after its first probe."""
        _check_is_for_all(g.call)
        wanted = await self._edge.read(g.call, _node_decoder)
        await self._fleet.add_node(_configuration(wanted))
        return quart_json_response(self._node(wanted.id), 201)

    async def remove_node(self, node_id: str) -> QuartResponse:
        """Remove a node; respond when the jobs it runs are finished."""
        _check_is_for_all(g.call)
        await self._fleet.remove_node(node_id)
        return quart_json_response({"id": node_id, "object": "node", "deleted": True})

    async def drain_node(self, node_id: str) -> QuartResponse:
        """Give a node no more jobs; respond at once."""
        _check_is_for_all(g.call)
        self._fleet.drain_node(node_id)
        return quart_json_response(self._node(node_id))

    def _find(self, name: str | None) -> str:
        """Return a model as `ModelAccess.find` does, but refuse a selector: its choice would be arbitrary."""
        if name is not None and self._edge.models.selectors.has(name):
            raise InvalidRequest(f"model: {quoted(name)} stands for several models; name one", param="model")
        return self._edge.models.find(g.call, name)

    def _model(self, name: str) -> ModelStatus:
        for status in self._fleet.models():
            if status.model == name:
                return status
        raise NotFound(f"the model {quoted(name)} is gone", param="model")  # removed by a reload

    def _node(self, node_id: str) -> NodeStatus:
        for status in self._fleet.nodes():
            if status.id == node_id:
                return status
        raise NotFound(f"the node {quoted(node_id)} is gone")


def _flag(name: str) -> bool:
    """Return a query parameter that is true or false; false if absent."""
    said = request.args.get(name, "false")
    if said not in ("true", "false"):
        raise InvalidRequest(f"{name} must be true or false, not {quoted(said)}", param=name)
    return said == "true"


def _check_is_for_all(call: Request) -> None:
    """Raise `Forbidden` for a key that is limited to some models."""
    if call.api_key is not None and call.api_key.models:
        raise Forbidden("this API key is for some models only; nodes are for all")


def _configuration(wanted: AddNodeRequest) -> NodeConfig:
    """Return the node's configuration. Raises `InvalidRequest`, with the request's names of the fields."""
    given = {name: value for name, value in msgspec.structs.asdict(wanted).items() if value is not None}
    try:
        return NodeConfig(**given)
    except ConfigError as error:
        fault = error.faults[0]
        names = {spelled(name): name for name in wanted.__struct_fields__}
        param = dotted((names.get(str(fault.path[0]), fault.path[0]), *fault.path[1:]))
        # A fault's message may name other fields, too.
        message = _WORD.sub(lambda word: names.get(word[0], word[0]), fault.message)
        raise InvalidRequest(f"{param}: {message}", param=param) from None
