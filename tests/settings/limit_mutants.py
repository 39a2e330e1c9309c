"""Mutants of limits and of reload."""

from settings.mutants import Mutant

_DISPATCHER = "fairlead.router.dispatch.dispatcher:Dispatcher"
_FLEET = "fairlead.router.fleet.fleet:Fleet"
_CATALOG = "fairlead.router.fleet.catalog:ModelCatalog"
_LOCAL = "fairlead.router.fleet.local_models:LocalModels"
_KEY = "apiKeys[].limits"

LIMITS = (
    Mutant(
        "fairlead.router.quotas.quotas:Quota.check",
        "self.running >= self._concurrent",
        "False",
        "play",
        f"{_KEY}.concurrent",
    ),
    Mutant(
        "fairlead.router.quotas.quotas:Charge.end",
        "self._quota.running -= 1",
        "pass",
        "play",
        f"{_KEY}.concurrent",
    ),
    Mutant(
        "fairlead.router.quotas.quotas:Charge.charge_answer",
        "tokens > self._answer_tokens",
        "False",
        "play",
        f"{_KEY}.tokensPerMinute",
    ),
    Mutant(
        "fairlead.router.quotas.quotas:QuotaWindow.spend",
        "self._spent += amount",
        "pass",
        "play",
        f"{_KEY}.requestsPerMinute",
    ),
    Mutant(
        "fairlead.router.dispatch.queue:Queue.is_full.fget",
        ">= self.capacity",
        "> self.capacity",
        "play",
        "queue.capacity",
    ),
    Mutant(
        "fairlead.router.dispatch.admission:JobAdmission.refusal",
        "not self._queue.has_bytes_for(job)",
        "False",
        "play",
        "queue.waitingBytes",
    ),
    Mutant(
        "fairlead.router.dispatch.queued_bytes:QueuedBytes.has_room",
        "not excess or excess <= self._left",
        "True",
        "play",
        "queue.waitingBytes",
    ),
    Mutant(f"{_DISPATCHER}._too_long", "wait_s <= most_s", "True", "play", "queue.maxEstimatedWait"),
    Mutant(
        f"{_DISPATCHER}._add", "_at + self._timeout_s(waiter.ticket)", "_at + 60.0", "play", "queue.timeout"
    ),
    Mutant(
        "fairlead.server.listener.refusals:objection",
        "len(headers) > limits.headers",
        "False",
        "play",
        "limits.headers",
    ),
    Mutant(
        "fairlead.server.listener.refusals:objection",
        "size > limits.header_bytes",
        "False",
        "play",
        "limits.headerBytes",
    ),
    Mutant(
        "fairlead.dialects.body:check_counts",
        "counts.values > limits.body_values",
        "False",
        "play",
        "limits.bodyValues",
    ),
    Mutant(
        "fairlead.generation.shares:Shares.grow",
        "self.taken > self.total",
        "False",
        "play",
        "limits.bodiesBytes",
    ),
    Mutant(
        "fairlead.server.listener.connection:ServerConnection._count",
        "unread.add(size)",
        "pass",
        "play",
        "limits.answersBytes",
    ),
    Mutant(
        "fairlead.server.listener.forwarded:TrustedProxies.client",
        "not self._is_trusted_peer(peer)",
        "True",
        "play",
        "trustedProxies",
    ),
    Mutant(
        "fairlead.server.listener.listener:Listener._admit",
        "< self._shared.limits.connections",
        "< 4096",
        "play",
        "limits.connections",
    ),
    Mutant(
        "fairlead.server.listener.listener:Listener._end_drain",
        "self._shared.limits.drain_s",
        "30.0",
        "play",
        "limits.drain",
    ),
    Mutant(
        "fairlead.server.listener.listener:Listener.run",
        "if self._shared.limits.drain_delay_s:",
        "if False:",
        "play",
        "limits.drainDelay",
    ),
    Mutant(
        "fairlead.server.listener.protocol:Protocol._recycle",
        "self._limits.idle_timeout_s",
        "75.0",
        "play",
        "limits.idleTimeout",
    ),
    Mutant(
        "fairlead.server.listener.protocol:Protocol.receive",
        "self._limits.header_timeout_s",
        "20.0",
        "play",
        "limits.headerTimeout",
    ),
    Mutant(
        "fairlead.server.routes.request_body:IncomingBody.read",
        "trio.move_on_after(self._limits.body_timeout_s)",
        "trio.move_on_after(60.0)",
        "play",
        "limits.bodyTimeout",
    ),
)

