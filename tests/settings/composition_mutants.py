"""Mutants of composition, which disconnect a setting, and of placement."""

from settings.mutants import Mutant

_NODE = "fairlead.nodes.engine_node"
_SCHEDULER = "fairlead.router.dispatch.schedulers:default_scheduler"
_POLICIES = "fairlead.router.swap.policies"
_DISPATCHER = "fairlead.router.dispatch.dispatcher:Dispatcher"
_ROUTES = "no_route_tells_a_tenant_of_another_ones_prompt"
_CACHE = "models.ENGINE.kvCache"
_PLACEMENT = "fairlead.router.dispatch.node_state"
_SCORE = f"{_PLACEMENT}:NodeState.score.fget"
_NODES = "fairlead.router.dispatch.node_pool:NodePool"

COMPOSITION = (
    # Settings that an audit could disconnect without a failing test.
    Mutant(
        "fairlead.router.fleet.catalog:ModelCatalog.isolates_tenants",
        'isolate == "auto"',
        "True",
        "play",
        f"{_CACHE}.isolateTenants",
    ),
    Mutant(_SCHEDULER, "min_share=queue.min_share,", "", "play", "queue.minShare"),
    Mutant(_SCHEDULER, "tenant_weights=queue.tenant_weights,", "", "play", "queue.tenantWeights"),
    Mutant(
        "fairlead.generation.job_service:JobService.job",
        "team=team,",
        "",
        "behaviour",
        "keys_of_a_team_share_its_turns",
    ),
    Mutant(
        "fairlead.generation.job_service:JobService.job",
        "team_weight=team_weight,",
        "",
        "play",
        "teams.NAME.weight",
    ),
    Mutant(
        "fairlead.server.routes.routes:Application.change_keys",
        "self._jobs.teams = teams",
        "pass",
        "reload",
        "teams.NAME.weight",
    ),
    Mutant(_SCHEDULER, "waiting_bytes=queue.waiting_bytes,", "", "play", "queue.waitingBytes"),
    Mutant(
        "fairlead.router.dispatch.wait_estimator:WaitEstimator.__init__",
        "queue.prompt_weight",
        "1.0",
        "play",
        "queue.promptWeight",
    ),
    Mutant(
        "fairlead.router.dispatch.wait_estimator:WaitEstimator.__init__",
        "queue.output_weight",
        "2.0",
        "play",
        "queue.outputWeight",
    ),
    Mutant(f"{_NODE}:worker_spec", "cache.max_entries", "None", "play", f"{_CACHE}.maxEntries"),
    Mutant(f"{_NODE}:worker_spec", "cache.eviction_threshold", "0.8", "play", f"{_CACHE}.evictionThreshold"),
    Mutant(f"{_NODE}:worker_spec", "cache.cleanup_interval_s", "1.0", "play", f"{_CACHE}.cleanupInterval"),
    Mutant(_SCHEDULER, "=options.rejects_loading", "=False", "play", "whileLoading"),
    # Settings of the cache, disconnected in the child process.
    Mutant(
        "fairlead.engine.worker.main:_engine",
        "spec.eviction_threshold",
        "0.8",
        "play",
        f"{_CACHE}.evictionThreshold",
    ),
    Mutant(
        "fairlead.engine.worker.main:_engine",
        "spec.cleanup_interval_s",
        "1.0",
        "play",
        f"{_CACHE}.cleanupInterval",
    ),
    Mutant(
        "fairlead.engine.worker.main:_engine",
        'spec.eviction_policy == "fifo"',
        "False",
        "play",
        f"{_CACHE}.evictionPolicy",
    ),
    # The isolation of tenants, dropped for one kind of job, or decided for all time.
    *(
        Mutant(function, old, new, "behaviour", scenario)
        for function, old, new, scenario in (
            (
                "fairlead.generation.job_service:JobService.job",
                "cache_owner=caller.tenant if",
                'cache_owner="" if',
                _ROUTES,
            ),
            (
                "fairlead.generation.job_service:JobService.job",
                "cache_owner=caller.tenant if",
                "cache_owner=caller.api_key.key if",
                "what_a_tenant_finds_is_what_it_would_find_alone",
            ),
            (f"{_NODE}:_salt", "if not job.cache_owner:", "if not job.stream:", _ROUTES),
            (f"{_NODE}:_salt", "if not job.cache_owner:", "if job.n > 1:", _ROUTES),
            (f"{_NODE}:_salt", "if not job.cache_owner:", 'if job.path.endswith("messages"):', _ROUTES),
            (
                "fairlead.router.fleet.catalog:ModelCatalog.apply",
                "self.config = config",
                "",
                "second_key_isolates_the_tenants_at_once",
            ),
        )
    ),
    # Other settings.
    Mutant(f"{_NODE}:worker_spec", "watchdog_s=model.watchdog_s,", "", "play", "models.ENGINE.watchdog"),
    Mutant(f"{_NODE}:worker_spec", "max_batch=model.max_batch,", "", "play", "models.ENGINE.maxBatch"),
    Mutant(f"{_NODE}:worker_spec", "threads=model.threads,", "", "play", "models.ENGINE.threads"),
    Mutant(f"{_NODE}:worker_spec", "parallel=model.parallel,", "", "play", "models.ENGINE.parallel"),
    Mutant(_SCHEDULER, "fairness=queue.fairness,", "", "play", "queue.fairness"),
    Mutant(
        f"{_DISPATCHER}.__init__",
        "min(queue.starvation_bound_s, queue.timeout_s)",
        "queue.timeout_s",
        "play",
        "queue.starvationBound",
    ),
    Mutant(
        "fairlead.generation.gateway:Gateway.__init__",
        "= request_timeout_s",
        "= 600.0",
        "play",
        "requestTimeout",
    ),
    Mutant(
        "fairlead.nodes.command_node:CommandNode._new_run",
        "config.use_model_name or ",
        "",
        "play",
        "models.COMMAND.useModelName",
    ),
    Mutant(
        "fairlead.nodes.command_node:CommandNode._new_run",
        "environment=config.env,",
        "",
        "play",
        "models.COMMAND.env",
    ),
    Mutant("fairlead.nodes.remote_node:remote_node", "api_key=config.api_key,", "", "play", "nodes[].apiKey"),
    Mutant(
        "fairlead.nodes.remote_node:remote_node",
        "filters=config.filters,",
        "",
        "play",
        "peers.NAME.filters.setParams",
    ),
    Mutant(
        "fairlead.nodes.remote_node:upstream_timeouts",
        "limit_s or math.inf",
        "math.inf if name == 'between_bytes_s' else limit_s or math.inf",
        "play",
        "nodes[].timeouts.betweenBytes",
    ),
    Mutant(
        f"{_POLICIES}:_matrix",
        "evict_costs=swap.evict_costs",
        "",
        "play",
        "matrix.evict_costs",
    ),
    Mutant(f"{_POLICIES}:_lru", "capacity_mb=swap.memory_mb, ", "", "play", "lru.memoryMb"),
    Mutant(f"{_POLICIES}:_group", "group.persistent", "False", "play", "groups.NAME.persistent"),
)

