"""The schedulers that a configuration can name."""

from fairlead.base.registry import Registry
from fairlead.router.dispatch.effects import Effects
from fairlead.router.dispatch.scheduler import Scheduler
from fairlead.router.dispatch.scheduling import JobScheduler, SchedulerFactory, SchedulingOptions


def default_scheduler(effects: Effects, options: SchedulingOptions) -> JobScheduler:
    """Return the scheduler of this package: one fair queue over the seats of all nodes."""
    queue = options.queue
    return Scheduler(
        effects,
        capacity=queue.capacity,
        random=options.random,
        fairness=queue.fairness,
        min_share=queue.min_share,
        suspends=queue.suspension,
        preempting=[queue.classes.index(name) for name in queue.preempt],
        tenant_weights=queue.tenant_weights,
        rejects_loading=options.rejects_loading,
        waiting_bytes=queue.waiting_bytes,
    )


SCHEDULERS: Registry[SchedulerFactory] = Registry(
    "scheduler", "fairlead.schedulers", {"default": default_scheduler}
)