RELOAD = (
    Mutant(
        "fairlead.router.fleet.reload:_fixed", "if before == after:", "if True:", "reload", "queue.capacity"
    ),
    Mutant(
        "fairlead.router.fleet.reload:_fixed",
        "for name in FIXED:",
        "for name in FIXED[: FIXED.index('tenant_names')]:",
        "reload",
        "tenantNames",
    ),
    Mutant(
        "fairlead.router.quotas.access:Authenticator.change",
        "for api_key in api_keys)",
        "for api_key in list(api_keys) * (not hasattr(self, '_keys')))",
        "reload",
        "apiKeys[].key",
    ),
    Mutant(
        "fairlead.router.quotas.quotas:Quotas.change",
        "self._by_key = {name: earlier.get(name) or Quota(name[1]) for name in names}",
        "self._by_key = earlier or {name: Quota(name[1]) for name in names}",
        "reload",
        f"{_KEY}.concurrent",
    ),
    Mutant(f"{_FLEET}.reload", "self._local.schedule()", "pass", "reload", "lru.maxLoaded"),
    Mutant(
        f"{_LOCAL}.schedule",
        "self._dispatcher.scheduler.prioritize(config.priorities)",
        "pass",
        "reload",
        "routing.scheduler.settings.fifo.priority",
    ),
    Mutant(f"{_FLEET}.reload", "self._dispatcher.unload(name)", "pass", "reload", "models.ENGINE.dtype"),
    Mutant(
        f"{_FLEET}.reload",
        "model.name in changed and model.preload",
        "False",
        "reload",
        "models.ENGINE.preload",
    ),
    Mutant(f"{_FLEET}.reload", "self._spawn(self._replace, node_id)", "pass", "reload", "nodes[].apiKey"),
    Mutant(
        f"{_CATALOG}.apply",
        "self.selectors.clear()",
        "if self.selectors: return",
        "reload",
        "selectors.NAME.targets",
    ),
    Mutant(f"{_CATALOG}.apply", "self.aliases.update(", "dict().update(", "reload", "models.ENGINE.aliases"),
    Mutant(
        f"{_FLEET}._apply",
        "self._remote.change_health(config.health_check)",
        "pass",
        "behaviour",
        "added_node_is_probed_at_the_reloaded_interval",
    ),
    Mutant(
        "fairlead.router.fleet.managed_model:ManagedModel.change_health",
        "instance.node is not None",
        "False",
        "behaviour",
        "running_command_is_probed_at_the_reloaded_interval",
    ),
    Mutant(
        "fairlead.nodes.processes.health:HealthCheck.change",
        "self._changed.set()",
        "pass",
        "behaviour",
        "added_node_is_probed_at_the_reloaded_interval",
    ),
    Mutant(
        f"{_CATALOG}.apply",
        "self.models = {",
        "self.models = self.models or {",
        "reload",
        "models.COMMAND.description",
    ),
    Mutant(
        "fairlead.router.fleet.changes:_differences",
        "old[name] != new[name]",
        "True",
        "behaviour",
        "unchanged_model_keeps_its_process",
    ),
    Mutant(
        f"{_FLEET}.reload",
        "self._dispatcher.unload(name)",
        "self._local[name].end()",
        "behaviour",
        "removed_model_finishes_its_jobs_and_is_unloaded",
    ),
)