PLACEMENT = (
    Mutant(
        _SCORE,
        "0.3 * load + 0.7 * busy",
        "0.7 * load + 0.3 * busy",
        "behaviour",
        "busy_seats_count_more_than_a_reported_load",
    ),
    Mutant(_SCORE, "0.3 * load + ", "", "behaviour", "reported_load_counts"),
    Mutant(
        _SCORE,
        "self._limits.load is None",
        "True",
        "behaviour",
        "reported_load_counts",
    ),
    Mutant(
        _SCORE,
        "return self._has_failed, self.busy > 0, ",
        "return self._has_failed, False, ",
        "behaviour",
        "idle_node_is_preferred_whatever_it_reports",
    ),
    Mutant(
        f"{_NODES}._with_bonus",
        "score - CACHE_BONUS * share",
        "score",
        "behaviour",
        "job_goes_to_the_node_that_has_its_prefix_cached",
    ),
    Mutant(
        f"{_NODES}._best",
        "self._prefixes.add(node, job.prefixes)",
        "pass",
        "behaviour",
        "job_goes_to_the_node_that_has_its_prefix_cached",
    ),
    Mutant(
        f"{_NODES}.avoided",
        "avoided.add(failed)",
        "pass",
        "behaviour",
        "failed_job_is_retried_on_the_other_node",
    ),
    Mutant(
        f"{_NODES}.close",
        "self.leave(node)",
        "pass",
        "behaviour",
        "drained_node_gets_no_more_jobs_and_stays_drained_after_a_reload",
    ),
    Mutant(f"{_NODES}._take", "node.acquire(run.tokens, run.seats)", "pass", "play", "queue.capacity"),
    Mutant(
        f"{_PLACEMENT}:NodeState.free.fget",
        "self._limits.seats - self.busy",
        "self._limits.seats",
        "play",
        "nodes[].seats",
    ),
    Mutant(
        "fairlead.router.dispatch.model_lifecycle:ModelLifecycle._expect_expiry",
        "trio.current_time() + max(",
        "trio.current_time() + 60 * max(",
        "play",
        "models.ENGINE.ttl",
    ),
)
