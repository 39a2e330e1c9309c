"""Mutants of the composition of several processes: cut wires of the supervisor, its dispatcher and a front.

`wires` finds the others, which are cut every night.
"""

from typing import Literal

from settings.mutants import Mutant

_DISPATCHER = "fairlead.server.processes.dispatcher_role:DispatcherRole"
_FRONT = "fairlead.server.processes.front_role:FrontRole"
_ONE_FRONT = "fairlead.server.processes.front_role:of_one_front"
_SUPERVISOR = "fairlead.server.processes.supervisor:Supervisor"
_FRONT_DIES = "front_that_dies_gives_back_its_seats_and_charges"
_DISPATCHER_DIES = "dispatcher_that_dies_is_replaced_and_jobs_and_models_go_on"


def _of_fronts(
    function: str, old: str, new: str, how: Literal["play", "reload", "behaviour"], scenario: str
) -> Mutant:
    return Mutant(function, old, new, how, scenario, fronts=2)


SEVERAL_FRONTS = (
    # What the dispatcher, or a front, gets of the configuration.
    _of_fronts(
        f"{_DISPATCHER}.__init__",
        'rejects_loading=config.while_loading == "reject",',
        "",
        "play",
        "whileLoading",
    ),
    _of_fronts(f"{_DISPATCHER}.__init__", "scheduler=config.scheduler,", "", "play", "scheduler"),
    _of_fronts(
        f"{_FRONT}.run",
        "request_timeout_s=config.request_timeout_s",
        "request_timeout_s=600.0",
        "play",
        "requestTimeout",
    ),
    _of_fronts(
        _ONE_FRONT,
        "ceil(limits.connections / config.fronts)",
        "limits.connections",
        "play",
        "limits.connections",
    ),
    _of_fronts(
        _ONE_FRONT,
        "limits.bodies_bytes // config.fronts",
        "limits.bodies_bytes",
        "play",
        "limits.bodiesBytes",
    ),
    _of_fronts(
        _ONE_FRONT,
        "replace(responses, store=responses.store and responses.in_store and config.has_store)",
        "responses",
        "behaviour",
        "several_fronts_keep_no_responses",
    ),
    _of_fronts(
        f"{_FRONT}._services",
        "fronts=self._config.fronts,",
        "",
        "play",
        "selectors.NAME.settings.spillover",
    ),
    # A reload.
    _of_fronts(f"{_SUPERVISOR}.reload", "front.send(message)", "pass", "reload", "apiKeys[].key"),
    _of_fronts(
        f"{_SUPERVISOR}.reload",
        "self._send_to_dispatcher(message)",
        "pass",
        "reload",
        "models.ENGINE.ttl",
    ),
    _of_fronts(
        f"{_SUPERVISOR}.reload",
        "self._config = replace(config, port=port)",
        "self._config, config = self._config, replace(config, port=port)",
        "reload",
        "apiKeys[].key",
    ),
    _of_fronts(
        f"{_DISPATCHER}._handle",
        "case control.Reload(config):",
        "case control.Reload(config) if False:",
        "reload",
        "models.ENGINE.ttl",
    ),
    _of_fronts(
        f"{_FRONT}._handle",
        "case control.Reload(packed):",
        "case control.Reload(packed) if False:",
        "reload",
        "apiKeys[].key",
    ),
    _of_fronts(f"{_FRONT}._reload", "await view.reload(config)", "pass", "reload", "models.ENGINE.aliases"),
    _of_fronts(
        f"{_FRONT}._reload",
        "app.change_keys(config.api_keys, config.teams)",
        "pass",
        "reload",
        "apiKeys[].key",
    ),
    # What all fronts know.
    _of_fronts(
        f"{_FRONT}._services", "quotas=self._quotas,", "", "play", "apiKeys[].limits.requestsPerMinute"
    ),
    _of_fronts(
        f"{_FRONT}._services",
        "counts=self._counts.totals,",
        "",
        "behaviour",
        "every_front_answers_with_the_totals_of_all",
    ),
    _of_fronts(
        f"{_FRONT}.run",
        "self._counts.own = app.counts",
        "pass",
        "behaviour",
        "every_front_answers_with_the_totals_of_all",
    ),
    _of_fronts(
        f"{_FRONT}._update",
        "self._quotas.update(state.usage)",
        "pass",
        "behaviour",
        "usage_of_a_key_is_shown_by_every_front",
    ),
    # A front or the dispatcher dies.
    _of_fronts(
        f"{_DISPATCHER}._front_ended", "self._quotas.end_front(name)", "pass", "behaviour", _FRONT_DIES
    ),
    _of_fronts(
        f"{_DISPATCHER}._front_ended",
        "self._counts.end_front(name)",
        "pass",
        "behaviour",
        "counts_of_a_front_that_dies_stay_in_the_totals",
    ),
    _of_fronts(f"{_DISPATCHER}.__init__", "on_front_ended=self._front_ended,", "", "behaviour", _FRONT_DIES),
    _of_fronts(f"{_DISPATCHER}._handle", "self._server.end_front(name)", "pass", "behaviour", _FRONT_DIES),
    _of_fronts(
        f"{_SUPERVISOR}._keep_front",
        "self._send_to_dispatcher(control.FrontEnded(front.name))",
        "pass",
        "behaviour",
        _FRONT_DIES,
    ),
    _of_fronts(
        f"{_DISPATCHER}.__init__",
        "adopted=self._processes.adoptable,",
        "",
        "behaviour",
        _DISPATCHER_DIES,
    ),
    _of_fronts(
        f"{_DISPATCHER}.__init__",
        "expected=start.expected,",
        "",
        "behaviour",
        "waiting_jobs_keep_their_order_when_the_dispatcher_dies",
    ),
    _of_fronts(
        f"{_DISPATCHER}.run",
        "self._processes.end_others()",
        "pass",
        "behaviour",
        "dispatcher_that_starts_ends_models_that_are_not_configured_any_more",
    ),
)
