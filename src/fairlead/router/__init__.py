"""Which job runs where: the fair queue, the scheduler, models that are loaded and evicted, quotas."""
